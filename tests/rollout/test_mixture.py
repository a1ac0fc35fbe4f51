"""Who writes: the mixture draws from (1 - c) z + c z', in both engines, and the reference is not the policy with its adapter on."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain import Sample
from posttrain.core.options import by_epoch
from posttrain.data.collate import collate
from posttrain.models.load.reference import adapter_off
from posttrain.models.scoring.token_scores import install_scores, score_tokens
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.native.scheduler import Scheduler
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.trainer.online.authors import EngineInContext
from tests.rollout.families import loaded, prompts, texts

TEMPERATURE = 0.9
CHI_SQUARE_999 = 49.73  # 23 degrees of freedom: one in a thousand fair draws lies above it


def moved(model, seed=7, by=0.3):
    """Another model of the same family."""
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0)
    return other


def adapted(family="llama"):
    """A LoRA whose B is not 0: with the adapter off it is another model."""
    model = get_peft_model(loaded(family), LoraConfig(r=4, target_modules="all-linear")).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


@torch.no_grad()
def logps_after(prompt, ids, logits_of, temperature=TEMPERATURE):
    """Of each token of a completion, by a full forward."""
    tokens = torch.tensor([[*prompt.ids.tolist(), *ids.tolist()]])
    logps = (logits_of(tokens)[0].double() / temperature).log_softmax(-1)
    places = torch.arange(len(prompt.ids) - 1, tokens.shape[1] - 1)
    return logps[places, tokens[0, len(prompt.ids) :]].numpy()


def mixed_logits(model, other, weight, context=None):
    def logits_of(tokens):
        own = model(input_ids=tokens, use_cache=False).logits.double()
        if context is None:
            return (1 - weight) * own + weight * other(input_ids=tokens, use_cache=False).logits.double()
        with context():
            return (1 - weight) * own + weight * model(input_ids=tokens, use_cache=False).logits.double()

    return logits_of


def chi_square(counts, probabilities):
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("make", [lambda *a, **k: NativeEngine(*a, max_slots=4000, **k), TransformersEngine])
def test_8000_draws_are_the_mixtures_by_a_chi_square_test(make):
    model = loaded("llama", vocab_size=24)
    other, weight = moved(model, by=2.0), 0.3
    many = {"batch_size": 4000} if make is TransformersEngine else {}
    asked = [Prompt([5, 9, 4], key=key) for key in range(8_000)]
    params = SamplingParams(max_tokens=1, temperature=TEMPERATURE, seed=5)
    drawn = [int(c.ids[0]) for c in generate(make(model, mixture=Mixture(other, weight), **many), asked, params)]
    counts = np.bincount(drawn, minlength=24)

    def distribution(logits_of):
        with torch.no_grad():
            return (logits_of(torch.tensor([[5, 9, 4]]))[0, -1].double() / TEMPERATURE).softmax(-1).numpy()

    assert chi_square(counts, distribution(mixed_logits(model, other, weight))) < CHI_SQUARE_999
    # The test has the power to tell: neither model alone, nor the weights exchanged, nor probabilities mixed (trap 25).
    alone = [distribution(lambda t, m=m: m(input_ids=t, use_cache=False).logits) for m in (model, other)]
    exchanged = distribution(mixed_logits(model, other, 1 - weight))
    of_probabilities = (1 - weight) * alone[0] + weight * alone[1]
    for wrong in (*alone, exchanged, of_probabilities):
        assert chi_square(counts, wrong) > 2 * CHI_SQUARE_999


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "qwen2_moe"])
def test_engines_draw_the_same_tokens_and_log_probs_are_the_mixtures(family):
    """Rows end at different steps and their slots are refilled: both caches have seen every token (trap 26)."""
    model = loaded(family)
    other = moved(model)
    mixture, asked = Mixture(other, 0.4), prompts(14, samples=2)
    params = SamplingParams(max_tokens=20, temperature=TEMPERATURE, stop_ids=tuple(range(1, 20)), seed=11)
    native = ENGINES["native"](model, max_slots=5, mixture=mixture)
    assert isinstance(native, NativeEngine)
    found = generate(native, asked, params)
    plain = generate(TransformersEngine(model, mixture=mixture), asked, params)
    assert texts(found) == texts(plain)
    assert len({len(completion.ids) for completion in found}) > 5  # ends are scattered
    for prompt, completion, other_way in zip(asked, found, plain):
        wanted = logps_after(prompt, completion.ids, mixed_logits(model, other, 0.4))
        assert np.abs(completion.sampling_logps - wanted).max() < 1e-5
        assert np.abs(other_way.sampling_logps - wanted).max() < 1e-5
        assert np.array_equal(completion.sampling_logps, completion.policy_logps)


def test_rows_that_are_put_back_for_want_of_memory_are_computed_again_in_both_models(monkeypatch):
    model = loaded("llama")
    mixture, asked = Mixture(moved(model), 0.4), prompts(10, samples=3)
    params = SamplingParams(max_tokens=40, temperature=TEMPERATURE, seed=3)
    wanted = texts(generate(NativeEngine(model, mixture=mixture), asked, params))
    engine = NativeEngine(model, max_slots=30, mixture=mixture)
    with engine.session(params):
        page = engine._made[0].page_bytes
    assert page == 2 * NativeEngine(model)._make()[0].page_bytes  # keys and values of two models
    engine.kv_memory = 24 * page
    put_back, preempt = [], Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, run: put_back.append(run) or preempt(self, run))
    assert texts(generate(engine, asked, params)) == wanted
    assert put_back


@pytest.mark.parametrize("make", [NativeEngine, TransformersEngine])
def test_weights_at_the_ends_are_the_models_themselves(make):
    model = loaded("llama")
    other, asked = moved(model), prompts(10)
    params = SamplingParams(max_tokens=12, temperature=TEMPERATURE, seed=2)
    weight = [0.0]
    engine = make(model, mixture=Mixture(other, lambda: weight[0]))
    assert texts(generate(engine, asked, params)) == texts(generate(make(model), asked, params))
    weight[0] = 1.0  # a list by epoch changes it between sessions
    assert texts(generate(engine, asked, params)) == texts(generate(make(other), asked, params))
    weight[0] = 1.5
    with pytest.raises(ValueError, match=r"weight of a mixture is 1\.5; it must be between 0"):
        generate(engine, asked, params)


@pytest.mark.parametrize("make", [NativeEngine, TransformersEngine])
def test_with_an_adapter_that_is_off_the_mixture_is_not_the_policy_with_itself(make):
    model = adapted()
    reference = adapter_off(model)
    params = SamplingParams(max_tokens=15, temperature=TEMPERATURE, stop_ids=(1,), seed=4)
    asked = prompts(12)
    found = generate(make(model, mixture=Mixture(model, 0.5, reference.context)), asked, params)
    assert texts(found) != texts(generate(make(model), asked, params))
    for prompt, completion in zip(asked, found):
        wanted = logps_after(prompt, completion.ids, mixed_logits(model, None, 0.5, reference.context))
        assert np.abs(completion.sampling_logps - wanted).max() < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_of_the_reference_have_the_references_log_probs(engine):
    """Trap 23: the base model inside of a PEFT model still runs its adapters, unless they are off."""
    model = adapted()
    install_scores(model)
    reference = adapter_off(model)
    writer = EngineInContext(ENGINES[engine], reference)
    params, asked = SamplingParams(max_tokens=10, temperature=1.0, seed=9), prompts(8)
    before = generate(ENGINES[engine](model), asked, params)
    found = generate(writer, asked, params)
    after = generate(ENGINES[engine](model), asked, params)
    assert texts(before) == texts(after) != texts(found)  # the policy is itself again
    for prompt, completion in zip(asked, found):
        batch = collate([(Sample.of_text(prompt.ids, completion.ids),)], ("text",))
        wanted = reference.scores(batch).logps.numpy()
        with torch.no_grad():
            of_policy = score_tokens(model, batch).logps.numpy()
        assert np.abs(completion.policy_logps - wanted).max() < 1e-4
        assert np.abs(completion.policy_logps - of_policy).max() > 1e-2


@pytest.mark.parametrize("make", [NativeEngine, TransformersEngine])
def test_models_with_other_vocabularies_are_refused(make):
    with pytest.raises(ValueError, match="policy has 200 tokens, that of the reference 180"):
        make(loaded("llama"), mixture=Mixture(loaded("llama", vocab_size=180), 0.5))


def test_a_family_that_the_native_engine_cannot_run_is_mixed_by_transformers(caplog):
    from transformers import AutoModelForCausalLM, MambaConfig

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = ENGINES["native"](model, mixture=Mixture(moved(model), 0.5))
    assert isinstance(engine, TransformersEngine)
    assert "is generated from by transformers" in caplog.text
    params, asked = SamplingParams(max_tokens=6, temperature=TEMPERATURE), prompts(3, longest=9, vocabulary=50)
    for prompt, completion in zip(asked, generate(engine, asked, params)):
        wanted = logps_after(prompt, completion.ids, mixed_logits(model, engine.mixture.model, 0.5))
        assert np.abs(completion.sampling_logps - wanted).max() < 1e-5


def test_values_by_epoch():
    assert [by_epoch([0.5, 0.3], epoch) for epoch in (None, 0, 0.99, 1.0, 1.5, 7.0)] == [0.5, 0.5, 0.5, 0.3, 0.3, 0.3]
    assert by_epoch(0.2, 3.7) == 0.2
