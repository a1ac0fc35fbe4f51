"""Recurrences and convolutions in the native engine: whatever happens to a batch, every completion is that of its prompt alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from scripts.families import plain_logps, small_model
from tests import tiny
from tests.rollout.families import SEEDED, prompts, texts
from tests.rollout.test_mixture import moved
from tests.rollout.test_weights_in_flight import into

FAMILIES = {
    "qwen3_5_text": "gated delta net",
    "falcon_h1": "Mamba 2 beside attention",
    "lfm2": "convolution only",
    "kimi_linear": "three convolutions, latent attention and experts",
}


def made(family):
    model = small_model(family)
    load_model(model, LoadOptions())
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return made(request.param)


def asked() -> list[Prompt]:
    """Groups of four and single ones; prompts of one token, of the same and of other lengths."""
    again = Prompt(np.array([7]), key=90)
    return [*prompts(5, samples=4), again, *prompts(3, longest=2, seed=1), *prompts(4, seed=2)]


def gaps(model, found) -> list[float]:
    """How far the log-probs of each completion are from a plain forward of it."""
    pairs = [(prompt, np.concatenate([prompt.ids, one.ids])) for prompt, one in zip(asked(), found, strict=True)]
    plain = [plain_logps(model, torch.from_numpy(ids).long())[len(prompt.ids) - 1 :] for prompt, ids in pairs]
    return [float(np.abs(logps.numpy() - one.policy_logps).max()) for logps, one in zip(plain, found)]


@pytest.fixture(scope="module")
def expected(model):
    """By the native engine with a slot for everyone; what it says is what a plain forward says."""
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    found = generate(engine, asked(), SEEDED)
    assert max(gaps(small_copy(model), found)) < 2e-5
    return found


def small_copy(model):
    """The same weights without anything of ours in its layers."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("sdpa")
    return other


def test_rows_that_come_and_go_keep_their_states(model, expected):
    engine = NativeEngine(model, max_slots=3)
    found = generate(engine, asked(), SEEDED)
    assert texts(found) == texts(expected)
    assert engine._made[0].states._rows == []  # nothing is held between sessions


def test_a_request_that_is_put_back_is_computed_again(model, expected):
    engine = NativeEngine(model)
    with engine.session(SEEDED):
        page_bytes = engine._made[0].page_bytes
    engine.kv_memory = 20 * page_bytes
    with engine.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in asked()]
        found = {}
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 5
    assert [found[ticket].ids.tolist() for ticket in tickets] == texts(expected)


def test_cancelled_requests_leave_the_others_as_they_are(model, expected):
    with NativeEngine(model, max_slots=6).session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in asked()]
        found = dict(session.advance())
        gone = [tickets[0], tickets[2], tickets[-1]]
        session.cancel(gone)
        while session.in_flight:
            found.update(session.advance())
    stay = [place for place, ticket in enumerate(tickets) if ticket in found and ticket not in gone]
    assert len(stay) == len(tickets) - len(gone)
    assert [found[tickets[place]].ids.tolist() for place in stay] == [texts(expected)[place] for place in stay]


def test_states_are_computed_again_under_other_weights():
    """Mid-way to weights that were there from the beginning: as if nothing had happened."""
    first, other = made("qwen3_5_text"), made("qwen3_5_text")
    wanted = generate(NativeEngine(first), asked(), SEEDED)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    kept = small_copy(first)
    engine = NativeEngine(first)
    with engine.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in asked()]
        found = dict(session.advance())
        session.change_weights(into(first, other, 1))
        session.change_weights(into(first, kept, 2))
        while session.in_flight:
            found.update(session.advance())
    assert [found[ticket].ids.tolist() for ticket in tickets] == texts(wanted)


def test_prefixes_are_not_computed_before_there_is_a_slot():
    """Each has states of its own, which may be as large as the keys and values of thousands of tokens."""
    with NativeEngine(made("lfm2"), max_slots=3).session(SEEDED) as session:
        for prompt in prompts(12):
            session.add(prompt)
        session.advance()
        held = [prefix for prefix in session.scheduler._prefixes.values() if prefix.states]
        assert len(held) <= 3
        while session.in_flight:
            session.advance()


def test_slots_are_as_many_as_there_is_memory_for_states(monkeypatch):
    model = made("falcon_h1")
    engine = NativeEngine(model)
    assert engine.why_not() is None
    one = engine._made[0].states.bytes
    assert one == sum(state.nbytes for parts in engine._made[0].states.shapes.values() for state in parts.values())
    monkeypatch.setattr("posttrain.rollout.engines.native.engine.CPU_KV_BYTES", 2 * one)
    few = NativeEngine(model)
    few.why_not()
    assert few.max_slots == 2


@pytest.mark.parametrize("family", ["stablelm", "qwen3_5_text"])
def test_a_model_that_nobody_has_prepared_is_run_too(family):
    """As a server loads it; a padded run likewise. Its own forward stays what it was."""
    model, plain = small_model(family), small_model(family)
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    assert texts(generate(engine, asked(), SEEDED)) == texts(generate(ENGINES["native"](made(family)), asked(), SEEDED))
    ids = torch.arange(3, 40)
    assert torch.equal(plain_logps(model, ids), plain_logps(plain, ids))


def test_what_the_engine_cannot_run_is_left_as_it_was():
    model = small_model("zaya")
    assert "no layer attends to keys and values" in NativeEngine(model).why_not()
    layers = model.get_decoder().modules()
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in layers)


def test_a_policy_with_recurrences_trains_on_what_it_wrote(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=2, num_generations=4, logging_steps=1,
        per_device_train_batch_size=8, max_completion_length=16, learning_rate=1e-3, save_strategy="no",
    )  # fmt: skip
    trainer = GRPOTrainer(
        small_model("qwen3_5_text"),
        lambda completions, **_: [float(len(text)) for text in completions],
        args,
        Dataset.from_list([{"prompt": "Say it" + "!" * count} for count in range(8)]),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert trainer.loaded.layout == "shared"
    assert isinstance(trainer.engine, NativeEngine)
    apart = [line["sampling/sampling_logp_difference/mean"] for line in trainer.state.log_history if "loss" in line]
    assert len(apart) == 2
    assert max(apart) < 1e-5


def test_a_mixture_has_states_of_both_models():
    first, other = made("falcon_h1"), moved(made("falcon_h1"))
    engines = [kind(first, mixture=Mixture(other, lambda: 0.4)) for kind in (NativeEngine, TransformersEngine)]
    assert engines[0].why_not() is None
    native, plain = (texts(generate(engine, asked(), SEEDED)) for engine in engines)
    assert native == plain
    assert native != texts(generate(NativeEngine(first), asked(), SEEDED))
