"""EvaluationLoss: the loss of an evaluation is that of all of its rows as one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.core.batch import StepTotals
from posttrain.core.results import LossOutput
from posttrain.trainer.options.base import BaseConfig


class EvaluationLoss:
    """Sums over the batches of an evaluation: the result does not depend on how its rows are cut into them."""

    def __init__(self) -> None:
        self._batches: list[tuple[list[tuple[Tensor, str]], StepTotals]] = []  # sums, and what they are divided by

    def add(self, output: LossOutput, totals: StepTotals) -> None:
        self._batches.append(([(term.weight * term.values.sum(), term.per) for term in output.terms], totals))

    def value(self, args: BaseConfig) -> float | None:
        """Over all processes; None where there was no batch."""
        if not self._batches:
            return None
        pairs = []
        for name in dict.fromkeys(per for terms, _ in self._batches for _, per in terms):
            total = sum(value for terms, _ in self._batches for value, per in terms if per == name)
            count = sum(totals.counts[name] for _, totals in self._batches)
            pairs.append(torch.stack([total.double(), total.new_tensor(count).double()]))
        sums = torch.stack(pairs)
        if args.world_size > 1:
            torch.distributed.all_reduce(sums)
        return float((sums[:, 0] / sums[:, 1].clamp(min=1)).sum())
