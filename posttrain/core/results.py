"""What a forward pass and a loss hand back, and the one place where a loss is divided."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.core.batch import StepTotals, TokenBatch


@dataclass
class TokenScores:
    """What a model says about the trained tokens of a batch."""

    logps: Tensor | None = None  # (N,) log-prob of each trained token; detached when only `nll_sum` was asked for
    nll_sum: Tensor | None = None  # () differentiable sum of -logps, when the loss is a plain sum
    stats: dict[str, Tensor] = field(default_factory=dict)  # name -> (N,), detached
    aux_loss: Tensor | None = None  # () load-balancing loss of a mixture of experts
    rewards: Tensor | None = None  # (S,) from a sequence head


@dataclass
class LossTerm:
    """Numbers to be summed, and the name of the count their sum is divided by."""

    values: Tensor
    per: str
    weight: float = 1.0


@dataclass(frozen=True)
class Extremum:
    """A metric that is the smallest or the largest of its values, over micro-batches and processes, and no mean of them."""

    values: Tensor  # of any shape; empty: nothing to choose from
    is_largest: bool


Metrics = dict[str, Tensor | Extremum]
"""Name -> per-unit (or per-sample, per-token) values, of which a log shows the mean, or an Extremum."""


@dataclass
class LossOutput:
    """The answer of a method's `loss`: one or several terms, and the numbers to log.

    Metrics are of all values that were added to the MetricStore since the last log. They are detached when they are stored.
    """

    terms: list[LossTerm]
    metrics: Metrics = field(default_factory=dict)

    def __init__(self, values: Tensor | list[LossTerm], per: str = "unit", metrics: Metrics | None = None) -> None:
        self.terms = values if isinstance(values, list) else [LossTerm(values, per)]
        self.metrics = metrics or {}

    def reduce(self, totals: StepTotals, world_size: int = 1) -> Tensor:
        """sum over terms of `weight * sum(values) / totals[per]`, times the number of processes.

        Gradients are *averaged* over data-parallel processes, hence the factor. Correct under accumulation, uneven
        processes, packing and empty micro-batches by construction: this is the only division in the library.
        """
        parts = [term.weight * term.values.sum() / totals.denominator(term.per) for term in self.terms]
        return torch.stack(parts).sum() * world_size if len(parts) > 1 else parts[0] * world_size

    def local(self, batch: TokenBatch) -> Tensor:
        """The loss of this batch alone, as if it were the whole step."""
        return self.reduce(batch.totals())
