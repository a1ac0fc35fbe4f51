"""Losses of pairs that need no reference model: CPO, SimPO, AlphaPO, TPO, and ORPO's odds ratio.

Notation: s is the sum of log policy over the tokens of an answer, m its mean, D the difference that a loss compares, e the label
smoothing. `Answers` holds what is compared; a loss is a function of D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.losses.named_options import call, options_taken
from posttrain.losses.preference import check_label_smoothing

SURE = -1e-7
"""Largest mean log-prob of an answer whose odds are taken: those of a certain answer are infinite."""


def sigmoid(differences: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """CPO, arXiv:2401.08417: -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), D = s_c - s_r."""
    return _smoothed(beta * differences, label_smoothing)


def hinge(differences: Tensor, *, beta: float) -> Tensor:
    """SLiC, arXiv:2305.10425: max(0, 1 - beta D), D = s_c - s_r."""
    return F.relu(1 - beta * differences)


def ipo(differences: Tensor, *, beta: float) -> Tensor:
    """IPO, arXiv:2310.12036, on means: (D - 1 / (2 beta))^2, D = m_c - m_r."""
    return (differences - 1 / (2 * beta)) ** 2


def simpo(differences: Tensor, *, beta: float, simpo_gamma: float, label_smoothing: float) -> Tensor:
    """SimPO, arXiv:2405.14734: CPO's loss of beta D - gamma, D = m_c - m_r. The target margin gamma is not scaled by beta."""
    return _smoothed(beta * differences - simpo_gamma, label_smoothing)


def tpo_l(differences: Tensor, *, beta: float, tpo_l_gamma: float, label_smoothing: float) -> Tensor:
    """TPO-L, arXiv:2405.16681: SimPO's loss with a margin of its own."""
    return _smoothed(beta * differences - tpo_l_gamma, label_smoothing)


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    check_label_smoothing("The loss", label_smoothing, 0 <= label_smoothing <= 0.5, "from 0 to 0.5")
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@dataclass(frozen=True)
class ReferenceFreeLoss:
    """A loss and what it compares: sums of log-probs, or means."""

    function: Callable[..., Tensor]  # (D, options by name) -> (U,) values
    of_means: bool = False

    @property
    def options(self) -> set[str]:
        """Names of the options that change it. Only means can be shaped by `alpha`: exp(-alpha s) of a sum overflows."""
        return options_taken(self.function) | ({"alpha"} if self.of_means else set())


REFERENCE_FREE_LOSSES: dict[str, ReferenceFreeLoss] = {
    "sigmoid": ReferenceFreeLoss(sigmoid),
    "hinge": ReferenceFreeLoss(hinge),
    "ipo": ReferenceFreeLoss(ipo, of_means=True),
    "simpo": ReferenceFreeLoss(simpo, of_means=True),
    "tpo-l": ReferenceFreeLoss(tpo_l, of_means=True),
}
"""Value of `loss_type` -> the loss; which of them a method offers, it says itself."""


@dataclass(frozen=True)
class Answers:
    """(U,) numbers about the two answers of a pair: their log-probs (sums, or means over the answer), and what D is taken of."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    alpha: float = 0.0

    @classmethod
    def of(cls, batch: TokenBatch, logps: Tensor, of_means: bool, alpha: float = 0.0) -> Answers:
        """From the (N,) log-probs of a batch with the roles chosen and rejected."""
        of_samples = batch.sequence_mean(logps) if of_means else batch.sequence_sum(logps)
        return cls(batch.role(of_samples, "chosen"), batch.role(of_samples, "rejected"), alpha)

    @property
    def differences(self) -> Tensor:
        """(U,) D = R(chosen) - R(rejected)."""
        return shaped(self.chosen_logps, self.alpha) - shaped(self.rejected_logps, self.alpha)

    def metrics(self, beta: float) -> dict[str, Tensor]:
        """(U,) numbers to log. The reward of an answer is beta times what is compared."""
        sides = {"chosen": self.chosen_logps.detach(), "rejected": self.rejected_logps.detach()}
        chosen, rejected = (beta * shaped(side, self.alpha) for side in sides.values())
        rewards = {"chosen": chosen, "rejected": rejected, "accuracies": (chosen > rejected).to(chosen.dtype)}
        rewards["margins"] = chosen - rejected
        return {f"rewards/{name}": value for name, value in rewards.items()} | {
            f"logps/{name}": value for name, value in sides.items()
        }


def shaped(means: Tensor, alpha: float) -> Tensor:
    """AlphaPO, arXiv:2501.03884: R(m) = (1 - exp(-alpha m)) / alpha, whose limit at alpha = 0 is m itself."""
    return means if alpha == 0 else -torch.expm1(-alpha * means) / alpha


def reference_free_loss(answers: Answers, name: str, options: Any) -> Tensor:
    """(U,) values of the loss `name`."""
    return call(REFERENCE_FREE_LOSSES[name].function, answers.differences, options=options)


def check_reference_free(name: str, offered: tuple[str, ...], options: Any, set_by_user: set[str]) -> None:
    """Raise, with the reason, for an unknown loss, or an option that it does not read. Needs no data and no model."""
    if name not in offered:
        raise ValueError(f"`loss_type` is {name!r}; it must be one of {', '.join(offered)}.")
    loss = REFERENCE_FREE_LOSSES[name]
    known = set().union(*(REFERENCE_FREE_LOSSES[one].options for one in offered))
    ignored = sorted((known & set_by_user) - loss.options)
    if ignored:
        readers = [one for one in offered if ignored[0] in REFERENCE_FREE_LOSSES[one].options]
        raise ValueError(f"`{ignored[0]}` is set, but the loss {name} does not read it ({', '.join(readers)} does).")
    call(loss.function, torch.zeros(1), options=options)  # a loss knows the range of its own options


def log_odds_ratio(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """ORPO, arXiv:2403.07691 eq. 7: log of odds(chosen) / odds(rejected), odds(m) = exp(m) / (1 - exp(m)).

    o = (c - r) - (L(c) - L(r)), L(x) = log(1 - exp(x)). A memorised answer has a mean log-prob of exactly 0 in float32 and
    infinite odds: means are held below 0 by `SURE`.
    """
    chosen, rejected = chosen_means.clamp(max=SURE), rejected_means.clamp(max=SURE)
    return (chosen - rejected) - (log1mexp(chosen) - log1mexp(rejected))


def log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation: log(-expm1(x)) near 0, log1p(-exp(x)) far from it."""
    near = values > -math.log(2)
    # `where` picks values, not gradients: an operand that is not taken must be finite, too.
    safe_near, safe_far = values.where(near, values.new_tensor(-0.1)), values.where(~near, values.new_tensor(-1.0))
    return torch.where(near, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))
