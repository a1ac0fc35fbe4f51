"""One version of the weights on its way straight into the engines of servers: no copy in host memory, verified where it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.transport import ServerError
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.kept_weights import dtype_of
from posttrain.rollout.engines.vllm.transport import in_parallel
from posttrain.serve.errors import TransportFailed
from posttrain.serve.wire import block_sums
from posttrain.serve.wire.payload import STREAM_ALIGNMENT, TensorSpec, combined, fingerprint

PART_BYTES = 256 << 20
"""Of whole tensors that travel together; one that is larger travels alone."""

Weights = Iterable[tuple[str, Tensor]]


class VersionStream:
    """Sends what is read through it. Where a server fails, the stream has ended with `error`, and the version is to be staged."""

    def __init__(self, clients: Sequence[ServerClient], device: torch.device, version: int, in_flight: str) -> None:
        self.version, self.specs = version, []
        self.error: ServerError | TransportFailed | None = None
        self._clients, self._device = list(clients), device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._parts = 0
        self._all(lambda client: client.open_stream(version, in_flight, device))

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.specs)

    def through(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """What comes, once it was sent; after a failure it is only passed on."""
        waiting: list[tuple[str, Tensor]] = []
        nbytes = 0
        for name, tensor in weights:
            if waiting and nbytes + tensor.nbytes > PART_BYTES:
                self._send(waiting, is_last=False)
                yield from waiting
                waiting, nbytes = [], 0
            waiting.append((name, tensor))
            nbytes = _aligned(nbytes) + tensor.nbytes
        self._send(waiting, is_last=True)
        yield from waiting

    def commit(self) -> None:
        """Returns when all servers serve the version, or with `error`."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._all(lambda client: client.commit_stream(self.version, self.fingerprint))

    def _send(self, tensors: Sequence[tuple[str, Tensor]], is_last: bool) -> None:
        if self.error is None:
            entries, data = self._packed(tensors)
            part = {"version": self.version, "part": self._parts, "last": is_last, "tensors": entries}
            self._parts += 1
            self._all(lambda client: client.stream_part(part, data))

    def _packed(self, tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[dict[str, Any]], Tensor]:
        """(what a server is to know of each tensor, their bytes one after the other)."""
        total = 0
        for _, tensor in tensors:
            total = _aligned(total) + tensor.nbytes
        if self._buffer.numel() < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # freed before the next one is taken
            self._buffer = torch.empty(total, dtype=torch.uint8, device=self._device)
        entries, end = [], 0
        for name, tensor in tensors:
            begin = _aligned(end)
            end = begin + tensor.nbytes
            piece = self._buffer[begin:end]
            piece.copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
            checksum = combined(block_sums.of_tensor(piece), block_sums.KIND)
            self.specs.append(TensorSpec(name, dtype_of(name, tensor), tuple(tensor.shape), checksum))
            entries.append({**vars(self.specs[-1]), "offset": 0, "begin": begin, "end": end})
        return entries, self._buffer[:end]

    def _all(self, act: Callable[[ServerClient], None]) -> None:
        """With every server at once. The first failure ends the stream at all of them."""
        if self.error is not None:
            return
        failures = [one for one in in_parallel(act, self._clients) if isinstance(one, BaseException)]
        if not failures:
            return
        self.abort(failures[0])
        for error in failures:
            if not isinstance(error, ServerError | TransportFailed):
                raise error
        self.error = failures[0]

    def abort(self, cause: BaseException) -> None:
        """End the stream at all servers now: they would wait a minute for the next part, and serve no version meanwhile."""
        reason = f"{type(cause).__name__}: {cause}"
        in_parallel(lambda client: client.abort(self.version, reason), self._clients)


def _aligned(at: int) -> int:
    return -(-at // STREAM_ALIGNMENT) * STREAM_ALIGNMENT
