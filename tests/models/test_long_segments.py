"""Long segments attend by themselves: the same answers and gradients, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from posttrain.core import batch as batches
from posttrain.core.batch import RAGGED, SHARED, LongSegments
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention import dense, ragged
from posttrain.models.attention.dense import Gain, filled, long_segment_attention
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.attention.trial import NEAR, apart, heads_of, tried
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests.tiny import causal_lm

LENGTHS = [3, 9, 40, 2, 2, 17, 33, 1]


@pytest.fixture
def from_nine(monkeypatch):
    """Nine tokens are long."""
    monkeypatch.setattr(batches, "LONG", 9)


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def heads(count: int, tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, count, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()


def test_runs_are_long_segments_and_the_short_ones_between(from_nine):
    long = LongSegments.of(LENGTHS)
    assert long.tokens == (3, 9, 40, 4, 17, 33, 1)
    assert long.longest == (3, 9, 40, 2, 17, 33, 1)
    edges = [None if bounds is None else bounds.tolist() for bounds in long.bounds]
    assert edges == [[0, 3], None, None, [0, 2, 4], None, None, [0, 1]]
    assert LongSegments.of([8, 2]) is None


@pytest.mark.parametrize("scale", [None, 0.3])
def test_answers_and_gradients_are_those_of_segments(from_nine, scale):
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q, k, v = heads(4, total), heads(2, total), heads(2, total)
    flow = torch.randn(1, total, 4, 8, dtype=torch.float64)
    expected = segment_attention(q, k, v, bounds_of(LENGTHS), max(LENGTHS), scale)
    found = long_segment_attention(q, k, v, LongSegments.of(LENGTHS), scale, segment_attention)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(expected, (q, k, v), flow)
    for one, other in zip(torch.autograd.grad(found, (q, k, v), flow), wanted):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@given(st.integers(1, 1 << 20))
def test_a_segment_is_filled_by_a_sixteenth_at_most(tokens):
    assert tokens <= filled(tokens) <= tokens + tokens // 16
    assert filled(filled(tokens)) == filled(tokens)


def test_there_are_sixteen_lengths_in_an_octave():
    assert len({filled(tokens) for tokens in range(4097, 8193)}) == 16
    assert filled(4096) == 4096
    assert filled(32_768) == 32_768


@pytest.fixture(scope="module")
def model():
    return load_model(causal_lm(), LoadOptions()).model.double()


def samples() -> list[tuple[Sample]]:
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 60, (length,), generator=made).tolist() for length in LENGTHS]
    return [(Sample(ids, [False] + [True] * (len(ids) - 1)),) for ids in rows]


def scored(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logps = score_tokens(model, collate(samples(), ("text",), RAGGED)).logps
    logps.square().sum().backward()
    return logps.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_a_model_answers_alike_with_either_attention(model, from_nine, monkeypatch):
    calls, attend = [], dense.alone
    monkeypatch.setattr(dense, "alone", lambda *given: calls.append(given[0].shape[2]) or attend(*given))
    expected = scored(model)
    assert not calls
    monkeypatch.setattr(ragged, "dense_pays", lambda *heads: True)
    found = scored(model)
    assert calls == [9, 40, 17, 33] * model.config.num_hidden_layers
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_batches_say_which_segments_are_long(from_nine):
    batch = collate(samples(), ("text",), RAGGED)
    assert batch.long.tokens == LongSegments.of(LENGTHS).tokens
    assert batch.to("meta").long.bounds[0].device.type == "meta"
    assert batch.to("meta").long.bounds[1] is None
    filled_up = collate(samples(), ("text",), RAGGED, pad_to_multiple_of=64)
    assert sum(filled_up.long.tokens) == filled_up.input_ids.shape[1] == 128
    pair = (
        Sample([5] * 10 + [6] * 4, [False] * 10 + [True] * 4),
        Sample([5] * 10 + [7] * 4, [False] * 10 + [True] * 4),
    )
    assert collate([pair], ("chosen", "rejected"), SHARED).long is None


def test_what_only_the_varlen_kernel_knows_stays_with_it(from_nine, monkeypatch):
    """A sliding window, here; soft-caps, sinks, dropout and blocks of images likewise."""
    monkeypatch.setattr(ragged, "dense_pays", lambda *heads: pytest.fail("asked"))
    q, total = heads(2, sum(LENGTHS)), sum(LENGTHS)
    how = {"cu_seq_lens_q": bounds_of(LENGTHS), "max_length_q": 40, "long_segments": LongSegments.of(LENGTHS)}
    for more in ({"sliding_window": 5}, {"softcap": 3.0}, {"s_aux": torch.zeros(2, dtype=torch.float64)}):
        output, _ = ragged.ragged_attention(None, q, q, q, None, **how, **more)
        assert output.shape == (1, total, 2, 8)


def test_a_gain_says_what_it_means():
    assert str(Gain(1.7)) == "Segments from 4,096 tokens attend by cuDNN, 1.70 times as fast as by the varlen kernel."
    assert "dense attention is 1.10 times as fast" in str(Gain(1.1))
    assert not Gain(1.1).is_worth_it
    assert "could not be run" in str(Gain(0, "could not be run (RuntimeError: no)"))
    heads_of_16 = ragged.long_gain(4, 2, 16, torch.bfloat16, torch.device("cpu"))
    assert heads_of_16.problem == "is not asked for heads of 16"


@pytest.mark.parametrize("heads_to_a_key", [6, 7, 8])
def test_a_trial_tells_no_kernel_from_one_that_adds_heads_in_bfloat16(heads_to_a_key):
    """As cuDNN does and FlashAttention 4 does not: both are right."""
    torch.manual_seed(0)
    given = heads_of(1024, (heads_to_a_key, 1, 1), 64, torch.bfloat16, torch.device("cpu"))
    exact = [x.detach().float().requires_grad_() for x in given]

    def attend(heads):
        q, k, v = (x.expand(-1, heads_to_a_key, -1, -1) for x in heads)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    _, wanted = tried(lambda: attend(exact), exact, 0)
    _, found = tried(lambda: attend(given), given, 0)
    assert apart(wanted, found) < NEAR / 3
