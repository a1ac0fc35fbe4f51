"""Rotary embeddings of a tower's queries and keys, as one Triton kernel for both. CUDA only.

transformers casts both to float32, makes five tensors of each and casts back. Here each is read once and written once:
out = x * cos + rotate_half(x) * sin, in float32, rounded once. The backward is the rotation by the negative angle.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, cos, sin, out, patch_stride, head_stride, heads, half, SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """One patch: all of its heads. `out` is contiguous (patches, heads, 2 * half)."""
    patch = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (place < half)
    angle, seen = patch * 2 * half + place, place < half
    read, written = (
        x + patch * patch_stride + head * head_stride + place,
        out + (patch * heads + head) * 2 * half + place,
    )
    first = tl.load(read, mask=inside).to(tl.float32)
    second = tl.load(read + half, mask=inside).to(tl.float32)
    cos_first = tl.load(cos + angle, mask=seen).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=seen).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=seen).to(tl.float32)
    sin_second = tl.load(sin + angle + half, mask=seen).to(tl.float32)
    if SIGN > 0:
        made_first, made_second = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    else:  # the transposed map: what each half gave to the other comes back with the other's sine
        made_first, made_second = first * cos_first + second * sin_second, second * cos_second - first * sin_first
    tl.store(written, made_first.to(out.dtype.element_ty), mask=inside)
    tl.store(written + half, made_second.to(out.dtype.element_ty), mask=inside)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    patches, heads, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = {"HEADS": triton.next_power_of_2(heads), "HALF": triton.next_power_of_2(width // 2)}
    if patches:
        with torch.cuda.device(x.device):
            _rotate[(patches,)](x, cos, sin, out, x.stride(0), x.stride(1), heads, width // 2, SIGN=sign, **sizes)
    return out


class Rotated(torch.autograd.Function):
    """(queries, keys) of (patches, heads, width), rotated by (patches, width) of cos and sin, which get no gradient."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(queries, cos, sin, 1), _rotated(keys, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(of_queries, cos, sin, -1), _rotated(of_keys, cos, sin, -1), None, None
