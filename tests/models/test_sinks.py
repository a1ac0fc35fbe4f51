"""Sinks beside the flash kernel: what is made of its calls, on a stand-in for it, is the softmax with one more score."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import SharedPrefixes
from posttrain.models.attention import ragged
from posttrain.models.attention.ragged import segment_attention

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def parts(cu_q: Tensor, cu_k: Tensor) -> Any:
    """Queries and keys that belong together."""
    return zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float, left: int) -> Tensor:
    """(heads, queries, keys), aligned at the bottom right, as FlashAttention-2 documents."""
    scores = scale * q.transpose(0, 1) @ k.transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0).transpose(1, 2)
    distance = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    return scores.masked_fill(~(seen & ((distance <= left) | (left < 0))), -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, sums = torch.empty_like(q), q.new_empty(HEADS, len(q))
    for (a, b), (c, d) in parts(cu_q, cu_k):
        scores = scores_of(q[a:b], k[c:d], causal, scale, window_size_left)
        wide = v[c:d].transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0)
        out[a:b] = (scores.softmax(-1) @ wide).transpose(0, 1)
        sums[:, a:b] = scores.logsumexp(-1)
    return out, sums, torch.zeros(1), torch.zeros(1), None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float, window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """With the probabilities exp(score - sum) of whatever sums it is handed, as the kernel has."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    folded = lambda x: x.unflatten(0, (KEY_HEADS, -1)).sum(1).transpose(0, 1)  # noqa: E731
    for (a, b), (c, d) in parts(cu_q, cu_k):
        weights = (scores_of(q[a:b], k[c:d], causal, scale, window_size_left) - sums[:, a:b, None]).exp()
        do, wide_k, wide_v = (x.transpose(0, 1) for x in (grad[a:b], k[c:d], v[c:d]))
        wide_k, wide_v = (x.repeat_interleave(HEADS // KEY_HEADS, 0) for x in (wide_k, wide_v))
        inner = (grad[a:b] * out[a:b]).sum(-1).T[..., None]
        ds = scale * weights * (do @ wide_v.transpose(1, 2) - inner)
        dq[a:b] += (ds @ wide_k).transpose(0, 1)
        dk[c:d] += folded(ds.transpose(1, 2) @ q[a:b].transpose(0, 1))
        dv[c:d] += folded(weights.transpose(1, 2) @ do)
    return dq, dk, dv


def leaves(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [(HEADS,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture
def kernel(monkeypatch):
    """From here on the kernel can run."""

    def put() -> None:
        monkeypatch.setattr(ragged, "flash_can_run", lambda query: True)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)

    yield put
    monkeypatch.undo()


def assert_equal(found: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad((one * weights).sum(), given) for one in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), window=st.sampled_from([None, 1, 3, 20]))
def test_segments(lengths: list[int], window: int | None) -> None:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    *heads, sinks = given = leaves(sum(lengths))
    how = (bounds, max(lengths), 0.3, 0.0, window, None, None, sinks)
    wanted = segment_attention(*heads, *how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "flash_can_run", lambda query: True)
        patch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
        assert_equal(segment_attention(*heads, *how), wanted, given)


def test_shared_prefixes(kernel) -> None:
    """Prefixes of 2 and 3 tokens, one segment alone, continuations of 2, 1 and 4 tokens."""
    edges = lambda *lengths: torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)  # noqa: E731
    prefixes = SharedPrefixes(edges(2, 3), edges(3, 4), 5, 7, 14, 3, 4)
    *heads, sinks = given = leaves(14)
    how = {"cu_seq_lens_q": edges(2, 3, 2, 2, 1, 4), "max_length_q": 4, "shared_prefixes": prefixes, "s_aux": sinks}
    wanted = ragged.ragged_attention(None, *heads, None, scaling=0.3, **how)[0]
    kernel()
    assert_equal(ragged.ragged_attention(None, *heads, None, scaling=0.3, **how)[0], wanted, given)
