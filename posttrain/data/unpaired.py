"""Rows that carry a label each: pairs taken apart, and rows with a partner, whose answer is also read under their own prompt.

KTO asks how far the policy has moved from its reference in general. It asks on mismatched rows: the prompt of one, the answer of
another (arXiv:2402.01306, section 4.1). Partners come from the same optimizer step, so that the estimate is the step's own and does
not depend on how its rows are cut into micro-batches and dealt out to processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from posttrain.core.sample import KEEP_END, KEEP_START, Sample, Unit
from posttrain.data.loader import ORDERS, EpochBatches
from posttrain.data.store.row_store import DatasetView
from posttrain.data.truncation import window_of

MAX_CANDIDATES = 64
"""Rows among which a partner with another prompt is looked for; a dataset of few prompts would be searched whole for each row."""
Key = int | tuple[int, np.ndarray]
"""A row, and the rows of its optimizer step in their order; a row alone has the whole dataset for its step."""


class UnpairedRows(DatasetView):
    """Pairs, row by row: the chosen answer with the label 1, then the rejected one with the label 0."""

    roles = ("completion",)

    def __len__(self) -> int:
        return self.dataset.num_samples

    def __getitem__(self, index: int) -> Unit:
        return (labelled(self.dataset.sample(index), index),)

    @property
    def unit_lengths(self) -> np.ndarray:
        return self.dataset.sample_lengths


class UnpairedStream(IterableDataset):
    """A stream of pairs, row by row."""

    roles = ("completion",)

    def __init__(self, pairs: Any) -> None:
        self.pairs, self.report = pairs, pairs.report

    def set_epoch(self, epoch: int) -> None:
        self.pairs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Unit]:
        for unit in self.pairs:
            yield from ((labelled(sample, place),) for place, sample in enumerate(unit))


def labelled(sample: Sample, place: int) -> Sample:
    """What is known of a pair (a margin, numbers of a reference) is left behind."""
    return replace(sample, scalars={"label": float(place % 2 == 0)})


# ---- partners --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Partners:
    """How rows get their partners."""

    max_length: int | None = None
    truncation_mode: str = KEEP_START
    within_step: bool = True  # False: a partner may be any row of the dataset

    def given(self, sample: Sample, others: Iterable[Sample]) -> Sample:
        """The sample with a twin: its prompt, and the answer of the first of the `others` that has another prompt.

        Where there is none, or where the prompt leaves no room for an answer, the twin trains nothing and counts for nothing.
        """
        prompt, _ = parted(sample)
        for other in itertools.islice(others, MAX_CANDIDATES):
            its_prompt, answer = parted(other)
            if not _asks_the_same(its_prompt, prompt):
                twin = prompt.append(answer.input_ids, False, images=answer.images, positions=_from_zero(answer))
                twin.trained = np.concatenate([prompt.trained, answer.trained])
                # A twin is cut even under `error` and `drop`: its length says nothing about the row.
                mode = KEEP_END if self.truncation_mode == KEEP_END else KEEP_START
                window = window_of(twin, self.max_length, mode)
                if window is not None and window[1] > window[0]:
                    return replace(sample, twin=twin.slice(*window))
                break
        return replace(sample, twin=Sample(sample.input_ids[:1], [False], row=sample.row))

    def given_all(self, units: Sequence[Unit]) -> list[Unit]:
        """Units of one sample each, with partners from among themselves: the one before, the first one's is the last."""
        samples = [unit[0] for unit in units]
        before = [
            [samples[other] for other in range(place - 1, place - len(samples), -1)] for place in range(len(samples))
        ]
        return [(self.given(sample, others),) for sample, others in zip(samples, before)]


def parted(sample: Sample) -> tuple[Sample, Sample]:
    """(prompt, answer) of a sample, without the numbers that stand beside its tokens."""
    begin = int(sample.trained.argmax())
    bare = replace(sample, per_token={}, scalars={})
    return bare.slice(0, begin), bare.slice(begin, len(sample))


def _asks_the_same(one: Sample, other: Sample) -> bool:
    """Equal words about other pictures are another question."""
    keys = ([image.key for image in sample.images] for sample in (one, other))
    return np.array_equal(one.input_ids, other.input_ids) and next(keys) == next(keys)


def _from_zero(answer: Sample) -> np.ndarray | None:
    return None if answer.positions is None or not len(answer) else answer.positions - answer.positions[0, 0]


class PartneredRows(DatasetView):
    """Rows with their partners; a key may name the rows among which the partner is."""

    def __init__(self, dataset: Any, partners: Partners) -> None:
        super().__init__(dataset)
        self.partners = partners

    def __getitem__(self, key: Key) -> Unit:
        row, together = key if isinstance(key, tuple) else (key, None)
        if together is None:
            others = (place % len(self) for place in range(row - 1, row - len(self), -1))
        else:
            place = int(np.flatnonzero(together == row)[0])
            others = (int(together[number]) for number in range(place - 1, place - len(together), -1))
        (sample,) = self.dataset[row]
        return (self.partners.given(sample, (self.dataset[other][0] for other in others)),)


class PartneredBatches(EpochBatches):
    """EpochBatches that tells each row which rows its optimizer step has."""

    def __iter__(self) -> Iterator[list[Key]]:
        rows = ORDERS[self.order](self)[: len(self) * self.window]
        step = self.window * self.accumulation
        for number, share in enumerate(super().__iter__()):
            first = number // self.accumulation * step
            yield [(row, rows[first : first + step]) for row in share]
