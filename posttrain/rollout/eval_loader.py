"""EvalRolloutLoader: every prompt of an evaluation set answered by the model as it is, with the same noise each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from posttrain.core.sample import Sample
from posttrain.data.collate import Collator
from posttrain.rollout.loader import as_units
from posttrain.rollout.prompt_rows import PromptRows
from posttrain.rollout.rollout import Request

PROMPTS_AT_ONCE = 256  # of one process: enough to fill an engine, few enough to hold


class EvalRolloutLoader:
    """Micro-batches of up to `batch_size` samples, group after group. Every process collects equally often.

    `finish` is called when all prompts have been answered.
    """

    def __init__(
        self,
        rows: PromptRows,
        num_generations: int,
        batch_size: int,
        collect: Callable[[PromptRows, list[Request]], list[Sample | None]],
        finish: Callable[[], None],
        collate: Collator,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset, self.num_generations, self.batch_size = rows, num_generations, batch_size
        self.collect, self.finish, self.collate = collect, finish, collate
        self.rank, self.world_size = rank, world_size

    def _runs(self) -> list[range]:
        """Rows of this process in each collection; the same number of runs on every process, the last ones may be empty."""
        share = -(-len(self.dataset) // self.world_size)
        first, stop = self.rank * share, min((self.rank + 1) * share, len(self.dataset))
        return [
            range(min(first + at, stop), min(first + at + PROMPTS_AT_ONCE, stop))
            for at in range(0, share, PROMPTS_AT_ONCE)
        ]

    def _batches_of(self, prompts: int) -> int:
        return max(-(-prompts * self.num_generations // self.batch_size), 1)

    def __len__(self) -> int:
        return sum(map(self._batches_of, self._counts()))

    def _counts(self) -> list[int]:
        """Prompts of the fullest process in each collection: batches are as many everywhere."""
        share = -(-len(self.dataset) // self.world_size)
        return [min(PROMPTS_AT_ONCE, share - at) for at in range(0, share, PROMPTS_AT_ONCE)]

    def __iter__(self) -> Iterator[Any]:
        for run, fullest in zip(self._runs(), self._counts()):
            requests = [Request(row, row, sample) for row in run for sample in range(self.num_generations)]
            samples = self.collect(self.dataset, requests)
            for number in range(self._batches_of(fullest)):
                part = samples[number * self.batch_size : (number + 1) * self.batch_size]
                yield self.collate(as_units([sample for sample in part if sample is not None], self.collate))
        self.finish()
