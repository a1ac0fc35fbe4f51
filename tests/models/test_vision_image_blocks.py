"""Images that see themselves whole: the calls of the varlen kernel, made on a stand-in for it, are what a dense mask gives."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.models.attention import flash, ragged
from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.attention.ragged import segment_attention

# Of each segment: (text before, length) of its images, and the text behind them.
SEGMENTS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=3), st.integers(1, 4)),
    min_size=1,
    max_size=4,
).filter(lambda segments: any(images for images, _ in segments))


def laid_out(segments: list[tuple[list[tuple[int, int]], int]]) -> tuple[Tensor, Tensor]:
    """(blocks, bounds). Neighbours have different numbers, as two crops of an image have."""
    blocks, bounds, number = [], [0], itertools.count()
    for images, tail in segments:
        for text, length in images:
            blocks += [-1] * text + [next(number)] * length
        blocks += [-1] * tail
        bounds.append(len(blocks))
    return torch.tensor(blocks), torch.tensor(bounds, dtype=torch.int32)


def kernel(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, *_: Any,
    scale: float | None, window_size_left: int, window_size_right: int,
) -> tuple[Tensor]:  # fmt: skip
    """What FlashAttention-2 documents: windows are aligned at the bottom right, -1 is no limit, causal is nothing to the right."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        assert b - a <= max_q
        assert d - c <= max_k
        distance = (torch.arange(b - a) + (d - c) - (b - a))[:, None] - torch.arange(d - c)
        seen = torch.ones(b - a, d - c, dtype=torch.bool)
        if window_size_left >= 0:
            seen &= distance <= window_size_left
        if causal or window_size_right >= 0:
            seen &= distance >= (0 if causal else -window_size_right)
        one = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        how = {"attn_mask": seen, "scale": scale, "enable_gqa": True}
        parts.append(torch.nn.functional.scaled_dot_product_attention(*one, **how).transpose(0, 1))
    return torch.cat(parts), None, None, None, None


@settings(max_examples=60)
@given(segments=SEGMENTS, window=st.sampled_from([None, 3, 5, 8]), narrower=st.sampled_from([0, 3]))
def test_two_varlen_calls_are_the_masked_loop(segments: Any, window: int | None, narrower: int) -> None:
    blocks, bounds = laid_out(segments)
    torch.manual_seed(0)
    widths = ((4, 8), (2, 8), (2, 8 - narrower))  # values of latent attention are narrower
    heads = [torch.randn(1, n, len(blocks), width, dtype=torch.float64, requires_grad=True) for n, width in widths]
    images, longest = ImageBlocks.of(blocks, bounds), int(bounds.diff().max())
    loop = segment_attention(*heads, bounds, longest, None, 0.0, window, images)
    theirs = torch.autograd.grad(loop.square().sum(), heads)
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "flash_can_run", lambda query: True)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *a, **k: calls.append(1) or kernel(*a, **k))
        mine = segment_attention(*heads, bounds, longest, None, 0.0, window, images)
    assert len(calls) == (0 if window is not None and images.longest > window else 2)
    assert (mine - loop).abs().max() < 1e-12
    for one, other in zip(torch.autograd.grad(mine.square().sum(), heads), theirs, strict=True):
        assert (one - other).abs().max() < 1e-10


def test_prefixes_and_caches_refuse_blocks() -> None:
    blocks, bounds = laid_out([([(1, 2)], 1)])
    images = ImageBlocks.of(blocks, bounds)
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="ragged layout only"):
        ragged.ragged_attention(None, q, q, q, None, shared_prefixes=object(), image_blocks=images)
