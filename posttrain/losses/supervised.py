"""Losses of a token the model should have said. Each takes and gives (N,) numbers about trained tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def nll(logps: Tensor) -> Tensor:
    """Negative log-likelihood: -log p(y_t)."""
    return -logps


def label_smoothed_nll(logps: Tensor, mean_logps: Tensor, *, label_smoothing: float) -> Tensor:
    """(1 - e) * -log p(y_t) + e * mean_v -log p(v): a share `e` of the target is spread evenly over the vocabulary.

    `mean_logps` is (N,), the mean over the vocabulary of log p(v) at the position of each token. It carries gradient.
    """
    return -(1 - label_smoothing) * logps - label_smoothing * mean_logps


def dft(logps: Tensor) -> Tensor:
    """Dynamic fine-tuning, arXiv:2508.05629: -sg(p) log p, whose gradient is that of -p; sg stops the gradient."""
    return -logps.detach().exp() * logps


SUPERVISED_LOSSES: dict[str, Callable[..., Tensor]] = {"nll": nll, "label_smoothed_nll": label_smoothed_nll, "dft": dft}
"""Name -> loss of each trained token; all are divided per token."""
