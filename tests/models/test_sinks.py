"""Sinks beside the flash kernel: what is made of its calls, on a stand-in for it, is the softmax with one more score."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.core.batch import SharedPrefixes
from posttrain.models.attention import flash, ragged
from posttrain.models.attention.ragged import segment_attention
from tests.models.flash_kernels import backward, forward

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def leaves(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [(HEADS,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture
def kernel(monkeypatch):
    """From here on the kernel can run."""

    def put() -> None:
        monkeypatch.setattr(flash, "flash_can_run", lambda query: True)
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
        patch.setattr(flash, "flash_can_run", lambda query: True)
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
