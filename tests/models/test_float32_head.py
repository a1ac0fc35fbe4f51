"""A head in float32 over bfloat16 weights: the product of the same numbers, without the rounding of its result."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma2Config

from posttrain.core.batch import PADDED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.float32_head import compute_head_in_float32
from posttrain.models.scoring.token_scores import score_tokens
from tests import tiny
from tests.models.test_token_scores import SHAPE


def gemma():
    config = Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=4)
    return AutoModelForCausalLM.from_config(config)


MODELS = {"tied": lambda: tiny.causal_lm(tie_word_embeddings=True), "own head": tiny.causal_lm, "soft-capped": gemma}


def batch():
    rng = np.random.default_rng(3)
    units = [(Sample(rng.integers(3, 250, n), rng.random(n) < 0.7, row=i),) for i, n in enumerate((5, 11, 8))]
    return collate(units, ("sample",), PADDED)


def expected_logps(model, asked):
    """The body in bfloat16, the head by hand in float32."""
    body = getattr(model, model.base_model_prefix)
    hidden = body(input_ids=asked.input_ids, attention_mask=asked.attention_mask).last_hidden_state
    chosen = hidden.flatten(0, 1)[asked.positions].float()
    logits = chosen @ model.get_output_embeddings().weight.float().T
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    return logits.log_softmax(-1).gather(-1, asked.targets[:, None]).squeeze(-1)


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_a_float32_product(name):
    torch.manual_seed(0)
    model = load_model(MODELS[name]().to(torch.bfloat16), LoadOptions(layout=PADDED)).model.eval()
    asked = batch()
    expected = expected_logps(model, asked)
    expected.sum().backward()
    gradient = model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    rounded = score_tokens(model, asked).logps
    compute_head_in_float32(model)
    found = score_tokens(model, asked).logps
    found.sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (rounded - expected).abs().max() > 1e-4  # what the option is for
    exact = model.get_output_embeddings().weight.grad
    torch.testing.assert_close(exact, gradient, rtol=2e-2, atol=2e-2 * gradient.abs().max().item())


def test_generation_reads_the_same_logits():
    model = tiny.causal_lm(dtype=torch.bfloat16).eval()
    ids = torch.arange(3, 12)[None]
    plain = model(ids)
    compute_head_in_float32(model)
    compute_head_in_float32(model)
    logits = model(ids).logits
    hidden = model.model(ids).last_hidden_state.float()
    assert (plain.logits.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits, hidden @ model.lm_head.weight.float().T)


def test_a_copy_computes_with_its_own_weights():
    model = tiny.causal_lm(dtype=torch.bfloat16).eval()
    compute_head_in_float32(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    ids = torch.arange(3, 12)[None]
    assert twin(ids).logits.abs().max() == 0
    assert model(ids).logits.abs().max() > 0


def test_float64_stays_what_it_is():
    model = tiny.causal_lm(dtype=torch.float64)
    compute_head_in_float32(model)
    assert model(torch.arange(3, 12)[None]).logits.dtype == torch.float64


def test_a_head_with_an_adapter_is_refused():
    model = get_peft_model(tiny.causal_lm(), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="needs a plain linear layer, without an adapter"):
        compute_head_in_float32(model.get_base_model())
