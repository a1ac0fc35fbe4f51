"""What a forward pass and a loss hand back, and the one place where a loss is divided."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.core.batch import StepTotals, TokenBatch


@dataclass
class TokenScores:
    """What a model says about the trained tokens of a batch, from one forward pass."""

    logps: Tensor | None = None  # (N,) log-prob of each trained token; detached when only `nll_sum` was asked for
    nll_sum: Tensor | None = None  # () differentiable sum of -logps, when the loss is a plain sum
    # name -> (N,) or (N, K); detached, unless asked for otherwise
    stats: dict[str, Tensor] = field(default_factory=dict)
    aux_loss: Tensor | None = None  # () load-balancing loss of a mixture of experts
    rewards: Tensor | None = None  # (S,) from a sequence head
    values: Tensor | None = None  # (N,) from a head at the positions that predict the trained tokens
    labels: Tensor | None = None  # (N, L) from a head at the trained tokens themselves
    rows: Tensor | None = None  # (N, H) hidden states
    divergences: Tensor | None = None  # (N,) from a teacher's distribution, differentiable by the student


SUMMED = "sum"


@dataclass
class LossTerm:
    """Numbers to be summed, and the name of the count their sum is divided by.

    There is one number for each thing that is counted, unless `entries` names another: the likelihood of an answer is one
    number a unit and may be divided by tokens. `SUMMED` stands for a sum that was taken already.
    """

    values: Tensor
    per: str
    weight: float = 1.0
    entries: str | None = None

    def check(self, batch: TokenBatch) -> None:
        """Raise where there are more or fewer values than their sum is divided by: a mean, a part, another dimension.

        A mean of B values would train with a gradient that is B times too small, and nothing else would show it.
        """
        if not isinstance(self.values, Tensor):
            raise TypeError(f"A loss must return a tensor of values; this one returned a {type(self.values).__name__}.")
        entries = self.entries or self.per
        if entries in (SUMMED, "batch"):
            expected, fits = "()", self.values.numel() == 1
        else:
            # An empty batch has a lone token that belongs to no sample; numbers about it are allowed and are not counted.
            sizes = {"token": batch.num_trained, "sequence": len(batch.counts), "unit": batch.num_units}
            size = sizes[entries.partition(":")[0]]
            expected, fits = f"({size},)", self.values.shape == (size,)
        if not fits:
            raise ValueError(
                f"A loss returned values of shape {tuple(self.values.shape)}. Their sum is divided per {self.per}, over the whole "
                f"optimizer step, so there must be one value for each {entries} of the batch: shape {expected}. "
                "Return the values themselves; do not take their mean or sum, and do not select some of them (multiply by a "
                "mask instead)."
            )


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

    def check(self, batch: TokenBatch) -> None:
        """Raise where a term does not have as many values as it says (see `LossTerm.check`)."""
        for term in self.terms:
            term.check(batch)

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
