"""Rounding to e4m3 in Triton: `fp8.scaled` in one kernel, and what kernels of keys and values in 8 bits share with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.models.layers.fp8 import E4M3

BLOCK = 4096
_LARGEST = tl.constexpr(torch.finfo(E4M3).max)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny * torch.finfo(E4M3).max)  # rows of zeros stay zeros


def scaled_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, k) -> the same in e4m3, and (m, 1) the scales."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    found = torch.empty(rows, width, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    scaled_kernel[(rows,)](x, found, scales, width, x.stride(0), BLOCK=block, num_warps=8 if block > 2048 else 4)
    return found, scales


@triton.jit
def power(exponents):
    """2^(e - 127)."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """Numbers of at most 464 -> the nearest that e4m3 has, still in float32.

    Added to 1.5 * 2^23 times the distance between its neighbours in e4m3, a number is rounded to one of them, the even one of two
    that are as near.
    """
    binade = tl.maximum(tl.abs(numbers).to(tl.int32, bitcast=True) >> 23, 127 - 6)
    shift = 1.5 * power(binade + 20)
    return (numbers + shift) - shift


@triton.jit
def scaled_kernel(x, found, scales, width, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        numbers = tl.load(x + row * x_row + start + lanes, mask=start + lanes < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(numbers.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), _SMALLEST) / _LARGEST
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        numbers = tl.load(x + row * x_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(found + row * width + start + lanes, to_e4m3(numbers / scale).to(tl.float8e4nv), mask=inside)
