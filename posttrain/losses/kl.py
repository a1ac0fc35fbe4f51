"""Estimates of KL(policy || reference) from the log-probs of sampled tokens (J. Schulman, Approximating KL divergence).

With d = log reference - log policy at a token that the policy sampled, the mean of each estimate is the KL divergence. k1 may
be negative; k3 has less variance and never is.
"""

from __future__ import annotations

from torch import Tensor

LARGEST_EXPONENT = 60.0
"""Exponents are cut here, e^60 = 1e26, so that a product with 0 is 0 in float32 and not the NaN of 0 * inf."""


def bounded_exp(exponents: Tensor) -> Tensor:
    """exp, of at most LARGEST_EXPONENT."""
    return exponents.clamp(max=LARGEST_EXPONENT).exp()


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """-d = log policy - log reference."""
    return logps - reference_logps


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """e^d - d - 1, the penalty of GRPO (arXiv:2402.03300 eq. 4)."""
    difference = reference_logps - logps
    return bounded_exp(difference) - difference - 1
