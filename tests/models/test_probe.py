"""Probes tell rounding from another answer, on models that are sure of themselves too."""

from __future__ import annotations

import copy

import pytest
import torch

from posttrain.core.batch import PADDED, SHARED
from posttrain.models.attention.mixers import are_carried
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.probe import ordinary_tokens
from posttrain.rollout.engines.native.engine import NativeEngine
from scripts.families import small_model
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
        "posttrain.models.attention.prefix._shared_prefix_loop",
        lambda query, key, value, bounds, prefixes, scale, dropout, *_: segment_attention(
            query, key, value, bounds, int(bounds.diff().max()), scale, dropout
        ),
    )
    loaded = load_model(sharp_model(), LoadOptions(dtype=torch.bfloat16, share_prefixes=True))
    assert loaded.layout != SHARED
    assert any("where a prefix is shared" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("family", "asked_first"), [("falcon_h1", True), ("falcon_h1", False), ("lfm2_moe", False), ("stablelm", True)]
)
def test_a_state_that_reads_on_into_the_next_segment_is_noticed_in_low_precision(family, asked_first, monkeypatch):
    """It moves the log-probs of these by 0.02, far below the 0.15 that bfloat16 may be off by."""
    if asked_first:
        monkeypatch.setattr("posttrain.models.attention.mixers.has_mixers", lambda innermost: False)
    loaded = load_model(small_model(family).to(torch.bfloat16), LoadOptions(share_prefixes=True))
    assert loaded.layout == SHARED, loaded.notes
    assert are_carried(loaded.model)
    assert NativeEngine(loaded.model, max_slots=4).why_not() is None


def test_attention_of_its_own_that_reads_on_is_padded_in_low_precision():
    loaded = load_model(small_model("falcon").to(torch.bfloat16), LoadOptions())
    assert loaded.layout == PADDED
    assert any("other tokens in one change the next by 0.0" in note for note in loaded.notes)


def test_a_prompt_that_changes_another_is_noticed_by_the_engine(monkeypatch):
    """Each answer is pulled to the mean of both by a seventh."""
    engine = NativeEngine(load_model(sharp_model(), LoadOptions(dtype=torch.bfloat16)).model)
    answers = engine._probe_answers
    monkeypatch.setattr(
        engine,
        "_probe_answers",
        lambda sequences: list(0.86 * (found := torch.stack(answers(sequences)).float()) + 0.14 * found.mean(0)),
    )
    assert "another prompt beside it changes" in engine.why_not()


def test_processes_without_weights_pass_bounds_on_where_the_first_does(monkeypatch):
    """Answers of weights that were not read say nothing: all zeros are equal in every layout."""
    model = small_model("stablelm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not are_carried(load_model(copy.deepcopy(model), LoadOptions()).model)
    monkeypatch.setattr(
        "posttrain.models.load.model._of_the_first_process", lambda found, options: found is False or None
    )
    assert are_carried(load_model(model, LoadOptions()).model)
