"""One pass over a chunk of logits of student and teacher: their divergence, and its slope written over the student's logits.

With p and q from logits and known log Z of both, m = (1 - w) p + w q and the shares a, b, w of `losses/distributions.py`,

    D       = sum_v a q (log q - log m) + b p (log p - log m)
    h_v     = p dD/dp = b p (log p - log m) + b p - (1 - w) p (b p + a q) / m
    slope_v = h_v - p sum_v h_v                              d D / d z_v of the student's scaled logits z

At the ends the same without a mixture: h = -q (w = 0, forward KL) and p (log p - log q) + p (w = 1, reverse KL). On CUDA a Triton
kernel reads each row once for (D, sum h) and once more for the slopes; elsewhere the same is done with torch, in float32 or better.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from posttrain.losses.distributions import Shares
from posttrain.models.triton_support import runs_triton

BLOCK = 4096
WARPS = 8
SMALLEST = 1e-30
"""Words to which the mixture gives less do not count: their logarithm would be of a number that has underflowed."""


class Compared(NamedTuple):
    """How two logits become distributions, and what is compared: numbers that are the same for all rows."""

    shares: Shares
    scale: float  # of the student's logits
    teacher_scale: float


class PairRows:
    """(n,) numbers about the rows of both, float32 or better; the normalisers are known before."""

    def __init__(self, log_z: Tensor, teacher_log_z: Tensor, sums: Tensor | None = None) -> None:
        self.log_z, self.teacher_log_z = log_z, teacher_log_z
        self.divergences = torch.empty_like(log_z)
        self.sums = torch.empty_like(log_z) if sums is None else sums  # sum_v h_v


def compare_rows(
    logits: Tensor, teacher_logits: Tensor, rows: PairRows, part: slice, how: Compared, factors: Tensor | None = None
) -> Tensor | None:
    """Fill `rows[part]` from a chunk of both logits; with `factors`, return the slopes as `pair_slopes` does."""
    implementation = _triton_compare if _runs(logits, teacher_logits) else _torch_compare
    return implementation(logits, teacher_logits, rows, part, how, factors)


def pair_slopes(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: PairRows,
    part: slice,
    how: Compared,
    factors: Tensor,
    targets: Tensor | None = None,
    logp_factors: Tensor | None = None,
) -> Tensor:
    """factors_t dD_t/d(logits), plus logp_factors_t d log p(y_t)/d(logits); written over the student's where possible."""
    implementation = _triton_slopes if _runs(logits, teacher_logits) else _torch_slopes
    return implementation(logits, teacher_logits, rows, part, how, factors, targets, logp_factors)


def _runs(logits: Tensor, teacher_logits: Tensor) -> bool:
    return runs_triton(logits) and runs_triton(teacher_logits)


# ---- torch ---------------------------------------------------------------------------------------------------------------


def _log_probs(logits: Tensor, log_z: Tensor, scale: float) -> Tensor:
    exact = logits.to(log_z.dtype)
    return (exact * scale if scale != 1.0 else exact) - log_z[:, None]


def _parts(
    logits: Tensor, teacher_logits: Tensor, rows: PairRows, part: slice, how: Compared
) -> tuple[Tensor, Tensor, Tensor]:
    """p, the terms of D, and h, a number for each word."""
    log_p = _log_probs(logits, rows.log_z[part], how.scale)
    log_q = _log_probs(teacher_logits, rows.teacher_log_z[part], how.teacher_scale)
    (a, b, w), p, q = how.shares, log_p.exp(), log_q.exp()
    if w == 0:
        return p, torch.where(q == 0, 0.0, q * (log_q - log_p)), -q
    if w == 1:
        terms = torch.where(p == 0, 0.0, p * (log_p - log_q))
        return p, terms, terms + p
    m = (1 - w) * p + w * q
    counts = ~(m < SMALLEST)  # NaN counts, and is passed on
    log_m = m.clamp(min=SMALLEST).log()
    ours = torch.where(counts & (p != 0), b * p * (log_p - log_m), 0.0)
    theirs = torch.where(counts & (q != 0), a * q * (log_q - log_m), 0.0)
    rest = torch.where(counts, b * p - (1 - w) * p * (b * p + a * q) / m, 0.0)
    return p, ours + theirs, ours + rest


def _torch_compare(
    logits: Tensor, teacher_logits: Tensor, rows: PairRows, part: slice, how: Compared, factors: Tensor | None
) -> Tensor | None:
    p, terms, h = _parts(logits, teacher_logits, rows, part, how)
    rows.divergences[part] = terms.sum(-1)
    rows.sums[part] = h.sum(-1)
    if factors is None:
        return None
    return (h - p * rows.sums[part, None]).mul_((factors * how.scale)[:, None]).to(logits.dtype)


def _torch_slopes(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: PairRows,
    part: slice,
    how: Compared,
    factors: Tensor,
    targets: Tensor | None,
    logp_factors: Tensor | None,
) -> Tensor:
    p, _, h = _parts(logits, teacher_logits, rows, part, how)
    slopes = (h - p * rows.sums[part, None]).mul_((factors * how.scale)[:, None])
    if logp_factors is not None:
        slopes -= p * (logp_factors * how.scale)[:, None]
        slopes.scatter_add_(-1, targets[:, None], (logp_factors * how.scale)[:, None])
    return slopes.to(logits.dtype)


# ---- Triton --------------------------------------------------------------------------------------------------------------


def _triton_compare(
    logits: Tensor, teacher_logits: Tensor, rows: PairRows, part: slice, how: Compared, factors: Tensor | None
) -> Tensor | None:
    _kernels()["compare"][(len(logits),)](
        logits, teacher_logits, rows.log_z[part], rows.teacher_log_z[part], rows.divergences[part], rows.sums[part],
        logits.stride(0), teacher_logits.stride(0), logits.shape[1], how.scale, how.teacher_scale, SMALLEST,
        **_constants(how.shares), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    if factors is None:
        return None
    return _triton_slopes(logits, teacher_logits, rows, part, how, factors, None, None)


def _triton_slopes(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: PairRows,
    part: slice,
    how: Compared,
    factors: Tensor,
    targets: Tensor | None,
    logp_factors: Tensor | None,
) -> Tensor:
    with_logps = logp_factors is not None
    _kernels()["slopes"][(len(logits),)](
        logits, teacher_logits, rows.log_z[part], rows.teacher_log_z[part], rows.sums[part], factors,
        targets if with_logps else factors, logp_factors if with_logps else factors,  # factors: neither read nor written
        logits.stride(0), teacher_logits.stride(0), logits.shape[1], how.scale, how.teacher_scale, SMALLEST,
        **_constants(how.shares), LOGPS=with_logps, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logits


def _constants(shares: Shares) -> dict[str, float | bool]:
    """A kernel is compiled for each. In Jensen-Shannon's case h has only its first part: b p = (1 - w) p (b p + a q) / m."""
    a, b, w = shares
    return {"A": a, "B": b, "W": w, "REST": (a, b) != (w, 1 - w)}


@functools.cache
def _kernels() -> dict:
    """Compiled on first use: triton is not there on every machine."""
    from posttrain.models.scoring.pair_triton import compare_kernel, slopes_kernel

    return {"compare": compare_kernel, "slopes": slopes_kernel}
