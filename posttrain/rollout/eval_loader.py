"""EvalRolloutLoader: every prompt of an evaluation set answered by the model as it is, with the same noise each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.data.collate import Collator
from posttrain.rollout.collector import Collected, RolloutCollector
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.loader import units_of
from posttrain.rollout.prompt_rows import PromptRows
from posttrain.rollout.rollout import Request
from posttrain.rollout.source import WindowRules, arranged

PROMPTS_AT_ONCE = 256  # of one process: enough to fill an engine, few enough to hold


def runs_of_rows(num_rows: int, rank: int, world_size: int) -> list[range]:
    """Rows of a process in each collection; the same number of runs on every process, the last ones may be empty."""
    share = -(-num_rows // world_size)
    first, stop = rank * share, min((rank + 1) * share, num_rows)
    return [
        range(min(first + at, stop), min(first + at + PROMPTS_AT_ONCE, stop)) for at in range(0, share, PROMPTS_AT_ONCE)
    ]


class EvalRolloutLoader:
    """Micro-batches of up to `batch_size` samples, group after group. Every process collects equally often.

    What was collected stays in `collected`: the numbers of all prompts together are those of the evaluation.
    """

    def __init__(
        self,
        rows: PromptRows,
        num_generations: int,
        batch_size: int,
        params: SamplingParams,
        collector: RolloutCollector,
        rules: WindowRules,
        collate: Collator,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset, self.num_generations, self.batch_size = rows, num_generations, batch_size
        self.params, self.collector, self.rules, self.collate = params, collector, rules, collate
        self.collected: list[Collected] = []
        self.rank, self.world_size = rank, world_size

    def _batches_of(self, prompts: int) -> int:
        return max(-(-prompts * self.num_generations // self.batch_size), 1)

    def __len__(self) -> int:
        return sum(map(self._batches_of, self._counts()))

    def _counts(self) -> list[int]:
        """Prompts of the fullest process in each collection: batches are as many everywhere."""
        share = -(-len(self.dataset) // self.world_size)
        return [min(PROMPTS_AT_ONCE, share - at) for at in range(0, share, PROMPTS_AT_ONCE)]

    def __iter__(self) -> Iterator[Any]:
        self.collected = []
        runs = runs_of_rows(len(self.dataset), self.rank, self.world_size)
        for run, fullest in zip(runs, self._counts()):
            requests = [Request(row, row, sample) for row in run for sample in range(self.num_generations)]
            self.collected.append(self.collector.collect(requests, self.dataset, self.params))
            window = arranged(self.collected[-1].rollouts, self.collector.method, self.rules)
            size = self.batch_size * len(window) // max(len(requests), 1)  # units of a micro-batch
            for number in range(self._batches_of(fullest)):
                yield self.collate(units_of(window[number * size : (number + 1) * size], self.collate))
