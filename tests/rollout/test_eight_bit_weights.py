"""Products in 8 bits while completions are written: what is rounded, when, and that the model is unchanged outside of a session."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.models.layers import fp8
from posttrain.models.layers.kernels import compile_layers
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import FP8, generate
from posttrain.rollout.engines.select import ENGINES
from tests.rollout.families import SEEDED, groups, loaded, prompts, texts
from tests.rollout.test_mixture import moved

WIDE = {"hidden_size": 64, "intermediate_size": 96}  # multiples of 16
FAMILIES = ["qwen2", "gemma2", "qwen2_moe", "deepseek_v3"]
MOVED = 3
"""Of 64 completions, that the last bit of a sum may tip into a neighbour in 8 bits."""


def differing(one, other):
    return sum(a != b for a, b in zip(texts(one), texts(other), strict=True))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return loaded(request.param, **WIDE)


@pytest.fixture(scope="module")
def expected(model):
    return generate(NativeEngine(model, weight_dtype=FP8), groups(), SEEDED)


# ---- completions -----------------------------------------------------------------------------------------------------


def test_they_are_near_those_of_exact_products_and_not_the_same(model, expected):
    exact = generate(NativeEngine(model), groups(), SEEDED)
    assert differing(exact, expected) > MOVED
    pairs = [(a, b) for a, b in zip(exact, expected) if a.ids[0] == b.ids[0]]
    first = np.abs([a.policy_logps[0] - b.policy_logps[0] for a, b in pairs])
    assert 1e-4 < first.mean() < 0.1


@pytest.mark.parametrize("options", [{"max_slots": 1}, {"max_slots": 7, "steps_per_look": 7}, {"drafts": 3}])
def test_slots_and_drafts_do_not_matter(model, expected, options):
    few = groups() if "drafts" in options or options["max_slots"] > 1 else groups()[:12]
    found = generate(NativeEngine(model, weight_dtype=FP8, **options), few, SEEDED)
    assert differing(found, expected[: len(few)]) <= MOVED


def test_samples_that_are_put_back_are_what_they_were(model, expected):
    native = NativeEngine(model, weight_dtype=FP8, max_slots=64)
    with native.session(SEEDED):
        page_bytes = native._made[0].store.page_bytes
    native.kv_memory = 20 * page_bytes
    with native.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in groups()]
        found = {}
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 5
    assert differing([found[ticket] for ticket in tickets], expected) <= MOVED


def test_keys_and_values_may_be_in_8_bits_as_well():
    model = loaded("qwen2", **WIDE)
    both = ENGINES["native"](model, weight_dtype=FP8, kv_dtype=FP8)
    assert isinstance(both, NativeEngine)
    found = generate(both, groups(), SEEDED)
    assert differing(found, generate(NativeEngine(model, weight_dtype=FP8), groups(), SEEDED)) > MOVED
    assert differing(found, generate(NativeEngine(model, kv_dtype=FP8), groups(), SEEDED)) > MOVED


def test_both_models_of_a_mixture_are_rounded():
    model = loaded("llama", **WIDE)
    native = ENGINES["native"](model, mixture=Mixture(moved(model), 0.4), weight_dtype=FP8)
    assert isinstance(native, NativeEngine)
    generate(native, prompts(4), SEEDED)
    assert all(weights.bytes > 0 for weights in native.packed)
    assert native.packed[0].bytes == native.packed[1].bytes


# ---- when ------------------------------------------------------------------------------------------------------------


def kept_of(native):
    return [tensor for kept in native.packed[0]._kept.values() for tensor in kept]


def test_new_weights_are_rounded_into_the_same_memory():
    model, asked = loaded("qwen2", **WIDE), prompts(12)
    native = NativeEngine(model, weight_dtype=FP8)
    generate(native, asked, SEEDED)
    addresses = [tensor.data_ptr() for tensor in kept_of(native)]
    with torch.no_grad():
        for linear in fp8.linears(model):
            linear.weight.mul_(-1.5)
    native.load_weights(None, 1)
    found = generate(native, asked, SEEDED)
    assert [tensor.data_ptr() for tensor in kept_of(native)] == addresses
    assert texts(found) == texts(generate(NativeEngine(model, weight_dtype=FP8), asked, SEEDED))


def test_every_session_rounds_anew_whatever_the_version_says():
    model, asked = loaded("qwen2", **WIDE), prompts(12)
    native = NativeEngine(model, weight_dtype=FP8)
    generate(native, asked, SEEDED)
    with torch.no_grad():
        fp8.linears(model)[0].weight.neg_()
    assert texts(generate(native, asked, SEEDED)) == texts(
        generate(NativeEngine(model, weight_dtype=FP8), asked, SEEDED)
    )


def test_weights_that_change_within_a_session_are_rounded_for_what_follows():
    model, other = loaded("qwen2", **WIDE), moved(loaded("qwen2", **WIDE))
    native = NativeEngine(model, weight_dtype=FP8, max_slots=64, steps_per_look=4)

    def load():
        with torch.no_grad():
            for one, new in zip(model.parameters(), other.parameters()):
                one.copy_(new)
        return 7

    with native.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in prompts(8)]
        found = dict(session.advance())
        before = [tensor.clone() for tensor in kept_of(native)]
        session.change_weights(load)
        while session.in_flight:
            found.update(session.advance())
    assert len(found) == len(tickets)
    fresh = NativeEngine(other, weight_dtype=FP8)
    with fresh.running():
        assert all(
            torch.equal(one.view(torch.uint8), two.view(torch.uint8))
            for one, two in zip(kept_of(native), kept_of(fresh))
        )
    assert any(
        not torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(before, kept_of(native))
    )


def test_the_model_is_itself_outside_of_a_session(model):
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        with NativeEngine(model, weight_dtype=FP8).session(SEEDED) as session:
            session.add(prompts(1)[0])
            session.advance()
            assert torch.equal(model(ids).logits, before)  # between two looks, too
    assert not any("forward" in vars(linear) for linear in fp8.linears(model))


def test_compiled_layers_run_uncompiled_and_stay_compiled():
    model, asked = loaded("qwen2", **WIDE), prompts(6)
    wanted = generate(NativeEngine(model, weight_dtype=FP8), asked, SEEDED)
    compile_layers(model)
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    calls = [module._compiled_call_impl for module in compiled]
    torch._dynamo.utils.counters.clear()
    found = generate(NativeEngine(model, weight_dtype=FP8), asked, SEEDED)
    assert not torch._dynamo.utils.counters["stats"]  # nothing was compiled
    assert texts(found) == texts(wanted)
    assert [module._compiled_call_impl for module in compiled] == calls
    assert len(calls) == 2


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_allows_what_8_bits_are_off_by(family):
    assert isinstance(ENGINES["native"](loaded(family, **WIDE), weight_dtype=FP8), NativeEngine)


def test_what_is_off_by_more_is_refused(monkeypatch):
    monkeypatch.setattr(fp8, "by_rows", lambda x: (fp8.scaled(x)[0], 1.7 * fp8.scaled(x)[1]))
    with pytest.raises(
        ValueError,
        match=r"`rollout_weight_dtype`: only the native engine .* 'fp8'.*: in 8 bits the native engine's answers differ",
    ):
        ENGINES["native"](loaded("qwen2", **WIDE), weight_dtype=FP8)


def test_adapters_narrow_layers_and_unknown_dtypes_are_refused():
    adapted = get_peft_model(loaded("qwen2", **WIDE), LoraConfig(r=4, target_modules="all-linear"))
    with pytest.raises(ValueError, match="the weights of Qwen2ForCausalLM have an adapter, or are quantised"):
        NativeEngine(adapted, weight_dtype=FP8)
    narrow = loaded("qwen2", hidden_size=40, intermediate_size=72, num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(ValueError, match="has no linear layers whose sizes are multiples of 16"):
        NativeEngine(narrow, weight_dtype=FP8)
    with pytest.raises(ValueError, match="`weight_dtype` is 'int4'; known are auto, fp8"):
        NativeEngine(loaded("qwen2"), weight_dtype="int4")
