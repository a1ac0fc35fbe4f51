"""Park activations in host memory between the forward and the backward pass.

Under full checkpointing a layer keeps nothing but its input, so what waits in host memory are the layers' inputs: 200 KB a token
for a 7B model, which a side stream copies out while the next layers compute and brings back one layer before the backward
needs it. Copies are exact, and so is the gradient. Without checkpointing every large activation goes the same way.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_BYTES = 2**20  # moving less costs more time than it saves memory
STAY = 2  # the newest activations stay: the backward begins with them
COPIES_AT_ONCE = 3  # unfinished copies; with more, the device waits rather than hold the tensors


def offloaded_activations(device: torch.device) -> AbstractContextManager:
    """A context for the forward and backward pass of a micro-batch. Buffers are kept from one to the next."""
    if device.type != "cuda":
        return nullcontext()  # they are in host memory already
    return _offloader(device).parking()


@functools.lru_cache
def _offloader(device: torch.device) -> Offloader:
    return Offloader(SideStream(device))


class Parked:
    """One saved tensor: here, on its way out, away, or back."""

    __slots__ = ("parcel", "place", "tensor", "ticket", "version")

    def __init__(self, tensor: Tensor, place: int) -> None:
        self.tensor: Tensor | None = tensor
        self.place = place
        self.version = tensor._version
        self.parcel: Any = None
        self.ticket: Any = None

    def holds(self, tensor: Tensor) -> bool:
        mine = self.tensor
        if mine is None or self.version != tensor._version or mine.dtype != tensor.dtype:
            return False
        return (mine.data_ptr(), mine.shape, mine.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())


class Offloader:
    """Hooks on saved tensors: sends all but the newest away, brings each back one before it is needed."""

    def __init__(self, transport: SideStream, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.transport, self.smallest_bytes = transport, smallest_bytes
        self.parked: list[Parked | None] = []  # in the order of the forward; None: the backward has used it
        self.leaving: list[Parked] = []

    @contextmanager
    def parking(self) -> Any:
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            for parked in list(self.leaving):  # a forward without backward
                self._keep(parked)
            self.parked = []

    def pack(self, tensor: Tensor) -> Tensor | Parked:
        large = tensor.numel() * tensor.element_size() >= self.smallest_bytes
        if not large or _is_parameter(tensor) or not self.transport.can_travel(tensor):
            return tensor
        for known in self.parked[-STAY:]:  # several operations keep the same tensor
            if known is not None and known.holds(tensor):
                return known
        parked = Parked(tensor.detach(), len(self.parked))
        self.parked.append(parked)
        if len(self.parked) > STAY and self.parked[-STAY - 1] is not None:
            self._send(self.parked[-STAY - 1])
        return parked

    def _send(self, parked: Parked) -> None:
        _check_unchanged(parked)
        parked.parcel, parked.ticket = self.transport.send(parked.tensor)
        self.leaving.append(parked)
        while self.leaving and (len(self.leaving) > COPIES_AT_ONCE or self.transport.is_done(self.leaving[0].ticket)):
            gone = self.leaving.pop(0)
            self.transport.settle(gone.ticket)
            gone.tensor = gone.ticket = None

    def unpack(self, saved: Tensor | Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        tensor = self._here(saved)
        if saved.place < len(self.parked) and self.parked[saved.place] is saved:
            self.parked[saved.place] = None  # autograd alone decides how long it lives from here on
        before = next((p for p in reversed(self.parked[: saved.place]) if p is not None), None)
        if before is not None:
            self._bring(before)
        return tensor

    def _here(self, parked: Parked) -> Tensor:
        if parked in self.leaving:
            self._keep(parked)
        self._bring(parked)
        if parked.ticket is not None:
            self.transport.settle(parked.ticket)
            parked.ticket = None
        return parked.tensor

    def _keep(self, parked: Parked) -> None:
        """It has not gone yet: it stays, and nothing writes over it before the copy has ended."""
        self.leaving.remove(parked)
        self.transport.settle(parked.ticket)
        self.transport.discard(parked.parcel)
        parked.parcel = parked.ticket = None

    def _bring(self, parked: Parked) -> None:
        if parked.tensor is None:
            parked.tensor, parked.ticket = self.transport.bring(parked.parcel)
            parked.parcel, parked.version = None, parked.tensor._version
        elif parked.ticket is None:
            _check_unchanged(parked)


def _check_unchanged(parked: Parked) -> None:
    if parked.tensor._version != parked.version:
        raise RuntimeError(
            f"An activation of shape {tuple(parked.tensor.shape)} was changed in place after it was saved for the backward. "
            "Set `activation_offloading=False` to see which operation did it."
        )


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def _fills_its_memory(tensor: Tensor) -> bool:
    """No gaps and no element twice, in whatever order of dimensions: then strides can be kept on the way."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.size()) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class SideStream:
    """Page-locked buffers that are used again, and a stream of its own for the copies of one CUDA device.

    Both directions use the same stream, so a buffer may be given away as soon as the copy out of it has been queued. `ticket`s
    stand for copies under way: what is sent must not be changed, and what is brought not be read, before they are settled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.free: dict[int, list[Tensor]] = {}

    def can_travel(self, tensor: Tensor) -> bool:
        return tensor.is_cuda and _fills_its_memory(tensor)

    def send(self, tensor: Tensor) -> tuple[Any, torch.cuda.Event]:
        size = tensor.numel() * tensor.element_size()
        buffer = self._buffer(size)
        host = buffer[:size].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        return (buffer, host), self.stream.record_event()

    def bring(self, parcel: tuple[Tensor, Tensor]) -> tuple[Tensor, torch.cuda.Event]:
        host = parcel[1]
        # allocated on the stream that will use it; strides as they were, so that the same kernels run as without offloading
        tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            tensor.copy_(host, non_blocking=True)
        self.discard(parcel)
        return tensor, self.stream.record_event()

    def discard(self, parcel: tuple[Tensor, Tensor]) -> None:
        self.free.setdefault(parcel[0].numel(), []).append(parcel[0])

    def settle(self, ticket: torch.cuda.Event) -> None:
        """What follows on the device waits for the copy; the host does not."""
        torch.cuda.current_stream(self.device).wait_event(ticket)

    def is_done(self, ticket: torch.cuda.Event) -> bool:
        return ticket.query()

    def _buffer(self, size: int) -> Tensor:
        """Sizes come in steps of an eighth: micro-batches of about the same length share their buffers."""
        step = max(1 << max(size.bit_length() - 4, 0), SMALLEST_BYTES // 8)
        rounded = -(-size // step) * step
        waiting = self.free.get(rounded)
        return waiting.pop() if waiting else torch.empty(rounded, dtype=torch.uint8, pin_memory=True)
