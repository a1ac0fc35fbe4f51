"""Triton kernel of `master_adamw`: clipping, AdamW and the rounded copy in one pass. Imported on CUDA machines only."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    addresses, sizes, corrections, tensor_of_chunk, start_of_chunk, clip, skip, num_tensors,
    lr, decay, beta1, beta2, eps, LOW: tl.constexpr, GRADIENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p <- p (1 - decay) - lr m' / (sqrt(v') + eps), and low <- p; nothing at all where `skip` is not 0.

    One program per chunk of one tensor. `addresses` is (5, num_tensors): master, first and second moment, gradient, low.
    """
    if tl.load(skip) == 0:
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of_chunk + chunk)
        start = tl.multiple_of(tl.load(start_of_chunk + chunk), 16)
        size = tl.load(sizes + tensor)
        master = tl.multiple_of(tl.load(addresses + tensor), 16).to(tl.pointer_type(tl.float32))
        first = tl.multiple_of(tl.load(addresses + num_tensors + tensor), 16).to(tl.pointer_type(tl.float32))
        second = tl.multiple_of(tl.load(addresses + 2 * num_tensors + tensor), 16).to(tl.pointer_type(tl.float32))
        gradient = tl.multiple_of(tl.load(addresses + 3 * num_tensors + tensor), 16).to(tl.pointer_type(GRADIENT))
        low = tl.multiple_of(tl.load(addresses + 4 * num_tensors + tensor), 16).to(tl.pointer_type(LOW))
        correction1 = tl.load(corrections + tensor)
        correction2_root = tl.sqrt(tl.load(corrections + num_tensors + tensor))
        factor = tl.load(clip)
        # Loads without a mask are wide: only the last chunk of a tensor is masked.
        if start + CHUNK <= size:
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                _update(
                    master + at, first + at, second + at, gradient + at, low + at, True, correction1, correction2_root,
                    factor, lr, decay, beta1, beta2, eps, LOW, False,
                )  # fmt: skip
        else:
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                _update(
                    master + at, first + at, second + at, gradient + at, low + at, at < size, correction1,
                    correction2_root, factor, lr, decay, beta1, beta2, eps, LOW, True,
                )  # fmt: skip


@triton.jit
def _update(
    master, first, second, gradient, low, inside, correction1, correction2_root, factor, lr, decay, beta1, beta2, eps,
    LOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASKED:
        g, m, v, p = (
            tl.load(gradient, mask=inside), tl.load(first, mask=inside), tl.load(second, mask=inside),
            tl.load(master, mask=inside),
        )  # fmt: skip
    else:
        g, m, v, p = tl.load(gradient), tl.load(first), tl.load(second), tl.load(master)
    g = g.to(tl.float32) * factor
    m = m + (1.0 - beta1) * (g - m)
    v = v + (1.0 - beta2) * (g * g - v)
    p = p - p * decay - lr * (m / correction1) / (tl.sqrt(v) / correction2_root + eps)
    if MASKED:
        tl.store(first, m, mask=inside)
        tl.store(second, v, mask=inside)
        tl.store(master, p, mask=inside)
        tl.store(low, p.to(LOW), mask=inside)
    else:
        tl.store(first, m)
        tl.store(second, v)
        tl.store(master, p)
        tl.store(low, p.to(LOW))
