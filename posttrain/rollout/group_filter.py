"""GroupFilter: of each group only the completions that a function of the user's scores highest are trained on (GFPO)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.core.processes import of_every_process
from posttrain.rollout.collector import Collected

GroupScores = Callable[[list[list[Any]], list[list[float]]], Sequence[Sequence[float]]]


class GroupFilter:
    """GFPO, arXiv:2508.09726: `score(group_completions, group_rewards)` gives each completion a number, and the `remain` of each
    group with the highest stay. Of equal ones the earlier stays. The function is given completions that have a reward.
    """

    def __init__(self, score: GroupScores, remain: int) -> None:
        self.score, self.remain = score, remain

    def kept(self, collected: Collected, world_size: int) -> Tensor:
        """(N,) bool, of the samples of all processes: a group may lie on several of them. The first one asks the function."""
        table, totals = collected.table, collected.totals
        parts = of_every_process([rollout.completion for rollout in collected.rollouts], world_size)
        completions = [completion for part in parts for completion in part]
        known = ~(table.masked | totals.isnan())
        groups = [(known & (table.groups == number)).nonzero()[:, 0].tolist() for number in table.groups.unique()]
        groups = [members for members in groups if members]
        scores = self._agreed(
            [[completions[i] for i in m] for m in groups], [totals[m].tolist() for m in groups], world_size
        )
        kept = torch.zeros_like(known)
        for members, numbers in zip(groups, scores):
            best = sorted(range(len(members)), key=lambda i: -numbers[i])[: self.remain]
            kept[[members[i] for i in best]] = True
        return kept

    def _agreed(self, completions: list[list[Any]], rewards: list[list[float]], world_size: int) -> list[list[float]]:
        """What the first process finds, on all of them: a function with noise would tell each something else."""
        if world_size > 1 and torch.distributed.get_rank() > 0:
            scores, problem = of_every_process((None, None), world_size)[0]
            if problem is not None:
                raise RuntimeError(f"The group filter failed on the first process: {problem}")
            return scores
        try:
            scores = self._scores(completions, rewards)
        except Exception as error:  # the others wait for an answer
            of_every_process((None, f"{type(error).__name__}: {error}"), world_size)
            raise
        return of_every_process((scores, None), world_size)[0][0]

    def _scores(self, completions: list[list[Any]], rewards: list[list[float]]) -> list[list[float]]:
        """What the function says, checked: a number for each completion."""
        found = self.score(completions, rewards)
        name = getattr(self.score, "__name__", type(self.score).__name__)
        sizes, wanted = [len(group) for group in found], [len(group) for group in completions]
        if sizes != wanted:
            raise ValueError(
                f"The group filter {name} returned groups of {sizes[:8]} scores for groups of {wanted[:8]} completions; it must "
                "return a list of scores for each group, one for each completion."
            )
        scores = [[float(number) for number in group] for group in found]
        if any(math.isnan(number) for group in scores for number in group):
            raise ValueError(f"The group filter {name} returned NaN for a completion: it cannot be ranked.")
        return scores
