"""Long segments through a kernel for dense batches: here SDPA stands in for cuDNN's, which `tests/gpu` runs."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.batch import RAGGED, SHARED
from posttrain.models.attention import dense
from posttrain.models.attention.ragged import choose_long_attention, segment_attention
from posttrain.models.attention.softmax import attention
from scripts.families import small_model
from tests.mixers import answers, assert_alike, loaded


@pytest.fixture
def stand_in(monkeypatch):
    """Counts the calls of the kernel, each with the shape of its queries."""
    shapes = []

    def kernel(query, key, value, scale):
        shapes.append(tuple(query.shape))
        return attention(query, key, value, None, scale)

    monkeypatch.setattr(dense, "cudnn", kernel)
    monkeypatch.setattr(dense, "_chosen", set())
    return shapes


@given(st.integers(1, 1 << 18))
def test_a_segment_is_filled_up_by_a_sixteenth_at_most(length):
    filled = dense.filled_length(length)
    assert length <= filled < length + max(length / dense.STEPS, dense.SHORTEST_STEP)
    assert dense.filled_length(filled) == filled


def test_long_segments_have_few_lengths():
    assert len({dense.filled_length(length) for length in range(1025, 2049)}) == dense.STEPS
    assert dense.filled_length(32_768) == 32_768
    assert dense.filled_length(3_000) == 3_072


def test_answers_and_gradients_are_those_of_segments_apart(stand_in):
    torch.manual_seed(0)
    lengths = torch.tensor([100, 64, 1])
    query, key, value = (torch.randn(1, n, 165, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    flows = torch.randn(1, 165, 4, 8, dtype=torch.float64)
    bounds = torch.tensor([0, 100, 164, 165], dtype=torch.int32)
    ways = [
        dense.attend(query, key, value, lengths, 0.3),
        segment_attention(query, key, value, bounds, 100, 0.3),
    ]
    found = [[way, *torch.autograd.grad(way, (query, key, value), flows)] for way in ways]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert [shape[2] for shape in stand_in] == [128, 64, 64]


@pytest.mark.parametrize("family", ["llama", "stablelm", "falcon_h1"])
def test_a_model_takes_it_for_long_segments_only(family, stand_in, monkeypatch):
    model = small_model(family)
    wanted = answers(loaded(model, RAGGED), RAGGED)
    assert not stand_in  # not chosen
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dense._chosen.add((config.num_attention_heads, config.num_key_value_heads, width, torch.float32))
    answers(loaded(model, RAGGED), RAGGED)
    assert not stand_in  # 30 tokens a segment are not worth it
    monkeypatch.setattr(dense, "WORTH_A_CALL", 5)
    assert_alike(answers(loaded(model, RAGGED), RAGGED), wanted)
    assert stand_in
    stand_in.clear()
    answers(loaded(model, SHARED), SHARED)  # continuations attend to their prefixes by the kernels for ragged rows
    assert not stand_in


def test_not_under_a_window_nor_where_runs_are_deterministic(stand_in, monkeypatch):
    monkeypatch.setattr(dense, "WORTH_A_CALL", 5)
    model = small_model("mistral")
    model.config.sliding_window = 4
    dense._chosen.add((4, 2, 8, torch.float32))
    answers(loaded(copy.deepcopy(model), RAGGED), RAGGED)
    assert not stand_in
    assert dense.long_segments((10, 7)).tolist() == [10, 7]
    torch.use_deterministic_algorithms(True)
    try:
        assert dense.long_segments((10, 7)) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("cost", "said"), [(1.0, "one of 8,192, forward and backward: 1.00 ms, flash 2.00 ms"), (1.9, None)]
)
def test_it_is_chosen_where_it_is_faster(cost, said, stand_in, monkeypatch):
    times = iter([2.0, cost])
    monkeypatch.setattr(dense, "_milliseconds", lambda *asked: next(times))
    found = choose_long_attention(small_model("llama").bfloat16(), torch.device("cpu"))
    assert (said in found) if said else found is None
    assert dense._chosen == ({(4, 2, 8, torch.bfloat16)} if said else set())


def test_one_that_answers_otherwise_is_not_chosen(stand_in, monkeypatch):
    monkeypatch.setattr(
        dense, "cudnn", lambda query, key, value, scale: 1.1 * attention(query, key, value, None, scale)
    )
    assert choose_long_attention(small_model("llama").bfloat16(), torch.device("cpu")) is None


def test_one_that_cannot_run_is_not_chosen(stand_in, monkeypatch):
    def kernel(*given):
        raise RuntimeError("No valid execution plans built.")

    monkeypatch.setattr(dense, "cudnn", kernel)
    assert choose_long_attention(small_model("llama").bfloat16(), torch.device("cpu")) is None
