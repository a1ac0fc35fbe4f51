"""Which rows go into which micro-batch of which process: a pure function of (seed, epoch, process), so that resuming is exact."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from posttrain.core.sample import Unit


@dataclass(eq=False)
class EpochBatches(Sampler[list[int]]):
    """Batch sampler of one process. Every row is in exactly one batch of an epoch, on exactly one process.

    The last window of an epoch may be short: its rows are spread over the processes and none is repeated to fill it up; a
    process that is left without a row gets an empty batch, because it must still take part in the collectives.
    """

    num_rows: int
    batch_size: int
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1
    accumulation: int = 1
    seed: int = 0
    order: str = "random"
    drop_last: bool = False
    lengths: Sequence[int] | np.ndarray | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        self.lengths = None if self.lengths is None else np.asarray(self.lengths)
        if self.order not in ORDERS:
            raise ValueError(f"`train_sampling_strategy` is {self.order!r}; it must be one of {', '.join(ORDERS)}.")

    @property
    def window(self) -> int:
        """Rows of one micro-batch over all processes."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        return self.num_rows // self.window if self.drop_last else -(-self.num_rows // self.window)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rows = ORDERS[self.order](self)
        for index in range(len(self)):
            window = rows[index * self.window : (index + 1) * self.window]
            if len(window) == self.window:
                share = window[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
            else:
                share = np.array_split(window, self.world_size)[self.rank]
            yield share.tolist()

    def shuffled(self) -> np.ndarray:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.num_rows, generator=generator).numpy()


def in_order(batches: EpochBatches) -> np.ndarray:
    return np.arange(batches.num_rows)


def grouped_by_length(batches: EpochBatches) -> np.ndarray:
    """Shuffled, then sorted by length within runs of 50 micro-batches, so that neighbours are alike but epochs differ."""
    rows = batches.shuffled()
    run = 50 * batches.window
    parts = [rows[start : start + run] for start in range(0, len(rows), run)]
    return np.concatenate([part[np.argsort(-batches.lengths[part], kind="stable")] for part in parts])


def balanced_steps(batches: EpochBatches) -> np.ndarray:
    """Shuffled; within each optimizer step the rows are dealt out so that its micro-batches have about equal tokens."""
    rows = batches.shuffled()
    step = batches.window * batches.accumulation
    whole = len(rows) // step * step
    dealt = []
    for start in range(0, whole, step):
        part = rows[start : start + step]
        part = part[np.argsort(-batches.lengths[part], kind="stable")]
        hands = part.reshape(batches.batch_size, -1)
        hands[1::2] = hands[1::2, ::-1]  # back and forth: the process with the longest row gets the shortest next
        dealt.append(hands.T.reshape(-1))
    return np.concatenate([*dealt, rows[whole:]])


ORDERS: dict[str, Callable[[EpochBatches], np.ndarray]] = {
    "random": EpochBatches.shuffled,
    "sequential": in_order,
    "group_by_length": grouped_by_length,
    "batch_rebalance": balanced_steps,
}


class UnitLoader(DataLoader):
    """torch's DataLoader over units that passes epochs on. Batches are this process's own: nothing shards them again."""

    def __iter__(self) -> Iterator[Any]:
        batches = super().__iter__()
        # Batches of a stream are read and tokenised on demand, so a thread makes them early. Those of a token store are
        # ready in 2 ms, which the queue of a GPU hides; there a second thread only takes the interpreter's lock away from the
        # first one (H200, SFT of 0.5B: 290 ms a step without, 342 ms with it).
        return read_ahead(batches) if getattr(self.dataset, "reads_ahead", False) else batches

    def set_epoch(self, epoch: int) -> None:
        for part in (self.batch_sampler, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


BATCHES_AHEAD = 2


def read_ahead(batches: Iterator[Any], depth: int = BATCHES_AHEAD) -> Iterator[Any]:
    """The same batches in the same order, up to `depth` of them made early by a thread. What the thread raises is raised here.

    Batches are functions of (seed, epoch, process): making one early, or one that is never used, changes nothing.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="posttrain-batches") as thread:
        made = deque(thread.submit(next, batches, end) for _ in range(depth))
        try:
            while (batch := made.popleft().result()) is not end:
                made.append(thread.submit(next, batches, end))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """Batches of this process from a stream of units: every process reads the stream, each keeps its own share of rows."""

    units: Iterable[Unit]
    batch_size: int
    rank: int
    world_size: int
    collate: Callable[..., Any]
    accumulation: int = 1
    arrange: Callable[[list[Unit]], list[Unit]] = list  # given the units of a whole optimizer step, of all processes
    reads_ahead: bool = True  # by a thread

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.units, "set_epoch"):
            self.units.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ValueError("A streamed dataset is read by one process: set `dataloader_num_workers=0`.")
        units, size = iter(self.units), self.batch_size * self.world_size
        while step := self.arrange(list(itertools.islice(units, size * self.accumulation))):
            for window in (step[start : start + size] for start in range(0, len(step), size)):
                if len(window) == size:
                    yield self.collate(window[self.rank * self.batch_size : (self.rank + 1) * self.batch_size])
                else:
                    bounds = [round(len(window) * part / self.world_size) for part in (self.rank, self.rank + 1)]
                    yield self.collate(window[bounds[0] : bounds[1]])


def first_of(batch: list[Any]) -> Any:
    """A stream's items are batches already."""
    return batch[0]
