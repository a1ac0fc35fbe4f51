"""Triton kernels of `pair_kernels`: one program per row of logits of student and teacher. Imported on CUDA machines only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _terms(log_p, log_q, smallest, A: tl.constexpr, B: tl.constexpr, W: tl.constexpr, REST: tl.constexpr):
    """p, the terms of D, and h: see `pair_kernels`. A word of -inf has p = q = 0 and adds nothing; NaN is passed on."""
    p, q = tl.exp(log_p), tl.exp(log_q)
    if W == 0.0:
        terms = tl.where(q == 0.0, 0.0, q * (log_q - log_p))
        h = -q
    elif W == 1.0:
        terms = tl.where(p == 0.0, 0.0, p * (log_p - log_q))
        h = terms + p
    else:
        m = (1.0 - W) * p + W * q
        is_nothing = m < smallest
        safe = tl.where(is_nothing, 1.0, m)
        log_m = tl.log(safe)
        terms = tl.zeros_like(p)
        h = tl.zeros_like(p)
        if B != 0.0:
            h = tl.where(is_nothing | (p == 0.0), 0.0, B * p * (log_p - log_m))
            terms += h
        if A != 0.0:
            terms += tl.where(is_nothing | (q == 0.0), 0.0, A * q * (log_q - log_m))
        if REST:
            h += tl.where(is_nothing, 0.0, B * p - (1.0 - W) * p * (B * p + A * q) / safe)
    return p, terms, h


@triton.jit
def compare_kernel(
    logits, teacher_logits, log_zs, teacher_log_zs, divergences, sums, stride, teacher_stride, width, scale, teacher_scale,
    smallest, A: tl.constexpr, B: tl.constexpr, W: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """D and sum h of a row, in one pass."""
    row = tl.program_id(0).to(tl.int64)
    log_z, teacher_log_z = tl.load(log_zs + row), tl.load(teacher_log_zs + row)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + lanes
        inside = at < width
        z = tl.load(logits + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
        taught = tl.load(teacher_logits + row * teacher_stride + at, mask=inside, other=-float("inf")).to(tl.float32)
        _, terms, h = _terms(z * scale - log_z, taught * teacher_scale - teacher_log_z, smallest, A, B, W, REST)
        total += terms
        summed += h
    tl.store(divergences + row, tl.sum(total, 0))
    tl.store(sums + row, tl.sum(summed, 0))


@triton.jit
def slopes_kernel(
    logits, teacher_logits, log_zs, teacher_log_zs, sums, factors, targets, logp_factors, stride, teacher_stride, width,
    scale, teacher_scale, smallest,
    A: tl.constexpr, B: tl.constexpr, W: tl.constexpr, REST: tl.constexpr, LOGPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits <- (factor * (h - p sum h) + logp_factor * (onehot(target) - p)) * scale."""
    row = tl.program_id(0).to(tl.int64)
    log_z, teacher_log_z = tl.load(log_zs + row), tl.load(teacher_log_zs + row)
    summed = tl.load(sums + row)
    factor = tl.load(factors + row) * scale
    lanes = tl.arange(0, BLOCK)
    for first in range(0, width, BLOCK):
        at = first + lanes
        inside = at < width
        z = tl.load(logits + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
        taught = tl.load(teacher_logits + row * teacher_stride + at, mask=inside, other=-float("inf")).to(tl.float32)
        p, _, h = _terms(z * scale - log_z, taught * teacher_scale - teacher_log_z, smallest, A, B, W, REST)
        slope = factor * (h - p * summed)
        if LOGPS:
            chosen = tl.where(at == tl.load(targets + row), 1.0, 0.0)
            slope += tl.load(logp_factors + row) * scale * (chosen - p)
        tl.store(logits + row * stride + at, slope, mask=inside)
