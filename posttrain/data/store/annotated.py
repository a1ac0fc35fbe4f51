"""A prepared dataset with one more number on every trained token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from posttrain.core.sample import Sample, Unit
from posttrain.data.store.row_store import RowStore, row_key


class AnnotatedDataset(Dataset):
    """`dataset` whose Samples also carry `per_token[name]`, looked up in a store by what the sample is.

    Nothing is read before its unit is; rows may come in any order, and twice.
    """

    def __init__(self, dataset: Any, name: str, store: RowStore) -> None:
        self.dataset, self.name, self.store = dataset, name, store

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":  # copying and pickling look for these before __init__ has run
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> Unit:
        return tuple(self._with_numbers(sample) for sample in self.dataset[index])

    def _with_numbers(self, sample: Sample) -> Sample:
        numbers = np.zeros(len(sample), dtype=np.float32)
        if sample.num_trained:
            numbers[1:][sample.trained[1:]] = self.store.read(row_key(sample))
        return replace(sample, per_token={**sample.per_token, self.name: numbers})
