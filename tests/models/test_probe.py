"""Probes tell rounding from another answer, on models that are sure of themselves too."""

from __future__ import annotations

import torch

from posttrain.core.batch import SHARED
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.probe import ordinary_tokens
from posttrain.rollout.engines.native.engine import NativeEngine
from tests.rollout import families


def sharp_model():
    """Six layers in bfloat16 that give their favourite word half of the probability, and a random one e^-18."""
    model = families.model_of("llama", hidden_size=64, num_hidden_layers=6)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    return model.to(torch.bfloat16)


def test_rounding_of_words_that_nobody_says_turns_nothing_off():
    """By the log-probs of random words, 0.2 off here, neither prefixes would be shared nor the native engine be used."""
    loaded = load_model(sharp_model(), LoadOptions(dtype=torch.bfloat16, share_prefixes=True))
    assert loaded.layout == SHARED, loaded.notes
    assert NativeEngine(loaded.model).why_not() is None


def test_another_answer_is_noticed(monkeypatch):
    loaded = load_model(sharp_model(), LoadOptions(dtype=torch.bfloat16))
    engine = NativeEngine(loaded.model)
    monkeypatch.setattr(
        "posttrain.rollout.engines.native.step.DecodeStep.attend", lambda self, *call: call[1].transpose(1, 2)
    )
    assert "differ from a full forward's" in engine.why_not()


def test_probes_ask_with_ordinary_tokens():
    """Control tokens stand at the ends of a vocabulary."""
    found = ordinary_tokens(families.model_of("llama"), 500)
    assert found.min() >= 20
    assert found.max() < 180
    assert torch.equal(found, ordinary_tokens(families.model_of("llama"), 500))


def test_a_prefix_that_is_not_seen_is_noticed_in_low_precision(monkeypatch):
    """By the average over all words, which is what 16 bits are judged by."""
    monkeypatch.setattr(
        "posttrain.models.attention.ragged.shared_prefix_loop",
        lambda query, key, value, bounds, longest, prefixes, scaling, dropout, *_: segment_attention(
            query, key, value, bounds, longest, scaling, dropout
        )[0],
    )
    loaded = load_model(sharp_model(), LoadOptions(dtype=torch.bfloat16, share_prefixes=True))
    assert loaded.layout != SHARED
    assert any("where a prefix is shared" in note for note in loaded.notes)
