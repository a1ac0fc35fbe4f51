"""One pass over a chunk of logits: what a row says about its target, and its slope written over it.

A row of logits z with target y and log Z = log sum_v exp(z_v) gives

    log p(y)  = z_y - log Z
    entropy   = log Z - sum_v p_v z_v
    slope_v   = p_v - (1 - e) [v = y] - e / V          d(smoothed nll) / d z_v, times a factor of the row

On CUDA a Triton kernel reads the row twice (the second time mostly from the L2 cache) and writes it once, in the dtype of the
logits; torch's own operations would write it four times in float32. Elsewhere the same is done with torch, in float32 or better.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch
from torch import Tensor

from posttrain.models.triton_support import runs_triton

BLOCK = 8192
WARPS = 16
STATISTICS = ("entropy", "is_most_likely", "mean_logit")
"""What a pass over a row can say besides log p(y) and log Z."""


class Rows:
    """(n,) numbers about the rows of a chunk, float32 or better. `asked`: names in STATISTICS."""

    def __init__(self, count: int, device: torch.device, dtype: torch.dtype, asked: Collection[str] = ()) -> None:
        def empty() -> Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        self.logps = empty()
        self.log_z = empty()
        self.mean_logps = empty()  # over the vocabulary: the uniform part of label smoothing
        with_entropy = "entropy" in asked or "is_most_likely" in asked
        self.entropy = empty() if with_entropy else None
        self.is_most_likely = empty() if with_entropy else None
        self.with_choice = "is_most_likely" in asked  # a kernel has it for nothing
        self.with_mean = "mean_logit" in asked

    def answers(self) -> dict[str, Tensor | None]:
        """By name of the statistic; of those that were asked for."""
        mean_logit = self.mean_logps + self.log_z if self.with_mean else None
        return {"entropy": self.entropy, "is_most_likely": self.is_most_likely, "mean_logit": mean_logit}


def read_rows(
    logits: Tensor,
    targets: Tensor,
    rows: Rows,
    part: slice,
    *,
    scale: float = 1.0,
    smoothing: float = 0.0,
    slopes: bool = False,
) -> Tensor | None:
    """Fill `rows[part]` from a chunk of logits; with `slopes`, return d(nll)/d(logits), written over the logits where possible."""
    implementation = _triton_rows if runs_triton(logits) else _torch_rows
    return implementation(logits, targets, rows, part, scale, smoothing, slopes)


def slopes_of_rows(logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, scale: float = 1.0) -> Tensor:
    """factors_t * d(-log p(y_t)) / d(logits) where log Z is known already; written over the logits where possible."""
    implementation = _triton_slopes if runs_triton(logits) else _torch_slopes
    return implementation(logits, targets, log_z, factors, scale)


def _torch_rows(
    logits: Tensor, targets: Tensor, rows: Rows, part: slice, scale: float, smoothing: float, slopes: bool
) -> Tensor | None:
    dtype, accurate = logits.dtype, rows.logps.dtype
    exact = logits.to(accurate)
    if scale != 1.0:
        exact = exact * scale
    goals = targets[:, None]
    goal_logits = exact.gather(-1, goals).squeeze(-1)
    # A CPU's log_softmax adds up in one run, which is 2e-5 off over 50,000 words; logsumexp adds up in pairs. Where the slopes of
    # the whole chunk are wanted anyway, the one pass of log_softmax counts more.
    if slopes:
        all_logps = torch.log_softmax(exact, -1)
        rows.logps[part] = all_logps.gather(-1, goals).squeeze(-1)
        rows.log_z[part] = goal_logits - rows.logps[part]
    else:
        rows.log_z[part] = torch.logsumexp(exact, -1)
        rows.logps[part] = goal_logits - rows.log_z[part]
        all_logps = exact - rows.log_z[part, None] if rows.entropy is not None else None
    if rows.entropy is not None:
        rows.entropy[part] = -(all_logps.exp() * all_logps).sum(-1)
        if rows.with_choice:
            rows.is_most_likely[part] = (exact.argmax(-1) == targets).to(accurate)
    if smoothing or rows.with_mean:
        rows.mean_logps[part] = exact.mean(-1) - rows.log_z[part]
    if not slopes:
        return None
    slope = all_logps.exp_()
    if smoothing:
        slope.sub_(smoothing / slope.shape[-1])
    slope.scatter_add_(-1, goals, torch.full_like(goals, smoothing - 1, dtype=accurate))
    return (slope.mul_(scale) if scale != 1.0 else slope).to(dtype)


def _torch_slopes(logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, scale: float) -> Tensor:
    exact = logits.to(log_z.dtype)
    if scale != 1.0:
        exact = exact * scale
    slope = exact.sub_(log_z[:, None]).exp_() if exact is not logits else exact.sub(log_z[:, None]).exp_()
    slope.scatter_add_(-1, targets[:, None], torch.full_like(targets[:, None], -1, dtype=slope.dtype))
    return slope.mul_((factors * scale)[:, None]).to(logits.dtype)


def _triton_rows(
    logits: Tensor, targets: Tensor, rows: Rows, part: slice, scale: float, smoothing: float, slopes: bool
) -> Tensor | None:
    with_statistics = rows.entropy is not None
    some = rows.logps[part]  # stands in for tensors that a launch neither reads nor writes
    _kernels()["rows"][(len(logits),)](
        logits, targets, some, rows.log_z[part], rows.mean_logps[part],
        rows.entropy[part] if with_statistics else some, rows.is_most_likely[part] if with_statistics else some,
        logits.stride(0), logits.shape[1], scale, smoothing,
        STATISTICS=with_statistics, MEAN=rows.with_mean or smoothing != 0, SLOPES=slopes, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logits if slopes else None


def _triton_slopes(logits: Tensor, targets: Tensor, log_z: Tensor, factors: Tensor, scale: float) -> Tensor:
    _kernels()["slopes"][(len(logits),)](
        logits, targets, log_z, factors, logits.stride(0), logits.shape[1], scale, BLOCK=BLOCK, num_warps=WARPS
    )
    return logits


@functools.cache
def _kernels() -> dict:
    """Compiled on first use: triton is not there on every machine."""
    from posttrain.models.scoring.head_triton import rows_kernel, slopes_kernel

    return {"rows": rows_kernel, "slopes": slopes_kernel}
