"""Packing: no token lost or doubled, blocks never too long, and as full as best-fit decreasing makes them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import Sample
from posttrain.data.packing import (
    PACKING_STRATEGIES,
    PackedDataset,
    merge,
    pack_bfd,
    pack_bfd_split,
    pack_wrapped,
    packing_strategy,
)
from posttrain.data.store.report import PreparationReport

lengths = st.lists(st.integers(0, 40), max_size=60)


class Samples:
    """What PackedDataset asks for, of samples whose tokens count up."""

    def __init__(self, sizes):
        self.sample_lengths = np.array(sizes, dtype=np.int64)
        self.num_samples, self.roles, self.fingerprint = len(sizes), ("text",), "x"
        self.report = PreparationReport("train", "read")

    def sample(self, index):
        start = int(self.sample_lengths[:index].sum())
        size = int(self.sample_lengths[index])
        return Sample(np.arange(start, start + size), np.ones(size, dtype=bool), row=index)


def pieces(packing):
    return [packing.block(i).tolist() for i in range(len(packing))]


def test_hand_worked_blocks():
    """Lengths 7, 2, 1, 3 in blocks of 4. bfd cuts 7 to 4: blocks {4}, {3, 1}, {2}. Split: parts 4 and 3 of the first."""
    sizes = np.array([7, 2, 1, 3])
    assert pieces(pack_bfd(sizes, 4)) == [[[0, 0, 4]], [[3, 0, 3], [2, 0, 1]], [[1, 0, 2]]]
    assert pack_bfd(sizes, 4).dropped_tokens == 3
    assert pieces(pack_bfd_split(sizes, 4)) == [[[0, 0, 4]], [[0, 4, 7], [2, 0, 1]], [[3, 0, 3]], [[1, 0, 2]]]
    assert pieces(pack_wrapped(sizes, 4)) == [
        [[0, 0, 4]],
        [[0, 4, 7], [1, 0, 1]],
        [[1, 1, 2], [2, 0, 1], [3, 0, 2]],
        [[3, 2, 3]],
    ]
    assert pack_wrapped(sizes, 4).filled == 13 / 16


def naive_best_fit(sizes, capacity):
    """Every block looked at for every piece; of equal room, the block that was not touched for longest."""
    blocks, touched = [], []
    for step, i in enumerate(sorted(range(len(sizes)), key=lambda i: -min(sizes[i], capacity))):
        size = min(sizes[i], capacity)
        rooms = [capacity - sum(s for _, s in block) for block in blocks]
        fitting = [(room, touched[b], b) for b, room in enumerate(rooms) if room >= size > 0]
        if fitting:
            _, _, best = min(fitting)
            blocks[best].append((i, size))
            touched[best] = step
        elif size:
            blocks.append([(i, size)])
            touched.append(step)
    return blocks


@settings(deadline=None)
@given(lengths, st.integers(1, 25))
def test_bfd_is_best_fit_decreasing(sizes, capacity):
    expected = [[[i, 0, size] for i, size in block] for block in naive_best_fit(sizes, capacity)]
    assert pieces(pack_bfd(np.array(sizes, dtype=int), capacity)) == expected


@settings(deadline=None)
@given(lengths, st.integers(1, 25), st.sampled_from(sorted(PACKING_STRATEGIES)))
def test_every_token_once_and_no_block_too_long(sizes, capacity, strategy):
    packing = packing_strategy(strategy)(np.array(sizes, dtype=int), capacity)
    seen = [token for i, start, stop in packing.pieces.tolist() for token in [(i, t) for t in range(start, stop)]]
    expected = {(i, t) for i, n in enumerate(sizes) for t in range(min(n, capacity) if strategy == "bfd" else n)}
    assert len(seen) == len(set(seen))
    assert set(seen) == expected
    assert packing.dropped_tokens == sum(sizes) - len(expected)
    block_sizes = [sum(stop - start for _, start, stop in block) for block in pieces(packing)]
    assert all(0 < size <= capacity for size in block_sizes)
    if strategy == "wrapped":
        assert all(size == capacity for size in block_sizes[:-1])
        assert seen == sorted(seen)


@pytest.mark.parametrize("strategy", sorted(PACKING_STRATEGIES))
def test_hundred_thousand_rows_in_two_seconds(strategy):
    sizes = np.minimum(np.random.default_rng(0).lognormal(5, 1, 100_000).astype(int) + 1, 8000)
    start = time.process_time()
    packing = packing_strategy(strategy)(sizes, 2048)
    assert time.process_time() - start < 2
    assert packing.filled > 0.99


def test_dataset_of_blocks():
    packed = PackedDataset(Samples([7, 2, 1, 3]), 4, "bfd_split")
    assert [[s.input_ids.tolist() for s in unit] for unit in packed] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6], [9]],
        [[10, 11, 12]],
        [[7, 8]],
    ]
    assert [[s.row for s in unit] for unit in packed] == [[0], [0, 2], [3], [1]]
    assert packed.unit_lengths.tolist() == [4, 4, 3, 2]
    assert packed[-1][0].input_ids.tolist() == [7, 8]
    assert "4 blocks of 4 tokens by bfd_split, 81.2% full; 1 samples split" in packed.report.summary()
    with pytest.raises(IndexError, match="Block 4 of 4"):
        packed[4]


def test_wrapped_blocks_are_one_sequence_that_goes_on():
    packed = PackedDataset(Samples([7, 2, 1, 3]), 4, "wrapped")
    assert [len(unit) for unit in packed] == [1, 1, 1, 1]
    assert np.concatenate([unit[0].input_ids for unit in packed]).tolist() == list(range(13))
    assert packed[1][0].num_trained == 3, "the first token of the second document is predicted from the first"


def test_cut_tokens_are_reported():
    report = PackedDataset(Samples([7, 9, 1]), 4, "bfd").report
    assert "8 tokens cut off 2 samples longer than a block" in report.summary()


def test_merge_keeps_what_is_aligned():
    first = Sample([1, 2], [False, True], per_token={"x": np.array([0.0, 1.0])}, row=4)
    merged = merge([first, Sample([3], [True], per_token={"x": np.array([2.0])}, row=5)])
    assert merged.input_ids.tolist() == [1, 2, 3]
    assert merged.trained.tolist() == [False, True, True]
    assert merged.per_token["x"].tolist() == [0, 1, 2]
    assert merged.row == 4


def test_unknown_strategy_and_capacity_are_refused():
    with pytest.raises(ValueError, match="packing_strategy='best'; it must be one of bfd, bfd_split, wrapped"):
        packing_strategy("best")
    assert packing_strategy("bfd-requeue") is pack_bfd_split
    with pytest.raises(ValueError, match="not None"):
        PackedDataset(Samples([1]), None)
