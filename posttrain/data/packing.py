"""Packing: which samples, or parts of them, share a block of `capacity` tokens.

All three strategies look at the lengths of the whole dataset. `bfd` (best-fit decreasing) puts each sample, longest first,
into the fullest block that still has room, after cutting it to the block size; `bfd_split` first cuts longer samples into
parts and keeps them all; `wrapped` writes all samples one after the other and cuts every `capacity` tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from posttrain.core.sample import Sample, Unit


@dataclass(frozen=True)
class Packing:
    """Blocks of pieces. `pieces` is (pieces, 3): sample, start, stop; block b holds `offsets[b]:offsets[b + 1]`."""

    pieces: np.ndarray
    offsets: np.ndarray
    capacity: int
    dropped_tokens: int = 0  # cut off by `bfd`
    cut_samples: int = 0  # samples that were cut or split

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def block(self, index: int) -> np.ndarray:
        return self.pieces[self.offsets[index] : self.offsets[index + 1]]

    @property
    def filled(self) -> float:
        """Share of the blocks' room that holds tokens."""
        if not len(self):
            return 0.0
        return float((self.pieces[:, 2] - self.pieces[:, 1]).sum() / (len(self) * self.capacity))


def pack_bfd(lengths: np.ndarray, capacity: int) -> Packing:
    """Best-fit decreasing; samples longer than a block lose their end, which is counted."""
    lengths = np.asarray(lengths, dtype=np.int64)
    kept = np.minimum(lengths, capacity)
    samples = np.flatnonzero(kept)
    pieces = np.stack([samples, np.zeros_like(samples), kept[samples]], axis=1)
    packing = _best_fit(pieces, capacity)
    return replace(packing, dropped_tokens=int((lengths - kept).sum()), cut_samples=int((lengths > capacity).sum()))


def pack_bfd_split(lengths: np.ndarray, capacity: int) -> Packing:
    """Best-fit decreasing of parts no longer than a block; no token is lost."""
    lengths = np.asarray(lengths, dtype=np.int64)
    parts = -(-lengths // capacity)
    samples = np.repeat(np.arange(len(lengths)), parts)
    order_in_sample = np.arange(len(samples)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = order_in_sample * capacity
    pieces = np.stack([samples, starts, np.minimum(starts + capacity, lengths[samples])], axis=1)
    return replace(_best_fit(pieces, capacity), cut_samples=int((parts > 1).sum()))


def _best_fit(pieces: np.ndarray, capacity: int) -> Packing:
    """Each piece, longest first, into the block with the least room that is enough; a new block where none has it.
    Of blocks with equal room, the one that has had it longest is taken.

    Blocks are kept by the room they have, in a sorted list of the distinct rooms: O(n log n) for n pieces.
    """
    sizes = pieces[:, 2] - pieces[:, 1]
    order = np.argsort(-sizes, kind="stable")
    block_of = np.empty(len(pieces), dtype=np.int64)
    rooms: list[int] = []
    blocks_with: dict[int, deque[int]] = {}
    num_blocks = 0
    for piece, size in zip(order.tolist(), sizes[order].tolist()):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            block, room = num_blocks, capacity
            num_blocks += 1
        else:
            room = rooms[at]
            block = blocks_with[room].popleft()
            if not blocks_with[room]:
                del blocks_with[room], rooms[at]
        block_of[piece] = block
        left = room - size
        if left:
            if left not in blocks_with:
                blocks_with[left] = deque()
                insort(rooms, left)
            blocks_with[left].append(block)
    by_block = order[np.argsort(block_of[order], kind="stable")]  # inside a block the longest piece comes first
    counts = np.bincount(block_of, minlength=num_blocks)
    return Packing(pieces[by_block], np.concatenate([[0], np.cumsum(counts)]), capacity)


def pack_wrapped(lengths: np.ndarray, capacity: int) -> Packing:
    """Samples one after the other, cut every `capacity` tokens; the last block is as long as what is left."""
    lengths = np.asarray(lengths, dtype=np.int64)
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    cuts = np.unique(np.concatenate([[0], stops, np.arange(0, total, capacity), [total]]))
    begins, ends = cuts[:-1], cuts[1:]
    samples = np.searchsorted(stops, begins, side="right")
    sample_starts = stops[samples] - lengths[samples]
    pieces = np.stack([samples, begins - sample_starts, ends - sample_starts], axis=1)
    num_blocks = -(-total // capacity)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(begins // capacity, minlength=num_blocks))]).astype(np.int64)
    cut = len(np.unique(samples[pieces[:, 1] > 0]))
    return Packing(pieces, offsets, capacity, cut_samples=cut)


PACKING_STRATEGIES: dict[str, Callable[[np.ndarray, int], Packing]] = {
    "bfd": pack_bfd,
    "bfd_split": pack_bfd_split,
    "wrapped": pack_wrapped,
}
MERGING_STRATEGIES = ("wrapped",)
"""Strategies whose block is one sequence: documents see each other, as in pre-training."""
CUTTING_STRATEGIES = ("bfd",)
"""Strategies that cut a sample to the block size; the others want samples at their full length."""


def check_packing(strategy: str, dataset: str) -> None:
    """Images travel with whole samples; strategies that split samples would split images."""
    if strategy not in CUTTING_STRATEGIES:
        raise ValueError(
            f"{dataset} has rows with images, which packing_strategy={strategy!r} would cut in two: use {CUTTING_STRATEGIES[0]!r}."
        )


def packing_strategy(name: str) -> Callable[[np.ndarray, int], Packing]:
    """The function behind a strategy's name; TRL's old name `bfd-requeue` is `bfd_split`."""
    name = {"bfd-requeue": "bfd_split", "bfd_requeue": "bfd_split"}.get(name, name)
    if name not in PACKING_STRATEGIES:
        raise ValueError(f"packing_strategy={name!r}; it must be one of {', '.join(PACKING_STRATEGIES)}.")
    return PACKING_STRATEGIES[name]


def merge(samples: list[Sample]) -> Sample:
    """One sequence of several: the first token of a document is predicted from the document before it."""
    if len(samples) == 1:
        return samples[0]
    return Sample(
        np.concatenate([sample.input_ids for sample in samples]),
        np.concatenate([sample.trained for sample in samples]),
        per_token={n: np.concatenate([s.per_token[n] for s in samples]) for n in samples[0].per_token},
        scalars=dict(samples[0].scalars),
        row=samples[0].row,
    )


class PackedDataset:
    """A view of a prepared dataset of single samples whose units are blocks: tuples of the samples of one block."""

    def __init__(self, samples: Any, capacity: int, strategy: str = "bfd") -> None:
        """`samples` has `num_samples`, `sample_lengths` and `sample(i)`, as PreparedDataset does."""
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(
                f"Packing needs max_length, the size of a block, to be a positive number, not {capacity!r}."
            )
        self.samples, self.strategy = samples, strategy
        self.packing = packing_strategy(strategy)(samples.sample_lengths, capacity)
        self.roles, self.report = samples.roles, samples.report.packed(self.packing, strategy)
        self.fingerprint = xxhash.xxh3_128_hexdigest(f"{samples.fingerprint}/{strategy}/{capacity}".encode())

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, index: int) -> Unit:
        if not -len(self) <= index < len(self):
            raise IndexError(f"Block {index} of {len(self)}.")
        index %= len(self)
        block = [self._piece(*piece) for piece in self.packing.block(index).tolist()]
        return (merge(block),) if self.strategy in MERGING_STRATEGIES else tuple(block)

    def _piece(self, index: int, start: int, stop: int) -> Sample:
        sample = self.samples.sample(index)
        return sample if (start, stop) == (0, len(sample)) else sample.slice(start, stop)

    @property
    def unit_lengths(self) -> np.ndarray:
        """Tokens of each block."""
        sizes = self.packing.pieces[:, 2] - self.packing.pieces[:, 1]
        return np.add.reduceat(sizes, self.packing.offsets[:-1]) if len(self) else np.zeros(0, dtype=np.int64)
