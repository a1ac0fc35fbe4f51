"""Board: the weights that the trainer publishes, for engines that read a copy of them.

What is published waits in buffers of its own, so that neither side ever reads what the other is writing. A copy of the model is
written into between two looks, and never rebound: captured graphs know its addresses.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.sharding import whole
from posttrain.rollout.engines.gathered_engine import GatheredEngine
from posttrain.rollout.feed.worker import ReadInPlace

Buffer = list[Tensor]
NEWEST = -1  # no label: whatever is newest
PUBLISH_SECONDS = 300.0


class Board:
    """Labels and their weights. Those that will not be asked for any more make room for others."""

    def __init__(
        self,
        source: Sequence[Tensor],
        allocate: Callable[[], Buffer] | None = None,
        sharded_dtype: torch.dtype | None = None,
    ) -> None:
        """`source`: the trainer's weights. `allocate` makes a buffer for them; None: beside them, on their device. Where they are
        held in pieces, `sharded_dtype` is what they are computed with, and all processes publish together."""
        self.source, self.sharded_dtype = source, sharded_dtype
        self.allocate = allocate or (lambda: [self._empty(weight) for weight in source])
        self.buffers: dict[int, Buffer] = {}  # by label
        self.newest = 0  # of them
        self.read_seconds: list[float] = []  # that each reader held its engine for, since they were last read
        self._readers: Counter[int] = Counter()
        self._spare: list[Buffer] = []
        self._marks: dict[int, torch.cuda.Event] = {}  # by id of a buffer
        self._lock = threading.Condition()

    @torch.no_grad()
    def publish(self, label: int, oldest: int) -> None:
        """By the trainer, between two steps. Labels below `oldest` are not asked for any more."""
        with self._lock:
            for old in [old for old in self.buffers if old < oldest and not self._readers[old]]:
                self._spare.append(self.buffers.pop(old))
            buffer = self._spare.pop() if self._spare else self.allocate()
        _wait_for(self._marks.pop(id(buffer), None))  # until its last reader is done
        for kept, weight in zip(buffer, self.source):
            kept.copy_(weight if self.sharded_dtype is None else whole(weight))
        self._mark(buffer)
        with self._lock:
            self.buffers[label], self.newest = buffer, label
            self._lock.notify_all()

    def _empty(self, weight: Tensor) -> Tensor:
        if self.sharded_dtype is None:
            return torch.empty_like(weight)
        return torch.empty(weight.shape, dtype=self.sharded_dtype, device=weight.device)

    @contextmanager
    def reading(self, label: int) -> Iterator[tuple[int, Buffer]]:
        """The weights of this label or, where others have replaced it since it was asked about, of the newest; and which."""
        with self._lock:
            # the one buffer that there is may just be written
            self._lock.wait_for(lambda: self.buffers, PUBLISH_SECONDS)
            label = label if label in self.buffers else max(self.buffers)
            self._readers[label] += 1
            buffer = self.buffers[label]
        began = time.perf_counter()
        try:
            _wait_for(self._marks.get(id(buffer)))  # for the trainer that wrote it
            yield label, buffer
        finally:
            self._mark(buffer)
            with self._lock:
                self._readers[label] -= 1
                self.read_seconds.append(time.perf_counter() - began)

    def paused_seconds(self) -> list[float]:
        """Of each copy of the weights that a worker took since the last question: it writes nothing meanwhile."""
        with self._lock:
            seconds, self.read_seconds = self.read_seconds, []
            return seconds

    def _mark(self, buffer: Buffer) -> None:
        """The next user of the buffer, perhaps on another stream of the GPU, waits for what was queued until here."""
        if buffer and (buffer[0].is_cuda or self.source[0].is_cuda):
            self._marks[id(buffer)] = torch.cuda.Event()
            self._marks[id(buffer)].record()


def _wait_for(mark: torch.cuda.Event | None) -> None:
    if mark is not None:
        torch.cuda.current_stream().wait_event(mark)


def trained_weights(model: nn.Module, gathered: GatheredEngine | None = None) -> dict[str, nn.Parameter]:
    """What a copy of the model needs from each version; the rest is the same in all of them, or nothing is written with it."""
    known = model if gathered is None else gathered.copy
    names = {name for name, _ in known.named_parameters()}
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad and name in names}


class Shadow(ReadInPlace):
    """A copy of the model. Weights that are not trained (the base of an adapter) are shared with it, unless they lie in pieces."""

    def __init__(self, model: nn.Module, board: Board, gathered: GatheredEngine | None = None) -> None:
        """It has the newest weights of the board. `gathered`: the engine of a model that lies in pieces."""
        self.copied: dict[int, Any] = {}  # by id: what is a copy of what
        if gathered is None:
            self.copied = {id(tensor): tensor for tensor in model.parameters() if not tensor.requires_grad}
            self.model = copy.deepcopy(model, self.copied)
        else:
            self.model = gathered.whole_copy()
        own = dict(self.model.named_parameters())
        self._own = [own[name] for name in trained_weights(model, gathered)]
        for parameter in self._own:
            parameter.requires_grad_(False)
            parameter.grad = None
        self.board = board
        self.label = self.load(NEWEST)

    @torch.no_grad()
    def load(self, label: int) -> int:
        """Called by the thread that runs the engine, between two looks. Returns which it is: this one, or a newer."""
        with self.board.reading(label) as (self.label, buffer):
            for own, kept in zip(self._own, buffer):
                own.copy_(kept)
        return self.label
