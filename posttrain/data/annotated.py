"""A prepared dataset with one more number on every trained token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from posttrain.core.sample import Sample, Unit


class AnnotatedDataset(Dataset):
    """`dataset` whose Samples also carry `per_token[name]`, taken from a flat array over its trained tokens.

    The array may be a memory map: nothing is read before its unit is.
    """

    def __init__(self, dataset: Any, name: str, values: np.ndarray, starts: np.ndarray) -> None:
        if len(values) != starts[-1]:
            raise ValueError(f"{name!r} has {len(values)} numbers for {starts[-1]} trained tokens.")
        self.dataset, self.name, self.values, self.starts = dataset, name, values, starts

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":  # copying and pickling look for these before __init__ has run
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Unit:
        place = int(self.starts[index])
        annotated = []
        for sample in self.dataset[index]:
            values = self.values[place : place + sample.num_trained]
            place += sample.num_trained
            annotated.append(self._with_numbers(sample, values))
        return tuple(annotated)

    def _with_numbers(self, sample: Sample, values: np.ndarray) -> Sample:
        numbers = np.zeros(len(sample), dtype=np.float32)
        numbers[1:][sample.trained[1:]] = values
        return replace(sample, per_token={**sample.per_token, self.name: numbers})


def trained_starts(dataset: Any) -> np.ndarray:
    """(units + 1,) where each unit begins in a flat array over the trained tokens of the whole dataset."""
    counts = [sum(sample.num_trained for sample in dataset[index]) for index in range(len(dataset))]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
