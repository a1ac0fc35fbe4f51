"""Triton kernels of `head_kernels`: one program per row of logits. Imported on CUDA machines only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    logits, targets, logps, log_zs, mean_logps, entropies, is_most_likely, stride, width, scale, smoothing,
    STATISTICS: tl.constexpr, MEAN: tl.constexpr, SLOPES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log p(target), log Z and, where asked for, entropy, hit, mean log-prob; slopes over the logits.

    First pass: the running maximum of the row as one number, sums relative to it in every lane. (A maximum for each lane would
    need a second exponential for each logit, and exponentials are what this kernel waits for.)
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    peak = tl.full([], -1e30, tl.float32)  # not -inf: the first block would give exp(-inf + inf)
    best = tl.full([], 0, tl.int32)  # first place of the maximum
    total = tl.zeros([BLOCK], tl.float32)  # sum exp(z - peak)
    weighted = tl.zeros([BLOCK], tl.float32)  # sum exp(z - peak) z
    plain = tl.zeros([BLOCK], tl.float32)  # sum z
    for first in range(0, width, BLOCK):
        inside = first + lanes < width
        z = tl.load(start + first + lanes, mask=inside, other=-float("inf")).to(tl.float32) * scale
        highest = tl.max(z, 0)
        if STATISTICS:
            best = tl.where(highest > peak, first + tl.argmax(z, 0), best)
        above = tl.maximum(peak, highest)
        shrink = tl.exp(peak - above)
        weight = tl.exp(z - above)
        total = total * shrink + weight
        if STATISTICS:
            weighted = weighted * shrink + tl.where(weight > 0.0, weight * z, 0.0)
        if MEAN:
            plain += tl.where(inside, z, 0.0)
        peak = above
    sum_exp = tl.sum(total, 0)
    log_z = peak + tl.log(sum_exp)
    z_target = tl.load(start + target).to(tl.float32) * scale
    tl.store(logps + row, z_target - log_z)
    tl.store(log_zs + row, log_z)
    if STATISTICS:
        tl.store(entropies + row, log_z - tl.sum(weighted, 0) / sum_exp)
        tl.store(is_most_likely + row, (best == target).to(tl.float32))
    if MEAN:
        tl.store(mean_logps + row, tl.sum(plain, 0) / width - log_z)
    if SLOPES:
        for first in range(0, width, BLOCK):
            inside = first + lanes < width
            z = tl.load(start + first + lanes, mask=inside, other=0.0).to(tl.float32) * scale
            slope = (tl.exp(z - log_z) - smoothing / width) * scale
            tl.store(start + first + lanes, slope, mask=inside)
        tl.debug_barrier()  # the target's slope was written by some thread above
        slope = tl.exp(z_target - log_z) - smoothing / width - (1.0 - smoothing)
        tl.store(start + target, slope * scale)


@triton.jit
def slopes_kernel(logits, targets, log_zs, factors, stride, width, scale, BLOCK: tl.constexpr):
    """logits <- factor * (p - onehot(target)) * scale, with log Z from an earlier pass."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    log_z = tl.load(log_zs + row)
    factor = tl.load(factors + row) * scale
    z_target = tl.load(start + target).to(tl.float32) * scale
    lanes = tl.arange(0, BLOCK)
    for first in range(0, width, BLOCK):
        inside = first + lanes < width
        z = tl.load(start + first + lanes, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(start + first + lanes, tl.exp(z - log_z) * factor, mask=inside)
    tl.debug_barrier()  # the target's slope was written by some thread above
    tl.store(start + target, (tl.exp(z_target - log_z) - 1.0) * factor)
