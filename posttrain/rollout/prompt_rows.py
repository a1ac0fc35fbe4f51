"""PromptRows: the prompts of a dataset, ready for an engine, and the rows that rewards want to see."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from posttrain.core.sample import Unit
from posttrain.data.rows.formats import Detection
from posttrain.data.store.prepare import PreparedDataset

ROWS_HASHED = 256


@dataclass(frozen=True)
class PromptRow:
    """One prompt: as tokens for the engine, as text or messages for rewards, with the other columns of its row."""

    ids: np.ndarray
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    row: int  # in the user's dataset

    @property
    def is_conversational(self) -> bool:
        return not isinstance(self.prompt, str)


def prompt_row(unit: Unit, raw: dict[str, Any], detection: Detection) -> PromptRow:
    """An encoded prompt together with the row that it was made from."""
    (sample,) = unit
    clean, _, _ = detection.read(raw)
    theirs = detection.columns.get("prompt", "prompt")
    columns = {name: value for name, value in raw.items() if name not in ("prompt", theirs)}
    return PromptRow(sample.input_ids, clean["prompt"], columns, sample.row)


class PromptRows:
    """`prepared` holds checked and encoded prompts; `dataset` the user's rows, every column of them."""

    def __init__(self, prepared: PreparedDataset, dataset: Any) -> None:
        self.prepared, self.dataset = prepared, dataset

    @property
    def report(self) -> Any:
        """What became of the rows when they were checked."""
        return self.prepared.report

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any prompt; of the columns that only rewards read, a few hundred rows are looked at."""
        places = np.unique(np.linspace(0, len(self.dataset) - 1, ROWS_HASHED).astype(int))
        rows = json.dumps([self.dataset[int(place)] for place in places], default=str, sort_keys=True)
        return f"{self.prepared.fingerprint}-{xxhash.xxh3_64_hexdigest(rows.encode())}"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(max(self.prepared.unit_lengths))

    def __len__(self) -> int:
        return len(self.prepared)

    def __getitem__(self, index: int) -> PromptRow:
        unit = self.prepared[index]
        return prompt_row(unit, self.dataset[unit[0].row], self.prepared.detection)

    def take(self, indices: Iterable[int]) -> dict[int, PromptRow]:
        """Index -> its row; each is read once, however often it is asked for."""
        return {index: self[index] for index in dict.fromkeys(indices)}
