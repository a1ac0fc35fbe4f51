"""Losses of rows with a label each, wanted or not: KTO, APO-zero for unpaired rows, BCO.

Notation: l = log(policy / reference) of a whole answer; s = 1 for a wanted answer, -1 for an unwanted one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.core.batch import TokenBatch


@dataclass(frozen=True)
class Unpaired:
    """S answers. Log-probs are sums over the trained tokens of an answer."""

    logps: Tensor  # (S,)
    reference_logps: Tensor  # (S,)
    wanted: Tensor  # (S,) bool

    @classmethod
    def of(cls, batch: TokenBatch, policy_logps: Tensor, reference_logps: Tensor) -> Unpaired:
        """From the (N,) log-probs of a batch whose samples have a `label`."""
        policy, reference = (batch.sequence_sum(logps) for logps in (policy_logps, reference_logps))
        units = slice(batch.num_units)  # an empty batch holds a filler that belongs to no sample and has no label
        labels = batch.scalars.get("label", policy)
        return cls(policy[units], reference[units], labels[units] > 0.5)

    @property
    def log_ratios(self) -> Tensor:
        """(S,) l."""
        return self.logps - self.reference_logps

    def signed(self, values: Tensor) -> Tensor:
        """(S,) s * values."""
        return torch.where(self.wanted, values, -values)

    def metrics(self, beta: float) -> dict[str, Tensor]:
        """(S,) numbers to log, NaN for answers of the other label: a class without rows leaves its names out."""
        found = {"rewards": beta * self.log_ratios.detach(), "logps": self.logps.detach()}
        sides = {"chosen": ~self.wanted, "rejected": self.wanted}
        return {
            f"{name}/{side}": values.masked_fill(others, float("nan"))
            for name, values in found.items()
            for side, others in sides.items()
        }


def kto(rows: Unpaired, *, beta: float, divergence: float) -> Tensor:
    """KTO, arXiv:2402.01306 eq. 7: 1 - sigmoid(beta s (l - z)), z = `divergence` the reference point, without gradient."""
    return torch.sigmoid(-beta * rows.signed(rows.log_ratios - divergence))


def apo_zero_unpaired(rows: Unpaired, *, beta: float) -> Tensor:
    """APO-zero, arXiv:2408.06266, row by row: 1 - sigmoid(beta s l). KTO with the reference point 0."""
    return torch.sigmoid(-beta * rows.signed(rows.log_ratios))


def bco(rows: Unpaired, *, beta: float, delta: float) -> Tensor:
    """BCO, arXiv:2404.04656 eq. 12: -log sigmoid(s (beta l - delta)), delta the mean reward seen so far."""
    return -F.logsigmoid(rows.signed(beta * rows.log_ratios - delta))


UNPAIRED_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired, "bco": bco}
"""Value of `loss_type` -> (rows, options by name) -> (S,) values."""


# ---- BCO's density ratio -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogisticRegression:
    """P(wanted | x) = sigmoid(w x + b), fitted with an L2 penalty on w and classes weighted to count the same."""

    weights: Tensor  # (D,) float64
    bias: Tensor  # () float64

    @classmethod
    def fitted(cls, features: Tensor, wanted: Tensor, balanced: bool = True, steps: int = 100) -> LogisticRegression:
        """Minimise sum_i c_i log(1 + exp(-s_i (w x_i + b))) + |w|^2 / 2 by Newton's method in float64.

        c = n / (2 n_class) where `balanced`. The function is convex; steps are halved until it falls.
        """
        x = torch.cat([features.double(), features.new_ones((len(features), 1), dtype=torch.float64)], dim=1)
        sign = torch.where(wanted, 1.0, -1.0).double().to(x.device)
        shares = torch.stack([(~wanted).sum(), wanted.sum()]).double().to(x.device)
        if (shares == 0).any():
            raise ValueError(
                "The density ratio compares prompts of wanted and of unwanted rows; one class has no rows."
            )
        costs = (len(x) / (2 * shares))[wanted.long().to(x.device)] if balanced else torch.ones_like(sign)
        ridge = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
        ridge[-1] = 0

        def objective(point: Tensor) -> Tensor:
            return (costs * F.softplus(-sign * (x @ point))).sum() + (ridge * point**2).sum() / 2

        point = torch.zeros_like(ridge)
        for _ in range(steps):
            odds = torch.sigmoid(-sign * (x @ point))
            gradient = -(x.T @ (costs * sign * odds)) + ridge * point
            hessian = x.T @ ((costs * odds * (1 - odds))[:, None] * x) + torch.diag(ridge.clamp(min=1e-12))
            move, size, here = torch.linalg.solve(hessian, gradient), 1.0, objective(point)
            while objective(point - size * move) > here and size > 1e-8:
                size /= 2
            point = point - size * move
            if (size * move).abs().max() < 1e-12:
                break
        return cls(point[:-1], point[-1])

    def probabilities(self, features: Tensor) -> Tensor:
        """(n,) P(wanted) of each row of (n, D) features."""
        return torch.sigmoid(features.double().to(self.weights.device) @ self.weights + self.bias)


def density_ratios(probabilities: Tensor, low: float, high: float) -> Tensor:
    """(n,) P / (1 - P): how much likelier the prompt is among wanted rows than among unwanted ones, within [low, high]."""
    return (probabilities / (1 - probabilities + 1e-8)).clamp(low, high)
