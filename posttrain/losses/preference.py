"""The paired losses: DPO (arXiv:2305.18290) and its relatives, each a function of a Pair, and weighted mixes of them.

Notation: l_c and l_r are the log-ratios log(policy / reference) of the chosen and rejected answer, s_c and s_r the same
as the f-divergence counts them (s = l for reverse_kl), d = s_c - s_r, e is the label smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.core.results import LossTerm
from posttrain.losses.divergences import F_DIVERGENCES
from posttrain.losses.named_options import call
from posttrain.losses.pair import Coupling, Pair, linearised


def sigmoid(pair: Pair, *, beta: float) -> Tensor:
    """DPO, arXiv:2305.18290 eq. 7: -log sigmoid(beta d)."""
    return -F.logsigmoid(beta * pair.margins)


def sigmoid_norm(pair: Pair, *, beta: float) -> Tensor:
    """Length-normalised DPO (as in arXiv:2411.15124): -log sigmoid(beta (s_c / len_c - s_r / len_r))."""
    return -F.logsigmoid(beta * pair.margins_per_token)


def hinge(pair: Pair, *, beta: float) -> Tensor:
    """SLiC, arXiv:2305.10425, on DPO's margin (as in RSO, arXiv:2309.06657): max(0, 1 - beta d)."""
    return F.relu(1 - beta * pair.margins)


def ipo(pair: Pair, *, beta: float) -> Tensor:
    """Identity preference optimisation, arXiv:2310.12036 eq. 17, with margins per token as its authors ran it.

    (s_c / len_c - s_r / len_r - 1 / (2 beta))^2
    """
    return (pair.margins_per_token - 1 / (2 * beta)) ** 2


def exo_pair(pair: Pair, *, beta: float, label_smoothing: float) -> Tensor:
    """EXO, arXiv:2402.00856 eq. 16: KL between the policy's preference and a smoothed label.

    KL([sigmoid(beta d), sigmoid(-beta d)] || [1 - e, e]); a label without smoothing would be infinitely far away.
    """
    check_label_smoothing("exo_pair", label_smoothing, 0 < label_smoothing < 1, "above 0 and below 1")
    logits = beta * pair.margins
    chosen_first = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-label_smoothing))
    rejected_first = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(label_smoothing))
    return chosen_first + rejected_first


def nca_pair(pair: Pair, *, beta: float) -> Tensor:
    """Noise contrastive alignment, arXiv:2402.05369: each answer is separated from noise on its own.

    -log sigmoid(beta l_c) - 1/2 log sigmoid(-beta l_c) - 1/2 log sigmoid(-beta l_r)
    """
    chosen, rejected = beta * pair.chosen_log_ratios, beta * pair.rejected_log_ratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pair: Pair, *, beta: float, label_smoothing: float) -> Tensor:
    """Robust DPO, arXiv:2403.00409 eq. 12: unbiased when each label is flipped with probability e.

    [-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)] / (1 - 2e)
    """
    check_label_smoothing("robust", label_smoothing, 0 <= label_smoothing < 0.5, "at least 0 and below 0.5")
    logits = beta * pair.margins
    kept, flipped = -F.logsigmoid(logits), -F.logsigmoid(-logits)
    return ((1 - label_smoothing) * kept - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def bco_pair(pair: Pair, *, beta: float) -> Tensor:
    """Binary classifier optimisation, arXiv:2404.04656, on pairs: -log sigmoid(beta l_c) - log sigmoid(-beta l_r)."""
    return -F.logsigmoid(beta * pair.chosen_log_ratios) - F.logsigmoid(-beta * pair.rejected_log_ratios)


def sppo_hard(pair: Pair, *, beta: float) -> Tensor:
    """SPPO with hard labels, arXiv:2405.00675: (l_c - 1 / (2 beta))^2 + (l_r + 1 / (2 beta))^2."""
    return (pair.chosen_log_ratios - 0.5 / beta) ** 2 + (pair.rejected_log_ratios + 0.5 / beta) ** 2


def aot(pair: Pair, *, beta: float, label_smoothing: float) -> Tensor:
    """Alignment via optimal transport, arXiv:2406.05882: the sorted margins of policy and reference are compared.

    D = sort(log policy(c) - log policy(r)) - sort(log reference(c) - log reference(r)); the loss is
    -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), given to the pair whose policy margin is in D.
    """
    policy = pair.chosen_logps - pair.rejected_logps
    reference = pair.reference_chosen_logps - pair.reference_rejected_logps
    return _smoothed_sigmoid("aot", policy - matched_by_rank(reference, policy), beta, label_smoothing)


def aot_unpaired(pair: Pair, *, beta: float, label_smoothing: float) -> Tensor:
    """AOT without pairs, arXiv:2406.05882: D = sort(l_c) - sort(l_r), given to the pair whose l_c is in D."""
    chosen = pair.chosen_log_ratios
    differences = chosen - matched_by_rank(pair.rejected_log_ratios, chosen)
    return _smoothed_sigmoid("aot_unpaired", differences, beta, label_smoothing)


def apo_zero(pair: Pair, *, beta: float) -> Tensor:
    """APO-zero, arXiv:2408.06266: 1 - sigmoid(beta l_c) + sigmoid(beta l_r). For a model below the chosen answers."""
    return torch.sigmoid(-beta * pair.chosen_log_ratios) + torch.sigmoid(beta * pair.rejected_log_ratios)


def apo_down(pair: Pair, *, beta: float) -> Tensor:
    """APO-down, arXiv:2408.06266: sigmoid(beta l_c) + 1 - sigmoid(beta (l_c - l_r)). For a model above both."""
    difference = pair.chosen_log_ratios - pair.rejected_log_ratios
    return torch.sigmoid(beta * pair.chosen_log_ratios) + torch.sigmoid(-beta * difference)


def discopop(pair: Pair, *, beta: float, discopop_tau: float) -> Tensor:
    """DiscoPOP, arXiv:2406.08414: logistic where the pair is lost, exponential where it is won.

    m = sigmoid(beta d / tau); (1 - m) * -log sigmoid(beta d) + m exp(-beta d). The product with m is one exponential of
    a sum, as exp(-beta d) alone overflows where m vanishes; for tau <= 1 the sum is at most log 2.
    """
    if not 0 < discopop_tau <= 1:
        raise ValueError(
            f"discopop takes a discopop_tau above 0 and at most 1 (got {discopop_tau}): above 1 its exponential term "
            "outgrows every other for pairs that the model gets wrong."
        )
    logits = beta * pair.margins
    logistic = -F.logsigmoid(logits) * torch.sigmoid(-logits / discopop_tau)
    return logistic + torch.exp(F.logsigmoid(logits / discopop_tau) - logits)


def sft(pair: Pair) -> Tensor:
    """-sum_t log p(y_t) over the chosen tokens, to be divided by their number in the step (arXiv:2404.19733, MPO)."""
    if pair.chosen_nll is None:
        raise ValueError("The sft loss needs `chosen_nll`, the summed nll of the chosen tokens; this Pair has none.")
    return pair.chosen_nll


def matched_by_rank(values: Tensor, order: Tensor) -> Tensor:
    """`values` rearranged so that their ranking is that of `order`: the optimal transport of two sets of numbers."""
    ranks = order.argsort(stable=True).argsort(stable=True)
    return values.sort(stable=True).values[ranks]


def check_label_smoothing(loss: str, value: float, fits: bool, range_in_words: str) -> None:
    if not fits:
        raise ValueError(f"{loss} takes a label_smoothing {range_in_words}; got {value}.")


def _smoothed_sigmoid(loss: str, differences: Tensor, beta: float, label_smoothing: float) -> Tensor:
    check_label_smoothing(loss, label_smoothing, 0 <= label_smoothing <= 0.5, "from 0 to 0.5")
    logits = beta * differences
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@dataclass(frozen=True)
class PreferenceLoss:
    """A paired loss and what a trainer must know to use it."""

    function: Callable[..., Tensor]  # (pair, options by name) -> (U,) values
    f_divergences: bool = False  # it reads the scores, hence means something under every f-divergence
    per: str = "unit"  # what the sum of its values is divided by
    coupled: bool = False  # the value of a pair depends on the other pairs of the step


def preference_loss(
    pair: Pair,
    names: Sequence[str],
    weights: Sequence[float] | None,
    options: Any,
    couplings: Mapping[str, Coupling] | None = None,
) -> list[LossTerm]:
    """One term for each name, weighted (MPO, arXiv:2411.10442, mixes sigmoid, bco_pair and sft). WPO weights multiply.

    `couplings` holds, for coupled losses, the part of the whole step's Coupling that belongs to these pairs; without an
    entry these pairs are taken for the whole step.
    """
    terms = []
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        loss = PREFERENCE_LOSSES[name]
        if couplings and name in couplings:
            values = linearised(pair, couplings[name])
        else:
            values = call(loss.function, pair, options=options)
        values = values if pair.weights is None else values * pair.weights
        terms.append(LossTerm(values, loss.per, weight, entries="unit"))
    return terms


def check_preference_losses(
    names: Sequence[str], weights: Sequence[float] | None, options: Any, *, f_divergence: str, weighted: bool
) -> None:
    """Raise, with the reason, for a choice of losses and options that has no meaning. Needs no data and no model."""
    unknown = [name for name in names if name not in PREFERENCE_LOSSES]
    if unknown or not names:
        raise ValueError(f"loss_type {unknown or names} is unknown or empty; take from {', '.join(PREFERENCE_LOSSES)}.")
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"loss_weights has {len(weights)} numbers for the {len(names)} losses of loss_type.")
    if f_divergence not in F_DIVERGENCES:
        raise ValueError(f"f_divergence_type {f_divergence!r} is unknown; take one of {', '.join(F_DIVERGENCES)}.")
    for name in names:
        loss = PREFERENCE_LOSSES[name]
        if f_divergence != "reverse_kl" and not loss.f_divergences:
            raise ValueError(f"{name} is defined with reverse_kl only; got f_divergence_type {f_divergence!r}.")
        if weighted and loss.coupled:
            raise ValueError(f"{name} compares sorted sets, not pairs: use_weighting has no pair to weigh there.")
        call(loss.function, _NEUTRAL, options=options)  # a loss knows the range of its own options


_ZERO, _ONE = torch.zeros(1), torch.ones(1, dtype=torch.long)
_NEUTRAL = Pair(_ZERO, _ZERO, _ZERO, _ZERO, _ONE, _ONE, _ZERO)

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(sigmoid, f_divergences=True),
    "hinge": PreferenceLoss(hinge, f_divergences=True),
    "ipo": PreferenceLoss(ipo, f_divergences=True),
    "exo_pair": PreferenceLoss(exo_pair, f_divergences=True),
    "nca_pair": PreferenceLoss(nca_pair),
    "robust": PreferenceLoss(robust, f_divergences=True),
    "bco_pair": PreferenceLoss(bco_pair),
    "sppo_hard": PreferenceLoss(sppo_hard),
    "aot": PreferenceLoss(aot, coupled=True),
    "aot_unpaired": PreferenceLoss(aot_unpaired, coupled=True),
    "apo_zero": PreferenceLoss(apo_zero),
    "apo_down": PreferenceLoss(apo_down),
    "discopop": PreferenceLoss(discopop, f_divergences=True),
    "sft": PreferenceLoss(sft, f_divergences=True, per="token:chosen"),
    "sigmoid_norm": PreferenceLoss(sigmoid_norm, f_divergences=True),
}
"""Value of `loss_type` -> the loss. The table of contents of this file."""
