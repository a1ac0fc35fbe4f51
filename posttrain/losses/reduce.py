"""Estimators of KL(policy || reference) from tokens that the policy wrote (J. Schulman's note, 2020).

Each takes log-probs of the same tokens under policy and reference, and gives one number for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """log p - log q: unbiased, may be negative."""
    return logps - reference_logps


def k2(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, small variance, never negative."""
    return (logps - reference_logps) ** 2 / 2


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased and never negative. expm1 keeps it exact where policy and reference nearly agree."""
    log_ratio = reference_logps - logps
    return torch.expm1(log_ratio) - log_ratio
