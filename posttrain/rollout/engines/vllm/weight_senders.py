"""The transports by which a trainer sends the parts of a version to one server: one table.

Names, shapes and checksums always go over HTTP, as do the announcement of a version and its commit; only the data takes another
transport. So no transport has to be trusted: bytes that do not have their checksum are refused.

A `Sender` brings bytes of host memory to the server's, where a version is staged; a `Streamer` tensors from where they are
straight into the engine.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from posttrain.serve.errors import TransportFailed
from posttrain.serve.wire import cuda_ipc
from posttrain.serve.wire.collective import GLOO, NCCL, Pair, Rendezvous, available_backends, in_background
from posttrain.serve.wire.host_memory import HostMemory, copy_bytes
from posttrain.serve.wire.payload import COLLECTIVE, CUDA_IPC, MAX_FETCH_SECONDS, SHARED_MEMORY
from posttrain.serve.wire.shared_blocks import Block, SharedFolder, host_id

T = TypeVar("T")

HTTP = "http"
SERVERS_MARGIN = 0.8
"""The server gives up a little earlier than the trainer: its refusal says more than a silence."""
JOIN_SECONDS = 60.0
PARALLEL_PARTS = 4
"""Parts that are sent concurrently: as many as a server fetches at once."""
GRACE_SECONDS = 3.0
"""Where one side of an exchange has ended, so long for the other."""


@dataclass(frozen=True)
class Wire:
    """What a sender uses of a server's client."""

    post: Callable[[str, Any, float], Any]
    host: str
    port: int
    seconds: float  # for one part

    def part(self, body: memoryview) -> Any:
        return self.post("/weights/part", body, self.seconds)

    def fetch(self, transport: str, head: bytes, place: dict[str, Any]) -> Any:
        """Let the server get the data from `place`."""
        fields = {"transport": transport, "head": base64.b64encode(head).decode(), "place": place}
        deadline = min(self.seconds * SERVERS_MARGIN, MAX_FETCH_SECONDS)
        return self.post("/weights/fetch", fields | {"deadline_s": deadline}, self.seconds)

    def stream_part(self, transport: str, part: dict[str, Any], place: dict[str, Any]) -> Any:
        """Let the server get the tensors of a part of a stream from `place`."""
        deadline = min(self.seconds * SERVERS_MARGIN, MAX_FETCH_SECONDS)
        fields = part | {"transport": transport, "place": place, "deadline_s": deadline}
        return self.post("/weights/stream/part", fields, self.seconds)

    def join(self, rendezvous: dict[str, Any], seconds: float) -> Any:
        return self.post("/weights/collective", rendezvous | {"deadline_s": seconds * SERVERS_MARGIN}, seconds)


@dataclass(frozen=True)
class Sides:
    """What is known when a transport is chosen."""

    server: dict[str, Any]  # `transports` of its /info
    device: torch.device  # where the trainer has its weights

    def offer(self, name: str) -> dict[str, Any] | None:
        return self.server.get("ways", {}).get(name)

    @property
    def one_machine(self) -> bool:
        return host_id() is not None and self.server.get("host") == host_id()

    @property
    def own_gpu(self) -> str | None:
        return cuda_ipc.gpu_ids()[self.device.index or 0] if self.device.type == "cuda" else None


class WeightTransport:
    """One transport to one server. TransportFailed where it does not work."""

    def __init__(self, wire: Wire, sides: Sides) -> None:
        self._wire = wire

    @classmethod
    def suits(cls, sides: Sides) -> bool:
        """Whether "auto" takes it."""
        return cls.why_not(sides) is None

    @staticmethod
    def why_not(sides: Sides) -> str | None:
        """None where it can be tried, or the sentence that says why not."""
        return None

    def close(self) -> None:
        """Free blocks, buffers and groups."""


class Sender(WeightTransport):
    """`send` returns the server's answer. Up to PARALLEL_PARTS threads may send; `free_buffers` and `close` need all to be done."""

    def send(self, head: bytes, chunks: Sequence[memoryview]) -> Any:
        raise NotImplementedError

    def free_buffers(self) -> None:
        """Between two versions."""

    def close(self) -> None:
        self.free_buffers()


class Streamer(WeightTransport):
    """`send` returns when the server has the data. Used by one thread."""

    def send(self, part: dict[str, Any], data: Tensor) -> Any:
        """`part`: the fields of `bodies.StreamPart` that say what the data is."""
        raise NotImplementedError


class HttpSender(Sender):
    def __init__(self, wire: Wire, sides: Sides) -> None:
        self._wire, self._memory = wire, HostMemory()

    def send(self, head: bytes, chunks: Sequence[memoryview]) -> Any:
        pieces = [memoryview(head), *chunks]
        nbytes = sum(len(piece) for piece in pieces)
        body, at = self._memory.take(1 << nbytes.bit_length())[:nbytes], 0  # few sizes, so that it is found again
        for piece in pieces:
            copy_bytes(piece, body[at : at + len(piece)])
            at += len(piece)
        return self._wire.part(body)

    def free_buffers(self) -> None:
        self._memory = HostMemory()


class SharedMemorySender(Sender):
    """Each part is a file in /dev/shm, from which the server copies it. The same few files serve all parts of a version."""

    @staticmethod
    def why_not(sides: Sides) -> str | None:
        offer = sides.offer(SHARED_MEMORY)
        if offer is None:
            return "the server offers no shared memory."
        if not sides.one_machine:
            return "the server runs on another machine."
        try:
            found = Path(offer["folder"]).lstat()
        except OSError as error:
            return f"the server's folder {offer['folder']} is not seen by this process ({error.strerror})."
        if (found.st_dev, found.st_ino) != (offer["device"], offer["inode"]):
            return f"the server's folder {offer['folder']} is another one here: the two are in different containers."
        return None

    def __init__(self, wire: Wire, sides: Sides) -> None:
        self._wire = wire
        self._free: list[Block] = []
        try:
            self._folder = SharedFolder(Path(sides.offer(SHARED_MEMORY)["folder"]))
        except OSError as error:
            raise TransportFailed(str(error)) from error

    def send(self, head: bytes, chunks: Sequence[memoryview]) -> Any:
        try:
            block = self._written(chunks)
        except OSError as error:
            raise TransportFailed(f"A block could not be written to {self._folder.path} ({error.strerror}).") from error
        try:
            return self._wire.fetch(SHARED_MEMORY, head, {"name": block.name})
        finally:
            self._free.append(block)

    def _written(self, chunks: Sequence[memoryview]) -> Block:
        try:
            block = self._free.pop()
        except IndexError:  # all are in use
            return self._folder.write(chunks)
        try:
            block.write(chunks)
        except OSError:
            block.close()
            raise
        return block

    def free_buffers(self) -> None:
        while self._free:
            self._free.pop().close()

    def close(self) -> None:
        self.free_buffers()
        self._folder.close()


class CudaIpcStreamer(Streamer):
    """Each part is copied into a buffer on the GPU, which the server opens, copies on the same GPU, and closes.

    The buffer stays: torch keeps an account of every one that was shared.
    """

    @staticmethod
    def why_not(sides: Sides) -> str | None:
        offer = sides.offer(CUDA_IPC)
        if sides.own_gpu is None:
            return "the trainer's weights are not on a CUDA device."
        if offer is None:
            return "the server's engine does not run on a CUDA device in the server's own process."
        if not sides.one_machine or sides.own_gpu not in offer["gpus"]:
            return f"the server does not see the trainer's GPU {sides.own_gpu}."
        return None

    def __init__(self, wire: Wire, sides: Sides) -> None:
        self._wire, self._device = wire, sides.device
        self._buffer: Tensor | None = None
        self._place: dict[str, Any] = {}

    def send(self, part: dict[str, Any], data: Tensor) -> Any:
        try:
            if self._buffer is None or self._buffer.numel() < data.numel():
                self._buffer = None  # before the next one is taken
                self._buffer = torch.empty(data.numel(), dtype=torch.uint8, device=self._device)
                self._place = cuda_ipc.share(self._buffer)
            self._buffer[: data.numel()].copy_(data)
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise TransportFailed(f"The GPU's memory cannot be shared ({str(error).splitlines()[0][:300]}).") from error
        return self._wire.stream_part(CUDA_IPC, part, self._place)

    def close(self) -> None:
        self._buffer = None


class CollectiveStreamer(Streamer):
    """Each part is a broadcast in a group of this trainer and the server: NCCL between GPUs, gloo otherwise."""

    @classmethod
    def suits(cls, sides: Sides) -> bool:
        return cls.backend(sides) == NCCL  # over gloo it is no faster than HTTP

    @staticmethod
    def backend(sides: Sides) -> str | None:
        offer = sides.offer(COLLECTIVE)
        offered = offer["backends"] if offer else []
        gpus = (sides.offer(CUDA_IPC) or {}).get("gpus", [])
        one_gpu = sides.one_machine and bool(gpus) and sides.own_gpu == gpus[0]  # NCCL takes a GPU once only
        if sides.own_gpu is not None and not one_gpu and NCCL in offered and NCCL in available_backends():
            return NCCL
        return GLOO if GLOO in offered and GLOO in available_backends() else None

    @staticmethod
    def why_not(sides: Sides) -> str | None:
        return None if CollectiveStreamer.backend(sides) else "trainer and server have no backend of torch in common."

    def __init__(self, wire: Wire, sides: Sides) -> None:
        self._wire, self._key = wire, secrets.token_hex(16)
        backend = self.backend(sides)
        device = sides.device if backend == NCCL else torch.device("cpu")
        try:
            rendezvous = Rendezvous(wire.host, wire.port, self._key, wire.seconds)
        except (OSError, RuntimeError) as error:
            raise TransportFailed(f"No store could be opened for the server ({error}).") from error
        where = {"backend": backend, "address": rendezvous.address, "port": rendezvous.port, "key": self._key}
        seconds = min(wire.seconds, JOIN_SECONDS)
        _, self._pair = _both(
            lambda: wire.join(where, seconds), lambda: rendezvous.pair(backend, seconds, device), seconds
        )
        if self._pair is None:
            raise TransportFailed("The server reports that it has joined the group, but it has not.")

    def send(self, part: dict[str, Any], data: Tensor) -> Any:
        pair: Pair = self._pair
        if pair.is_closed:
            raise TransportFailed("Trainer and server were out of step in their group.")
        buffer = pair.buffer(data.numel())
        buffer.copy_(data)
        answer, sent = _both(
            lambda: self._wire.stream_part(COLLECTIVE, part, {"group": self._key}),
            lambda: (pair.broadcast(buffer, self._wire.seconds), True),
            self._wire.seconds,
        )
        if sent is None:  # it did not need it; but the two ends are out of step from here on
            pair.close()
        return answer

    def close(self) -> None:
        self._pair.close()


def _both(ask: Callable[[], Any], act: Callable[[], T], seconds: float) -> tuple[Any, T | None]:
    """The server's answer, and what was done in the group meanwhile (None: nothing, and the server did not need it).

    What the server says counts most: that it is gone, or refuses, explains why the group fails.
    """
    asked, acted = in_background(ask, "weights"), in_background(act, "weights")
    wait([asked, acted], seconds + GRACE_SECONDS, FIRST_EXCEPTION)
    wait([asked], GRACE_SECONDS)
    if asked.done():
        answer = asked.result()
        wait([acted], GRACE_SECONDS)
        return answer, acted.result() if acted.done() and acted.exception() is None else None
    error = acted.exception() if acted.done() else None
    raise TransportFailed(str(error) if error else f"The group of trainer and server was silent for {seconds:g} s.")


STREAMERS: dict[str, type[Streamer]] = {CUDA_IPC: CudaIpcStreamer, COLLECTIVE: CollectiveStreamer}
SENDERS: dict[str, type[Sender]] = {SHARED_MEMORY: SharedMemorySender, HTTP: HttpSender}
"""All transports; "auto" takes the first that can be tried, a streaming one if there is one."""
