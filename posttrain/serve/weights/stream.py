"""A version on its way straight into the engine: requests queue parts, the engine's thread loads them in order.

Nothing is held beside the weights that serve but the part under way, so from the first part to the last no version serves.
"""

from __future__ import annotations

import hmac
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bodies import PieceEntry, refuse_duplicates
from ..engine.protocol import DTYPES
from ..errors import Conflict, PayloadError, ServeError, TransportFailed
from ..wire import block_sums
from ..wire.payload import STREAM_ALIGNMENT, TensorSpec, combined

WAITING_PARTS = 2
"""Received and not yet loaded; each takes memory of the device."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class _Part:
    tensors: list[tuple[str, Tensor]]
    is_last: bool


class WeightStream:
    def __init__(self, version: int, silent_seconds: float) -> None:
        """`silent_seconds`: without a part, before the version is given up."""
        self.version = version
        self.specs: dict[str, TensorSpec] = {}  # of the tensors that came, with checksums
        self.has_begun = False  # the engine was given a tensor
        self.outcome: Future[None] = Future()  # of the load
        self._silent_seconds = silent_seconds
        self._parts: queue.Queue[_Part] = queue.Queue(WAITING_PARTS)
        self._next = 0
        self._failure: ServeError | None = None
        self._lock = threading.Lock()  # one part at a time

    def take(
        self, number: int, entries: list[PieceEntry], is_last: bool, receive: Callable[[int], Tensor], seconds: float
    ) -> None:
        """Receive a part, verify it and queue it for the engine. Whatever is wrong with it ends the stream."""
        end = time.monotonic() + seconds
        with self._lock:
            try:
                if number != self._next:
                    raise Conflict(f"Part {number} of version {self.version} was sent, but part {self._next} is next.")
                refuse_duplicates([*self.specs, *(entry.name for entry in entries)])
                part = _Part(_verified(entries, receive(entries[-1].end)), is_last)
                self.specs |= {entry.name: entry.spec() for entry in entries}  # first: with the last part the load ends
                self._enqueue(part, end)
            except ServeError as error:
                self.cancel(error)
                raise
            self._next += 1

    def _enqueue(self, part: _Part, end: float) -> None:
        while True:
            if self._failure is not None or self.outcome.done():
                raise TransportFailed(f"Version {self.version} was given up: {self._failure or 'its load has ended'}")
            try:
                return self._parts.put(part, timeout=POLL_SECONDS)
            except queue.Full:
                if time.monotonic() > end:
                    raise TransportFailed("The engine did not take the parts before this one in time.") from None

    def cancel(self, why: ServeError) -> None:
        self._failure = self._failure or why

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """In the engine's thread, which waits here for the next part."""
        silent_since = time.monotonic()
        while True:
            try:
                part = self._parts.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self._failure is not None:
                    raise self._failure from None
                if time.monotonic() - silent_since > self._silent_seconds:
                    sentence = f"No part of version {self.version} came for {self._silent_seconds:g} s."
                    raise TransportFailed(sentence) from None
                continue
            self.has_begun = True
            yield from part.tensors
            if any(tensor.is_cuda for _, tensor in part.tensors):
                torch.cuda.synchronize()  # the engine may copy on a stream of its own, and the next part takes the same memory
            if part.is_last:
                return
            silent_since = time.monotonic()


def _verified(entries: list[PieceEntry], data: Tensor) -> list[tuple[str, Tensor]]:
    """Views of the data, each with the checksum that was announced; whole tensors only."""
    found, end = [], 0
    for entry in entries:
        spec = entry.spec()
        aligned = entry.begin % STREAM_ALIGNMENT == 0 and entry.begin >= end
        if entry.offset or not aligned or entry.end - entry.begin != spec.nbytes:
            raise PayloadError(
                f"{spec.name}: bytes {entry.begin} to {entry.end} cannot be {spec.dtype} {list(spec.shape)}."
            )
        end = entry.end
        piece = data[entry.begin : end]
        kind = spec.checksum.partition(":")[0]
        if kind != block_sums.KIND:
            raise PayloadError(f"{spec.name} has no checksum of the kind {block_sums.KIND}.")
        if not hmac.compare_digest(combined(block_sums.of_tensor(piece), kind), spec.checksum):
            raise PayloadError(f"The bytes of {spec.name} do not have their checksum: they were changed on the way.")
        if not piece.numel():
            piece = torch.empty(0, dtype=torch.uint8, device=data.device)
        found.append((spec.name, piece.view(DTYPES[spec.dtype]).view(spec.shape)))
    return found
