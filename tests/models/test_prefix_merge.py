"""The two parts of a shared prefix's attention, merged: torch's way against float64, and Triton's way against torch's.

The kernel runs on a CPU too where triton is installed: TRITON_INTERPRET=1 python -m pytest tests/models/test_prefix_merge.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from posttrain.models.attention.prefix import merged_parts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")
TOKENS, HEADS, DIM, PREFIX = 11, 3, 8, 5


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query looks at every key: (tokens, heads, dim) and the log-sum-exps (heads, tokens)."""
    scores = torch.einsum("qhd,khd->hqk", query, key)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def parts(start: int, scale: float = 3.0):
    """Two parts of an attention, what it is as a whole, and what is kept for tokens outside."""
    torch.manual_seed(start)
    query, key, value, more_keys, more_values = (
        scale * torch.randn(n, HEADS, DIM, dtype=torch.float64) for n in (TOKENS, 7, 7, PREFIX, PREFIX)
    )
    own, own_sums = attended(query, key, value)
    looking = query[start : start + 6]
    back, back_sums = attended(looking, more_keys, more_values)
    whole, whole_sums = attended(looking, torch.cat([key, more_keys]), torch.cat([value, more_values]))
    out, sums = own.clone(), own_sums.clone()
    out[start : start + 6], sums[:, start : start + 6] = whole, whole_sums
    return (own, own_sums, back, back_sums, start), (out, sums)


def in_float32(given):
    return [x.float() if torch.is_tensor(x) else x for x in given]


@pytest.mark.parametrize("start", [0, 2, 5])
def test_the_parts_give_the_softmax_over_their_union(start):
    given, (out, sums) = parts(start)
    found, found_sums = merged_parts(*given)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_sums, sums, rtol=1e-12, atol=1e-12)
    assert found.data_ptr() != given[0].data_ptr(), "what the kernel returned is kept by selective checkpointing"


@needs_triton
@pytest.mark.parametrize("start", [0, 2, 5])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_the_kernel_is_the_formula(start, scale):
    from posttrain.models.attention import prefix_triton

    given = in_float32(parts(start, scale)[0])
    wanted, wanted_sums = merged_parts(*given)
    found, found_sums = prefix_triton.merged_parts(*given)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6 * scale)
    torch.testing.assert_close(found_sums, wanted_sums, rtol=1e-6, atol=1e-6)


@needs_triton
def test_parts_that_do_not_lie_in_one_piece_are_read_as_they_are():
    from posttrain.models.attention import prefix_triton

    own, own_sums, back, back_sums, start = in_float32(parts(2)[0])
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (own, own_sums, back, back_sums)]
    assert not strided[0].is_contiguous()
    found, _ = prefix_triton.merged_parts(*strided, start)
    torch.testing.assert_close(found, merged_parts(own, own_sums, back, back_sums, start)[0])
