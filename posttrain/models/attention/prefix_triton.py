"""Merging the two parts of a shared prefix's attention in one pass over them; `prefix` has the same in plain torch.

Plain torch reads and writes the outputs seven times, mostly in float32; here both parts are read once and the result is written
once. One program per token.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge(
    own, own_sums, back, back_sums, out, sums, tokens, start, stop, WIDTH: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    head = (column // DIM).to(tl.int64)
    is_first = inside & (column % DIM == 0)  # one of a head's columns speaks for it
    values = tl.load(own + token * WIDTH + column, mask=inside).to(tl.float32)
    total = tl.load(own_sums + head * tokens + token, mask=inside, other=0.0)
    if (token >= start) & (token < stop):
        place = token - start
        seen = tl.load(back + place * WIDTH + column, mask=inside).to(tl.float32)
        seen_sums = tl.load(back_sums + head * (stop - start) + place, mask=inside, other=0.0)
        highest = tl.maximum(total, seen_sums)
        own_part, seen_part = tl.exp(total - highest), tl.exp(seen_sums - highest)
        both = own_part + seen_part
        values = (values * own_part + seen * seen_part) / both
        total = highest + tl.log(both)
    tl.store(out + token * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)
    tl.store(sums + head * tokens + token, total, mask=is_first)


def merged_parts(own: Tensor, own_sums: Tensor, back: Tensor, back_sums: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """As `prefix.merged_parts`."""
    tokens, heads, dim = own.shape
    own, own_sums, back, back_sums = (x.contiguous() for x in (own, own_sums, back, back_sums))
    out, sums = torch.empty_like(own), torch.empty_like(own_sums)
    width = heads * dim
    block = triton.next_power_of_2(width)
    with torch.cuda.device(own.device) if own.is_cuda else nullcontext():  # Triton's interpreter takes the CPU's
        _merge[(tokens,)](
            own, own_sums, back, back_sums, out, sums, tokens, start, start + len(back), WIDTH=width, DIM=dim,
            BLOCK=block, num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out, sums
