"""Families of transformers, each built small from its config: trained on its own logits, or refused with a sentence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from posttrain.models.load.model import LoadOptions, disable_dropout, load_model
from scripts.families import BOUND, in_both_precisions, is_right, looked_at, plain_logps, rows, small_model

RIGHT = (
    "opt",
    "gpt2",
    "cohere2",
    "granite",
    "gemma2",
    "glm4_moe",
    "hunyuan_v1_moe",
    "gpt_oss",
    "deepseek_v3",
    "olmo3",
    "ernie4_5",
    "llama4_text",
    "deepseek_v32",
    "jetmoe",
    "nemotron",
    "qwen3_next",
    "granitemoehybrid",
)
RAGGED = ("qwen3_next", "granitemoehybrid")  # with recurrent states, which the native engine does not keep
NATIVE = ("cohere2", "jetmoe", "gemma2", "gpt_oss", "deepseek_v3", "nemotron")


@pytest.mark.parametrize("family", RIGHT)
def test_first_loss_and_sampler_are_those_of_a_plain_forward(family):
    found = looked_at(family)
    assert is_right(found), found
    if family in NATIVE:
        assert (found["layout"], found["why_not_native"]) == ("ragged", None), found
    if family in RAGGED:
        balanced = "The load-balancing loss of its experts counts with 0.001 (`router_aux_loss_coef`)."
        assert (found["layout"], found["notes"]) == ("ragged", [balanced]), found


@pytest.mark.parametrize("family", ["falcon", "falcon_h1", "mamba", "mixtral", "mistral"])
def test_what_is_decided_does_not_depend_on_the_precision(family):
    found = in_both_precisions(family)
    assert found["is_equal"], found


def test_a_family_whose_cache_fails_cannot_write():
    """`xlstm` of transformers 5.19 hands its cache states of another shape than it expects."""
    found = looked_at("xlstm")
    assert found["loss_gap"] <= BOUND
    assert re.match(
        r"ValueError: xLSTMForCausalLM cannot write rollouts here: continued token by token with transformers' cache, it ends with",
        found["error"],
    )


def test_a_model_with_more_than_a_head_over_its_hidden_states_is_refused():
    model = small_model("modernbert-decoder")
    with pytest.raises(
        ValueError, match="ModernBertDecoderForCausalLM does more to its hidden states or logits than is known here"
    ):
        load_model(model, LoadOptions())


@pytest.mark.parametrize("family", ["recurrent_gemma", "xlstm"])
def test_a_bound_of_logits_by_any_name_is_known(family):
    load_model(small_model(family), LoadOptions())  # refused, if its logits were others


class Dropping(nn.Module):
    """Drops by a function, as OPT does, and by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layerdrop, self.inner, self.dropped = 0.5, 0.1, nn.Dropout(0.5), "never"


def test_dropout_that_is_no_module_is_disabled():
    module = Dropping()
    disable_dropout(module)
    assert (module.dropout, module.layerdrop, module.inner.p, module.dropped) == (0.0, 0.0, 0.0, "never")


def test_opt_answers_alike_in_training_without_dropout():
    model, row = small_model("opt"), rows()[1]
    model.train()
    assert torch.equal(plain_logps(model, row), plain_logps(model.eval(), row))
