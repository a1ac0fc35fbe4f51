"""f-DPO (arXiv:2309.16240): what a log-ratio l = log(policy / reference) counts for under each divergence, f'(exp l).

Each function maps (U,) log-ratios to scores of the same shape, is increasing, and is 0 with slope 1 (js: 1/2) at l = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def reverse_kl(log_ratios: Tensor) -> Tensor:
    """f(u) = u log u: the score is the log-ratio itself. This is plain DPO."""
    return log_ratios


def forward_kl(log_ratios: Tensor) -> Tensor:
    """f(u) = -log u: 1 - exp(-l), which is the alpha-divergence at alpha = 0."""
    return alpha_divergence(log_ratios, f_alpha=0.0)


def js_divergence(log_ratios: Tensor) -> Tensor:
    """f(u) = u log u - (u + 1) log((u + 1) / 2): log 2 + log sigmoid(l), at most log 2."""
    return math.log(2) + F.logsigmoid(log_ratios)


def alpha_divergence(log_ratios: Tensor, *, f_alpha: float) -> Tensor:
    """(exp((a - 1) l) - 1) / (a - 1); its limits are reverse_kl at a = 1 and forward_kl at a = 0.

    The exponent is clamped from above only, and only where the score would pass `largest_score`. A pair beyond the
    clamp gets no gradient.
    """
    power = f_alpha - 1
    if power == 0:
        return reverse_kl(log_ratios)
    largest_exponent = math.log1p(largest_score(log_ratios.dtype) * abs(power))
    return torch.expm1((power * log_ratios).clamp(max=largest_exponent)) / power


def largest_score(dtype: torch.dtype) -> float:
    """Scores stop here: a tenth of the root of the largest number of `dtype`; a squared difference is still finite."""
    return 0.1 * math.sqrt(torch.finfo(dtype).max)


F_DIVERGENCES: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}
"""Value of `f_divergence_type` -> score of a log-ratio; a keyword-only `f_alpha` is `f_alpha_divergence_coef`."""
