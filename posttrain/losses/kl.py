"""Estimates of KL(policy || reference) from the log-probs of sampled tokens (J. Schulman, Approximating KL divergence).

With d = log reference - log policy at a token that the policy sampled, the mean of each estimate is the KL divergence,
or close to it: k1 is unbiased and may be negative, k2 has little variance and a bias, k3 is unbiased and never negative.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

LARGEST_EXPONENT = 60.0
"""Exponents are cut here, e^60 = 1e26, so that a product with 0 is 0 in float32 and not the NaN of 0 * inf."""


def bounded_exp(exponents: Tensor) -> Tensor:
    """exp, of at most LARGEST_EXPONENT."""
    return exponents.clamp(max=LARGEST_EXPONENT).exp()


def k1(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """-d = log policy - log reference."""
    return logps - reference_logps


def k2(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (logps - reference_logps) ** 2


def k3(logps: Tensor, reference_logps: Tensor) -> Tensor:
    """e^d - d - 1, the penalty of GRPO (arXiv:2402.03300 eq. 4)."""
    difference = reference_logps - logps
    return bounded_exp(difference) - difference - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Name -> (N,) estimates from (N,) log-probs of the policy and of the reference."""
