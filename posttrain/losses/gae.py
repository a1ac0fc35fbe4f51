"""What PPO makes of scores and of the values of tokens: rewards, advantages, whitening, the loss of the values, the KL controller.

Tokens of all completions lie end to end, (N,), and `counts` (S,) says how many belong to each: nothing is padded, so that no value
of a padded step can leak into the one before it (arXiv:1707.06347, arXiv:1506.02438, arXiv:1909.08593).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from posttrain.losses.kl import k1, k3

KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k3": k3,
    "abs": lambda logps, reference_logps: k1(logps, reference_logps).abs(),
    "mse": lambda logps, reference_logps: k1(logps, reference_logps).square() / 2,
}
"""Value of `kl_estimator` -> (log-probs of the policy, of the reference) -> the divergence at each token."""
SMALLEST_VARIANCE = 1e-8
LARGEST_ERROR = 0.2  # of the divergence, relative to its target, that the controller answers to


def token_rewards(scores: Tensor, counts: Tensor, divergences: Tensor, kl_coef: float) -> Tensor:
    """(N,) -kl_coef * divergence, and the score (S,) of a completion on its last token, however it ended."""
    rewards = -kl_coef * divergences
    written = counts > 0
    return rewards.index_add(0, counts.cumsum(0)[written] - 1, scores[written].to(rewards.dtype))


def generalised_advantages(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(N,) advantages and returns: A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, R_t = A_t + V_t.

    After the last token of a completion there is nothing: V and A are 0 there, whether it ended or was cut off.
    """
    if not len(rewards):
        return rewards, values
    sizes = counts.tolist()
    # zeros after the end
    r, v = (pad_sequence(list(torch.split(x, sizes)), batch_first=True) for x in (rewards, values))
    following = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], dim=1)
    advantages = r + gamma * following - v
    for t in range(advantages.shape[1] - 2, -1, -1):
        advantages[:, t] += gamma * lam * advantages[:, t + 1]
    flat = torch.cat([row[:size] for row, size in zip(advantages, sizes)])
    return flat, flat + values


Summed = Callable[[Tensor], Tensor]
"""Adds up a tensor over all processes."""


@dataclass(frozen=True)
class Moments:
    """Mean and variance (Bessel's) of numbers that several processes hold a part of. Collective."""

    number: float
    mean: float
    variance: float

    @classmethod
    def of(cls, values: Tensor, summed: Summed = lambda sums: sums) -> Moments:
        """From sums in two rounds, the squares about the mean: exact however far the mean is from 0."""
        values = values.double()
        number, total = summed(torch.stack([values.new_tensor(len(values)), values.sum()])).tolist()
        mean = total / max(number, 1)
        squares = summed((values - mean).square().sum()[None]).item()
        return cls(number, mean, squares / max(number - 1, 1))

    def joined(self, other: Moments) -> Moments:
        """Of the numbers of both (T. Chan, G. Golub and R. LeVeque 1979)."""
        number, gap = self.number + other.number, other.mean - self.mean
        squares = sum(part.variance * max(part.number - 1, 0) for part in (self, other))
        squares += gap**2 * self.number * other.number / max(number, 1)
        return Moments(number, self.mean + gap * other.number / max(number, 1), squares / max(number - 1, 1))


def whitened(values: Tensor, keep_mean: bool = False, summed: Summed = lambda sums: sums) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over all processes, plus the mean where it is kept. A single number: 0, or itself."""
    moments = Moments.of(values, summed)
    white = (values - moments.mean) / (moments.variance + SMALLEST_VARIANCE) ** 0.5
    return white + moments.mean if keep_mean else white


def explained_variance(values: Tensor, returns: Tensor, summed: Summed = lambda sums: sums) -> float:
    """1 - var(R - V) / var(R): 1 where the values foresee every return, 0 where a constant does as well. NaN: returns are equal."""
    left, whole = Moments.of(returns - values, summed).variance, Moments.of(returns, summed).variance
    return 1 - left / whole if whole > 0 else float("nan")


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> tuple[Tensor, Tensor]:
    """(N,) 1/2 max((v - R)^2, (clip(v, V - c, V + c) - R)^2), and whether the clip decides. The max: no reward for staying away."""
    bounded = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).to(values.dtype)


@dataclass
class KLController:
    """The coefficient of the divergence: as given, or following a target (arXiv:1909.08593 section 2.2)."""

    coefficient: float
    target: float | None = None  # None: the coefficient stays
    horizon: float = 10000.0

    def observe(self, divergence: float, samples: int) -> None:
        """Once a generation: its mean divergence of a completion, and how many completions that is the mean of."""
        if self.target is not None and samples:
            error = min(max(divergence / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
            self.coefficient *= 1 + error * samples / self.horizon

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.coefficient}

    def load(self, state: dict[str, Any]) -> None:
        self.coefficient = state["kl_coef"]
