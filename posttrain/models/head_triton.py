"""Triton kernels of `head_kernels`: one program per row of logits. Imported on CUDA machines only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    logits, targets, logps, log_zs, mean_logps, entropies, is_most_likely, stride, width, scale, smoothing,
    STATISTICS: tl.constexpr, SMOOTH: tl.constexpr, SLOPES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log p(target), log Z and, where asked for, entropy, hit, mean log-prob; slopes over the logits.

    First pass: the running maximum m and sums relative to it, per lane, so that one reduction at the end suffices.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # sum exp(z - m)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum exp(z - m) z
    plain = tl.zeros([BLOCK], tl.float32)  # sum z
    best = tl.zeros([BLOCK], tl.int32)  # first place of the lane's maximum
    for first in range(0, width, BLOCK):
        inside = first + lanes < width
        z = tl.load(start + first + lanes, mask=inside, other=-float("inf")).to(tl.float32) * scale
        above = tl.maximum(highest, z)
        # A lane may see nothing but -inf (past the end of the row): exp(-inf - -inf) would be NaN.
        shrink = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - above))
        weight = tl.where(z == -float("inf"), 0.0, tl.exp(z - above))
        total = total * shrink + weight
        if STATISTICS:
            weighted = weighted * shrink + tl.where(weight == 0.0, 0.0, weight * z)
            best = tl.where(z > highest, first + lanes, best)
        if SMOOTH:
            plain += tl.where(inside, z, 0.0)
        highest = above
    peak = tl.max(highest, 0)
    rescale = tl.where(highest == -float("inf"), 0.0, tl.exp(highest - peak))
    sum_exp = tl.sum(total * rescale, 0)
    log_z = peak + tl.log(sum_exp)
    z_target = tl.load(start + target).to(tl.float32) * scale
    tl.store(logps + row, z_target - log_z)
    tl.store(log_zs + row, log_z)
    if STATISTICS:
        tl.store(entropies + row, log_z - tl.sum(weighted * rescale, 0) / sum_exp)
        choice = tl.min(tl.where(highest == peak, best, width), 0)
        tl.store(is_most_likely + row, (choice == target).to(tl.float32))
    if SMOOTH:
        tl.store(mean_logps + row, tl.sum(plain, 0) / width - log_z)
    if SLOPES:
        for first in range(0, width, BLOCK):
            inside = first + lanes < width
            z = tl.load(start + first + lanes, mask=inside, other=0.0).to(tl.float32) * scale
            slope = tl.exp(z - log_z) - smoothing / width
            slope = tl.where(first + lanes == target, slope - (1.0 - smoothing), slope)
            tl.store(start + first + lanes, slope * scale, mask=inside)


@triton.jit
def slopes_kernel(logits, targets, log_zs, factors, stride, width, scale, BLOCK: tl.constexpr):
    """logits <- factor * (p - onehot(target)) * scale, with log Z from an earlier pass."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    log_z = tl.load(log_zs + row)
    factor = tl.load(factors + row) * scale
    lanes = tl.arange(0, BLOCK)
    for first in range(0, width, BLOCK):
        inside = first + lanes < width
        z = tl.load(start + first + lanes, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.exp(z - log_z)
        slope = tl.where(first + lanes == target, slope - 1.0, slope)
        tl.store(start + first + lanes, slope * factor, mask=inside)
