"""The entropy of the policy as a part of the loss: a bonus for it, a controller of the bonus, a mask of certain tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.results import LossTerm

TIED = 1e-5
"""Entropies that are no further apart, in nats, are taken for equal."""


def entropy_bonus(entropies: Tensor, coefficient: float) -> LossTerm:
    """-coefficient * mean of the entropy over the trained tokens of the step, whatever the policy term is divided by.

    `entropies` is (N,), H_t = -sum_v p(v) log p(v) in nats at the position of each trained token, with gradient.
    """
    return LossTerm(-entropies, "token", coefficient)


def entropy_threshold(entropies: Tensor, top_entropy_quantile: float) -> Tensor:
    """() the entropy that the share `top_entropy_quantile` of the tokens reaches: quantile 1 - rho of all of them.

    `entropies` are those of the tokens that share one threshold: of all processes, gathered. NaN is left out.
    """
    if not 0 <= top_entropy_quantile <= 1:
        raise ValueError(f"top_entropy_quantile is a share of the tokens, from 0 to 1; got {top_entropy_quantile}.")
    known = entropies.detach().flatten()
    known = known[~known.isnan()]
    if len(known) == 0:
        return known.new_full((), float("-inf"))
    ordered = known.sort().values  # torch.quantile refuses more than 2^24 numbers
    place = (1 - top_entropy_quantile) * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 1)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def top_entropy_mask(entropies: Tensor, threshold: Tensor) -> Tensor:
    """(N,) bool, arXiv:2506.01939: tokens at which the policy was undecided; the others have no part in its gradient.

    Completions of one prompt begin with the same distribution, so that ties are common: rounding, which depends on how a batch is
    laid out, does not decide between them.
    """
    return entropies.detach() >= threshold - TIED


@dataclass
class EntropyController:
    """The coefficient of the entropy bonus, moved so that the entropy stays near a target (Skywork-OR1, arXiv:2505.22312).

    After each step with mean entropy e:  c += delta if e <= target, else c -= delta, within [minimum, maximum].
    The bonus is applied only while the last entropy is at most the target; before the first step none is known and none
    is applied.
    """

    coefficient: float
    target: float
    delta: float
    minimum: float = 0.0
    maximum: float = 1.0
    last_entropy: float | None = None

    def __post_init__(self) -> None:
        if not self.minimum <= self.coefficient <= self.maximum:
            raise ValueError(
                f"entropy_coef {self.coefficient} lies outside of entropy_coef_min {self.minimum} and "
                f"entropy_coef_max {self.maximum}, between which the controller moves it."
            )
        if self.delta < 0:
            raise ValueError(f"entropy_coef_delta is the size of a move and cannot be negative; got {self.delta}.")

    @property
    def in_force(self) -> float:
        """The coefficient to use in the coming step."""
        needed = self.last_entropy is not None and self.last_entropy <= self.target
        return self.coefficient if needed else 0.0

    def observe(self, entropy: float) -> None:
        """Take in the mean entropy, over all processes, of the step that has just been made."""
        self.last_entropy = entropy
        moved = self.coefficient + (self.delta if entropy <= self.target else -self.delta)
        self.coefficient = min(max(moved, self.minimum), self.maximum)

    def state(self) -> dict[str, float | None]:
        """What a checkpoint must hold; the rest are options."""
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy}

    def load(self, state: dict[str, float | None]) -> None:
        self.coefficient, self.last_entropy = state["coefficient"], state["last_entropy"]
