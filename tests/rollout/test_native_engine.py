"""The native engine's own ways: memory, graphs, and what it cannot run."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.models.layers.kernels import decoder_layers
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.native import engine as native
from posttrain.rollout.engines.native import step
from posttrain.rollout.engines.native.cache import PAGE
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from tests.rollout.families import SEEDED, VOCABULARY, groups, loaded, model_of, prompts, texts


@pytest.fixture(scope="module")
def qwen():
    return loaded("qwen2")


@pytest.fixture(scope="module")
def expected(qwen):
    return generate(NativeEngine(qwen), groups(), SEEDED)


def test_memory_for_keys_and_values_exists_inside_of_a_session_only(qwen):
    engine = NativeEngine(qwen)
    with engine.session(SEEDED) as session:
        session.add(prompts(1)[0])
        session.advance()
        store = engine._made[0].store
        assert store.pages > 1
        with pytest.raises(RuntimeError, match="open session"), engine.session(SEEDED):
            pass
    assert store.pages == 0
    engine.sleep()
    engine.wake()
    assert len(generate(engine, prompts(1), SEEDED)[0].ids) > 0


def test_rows_side_by_side_and_rows_on_pages_say_the_same(qwen, expected, monkeypatch):
    laid_out = []
    monkeypatch.setattr(native, "DENSE_SHARE", 0)
    monkeypatch.setattr(step.DecodeProgram, "keep", lambda self: laid_out.append(self.dense))
    assert texts(generate(NativeEngine(qwen), groups(), SEEDED)) == texts(expected)
    assert set(laid_out) == {None}


def test_what_can_never_fit_is_an_error_of_that_prompt(qwen):
    engine = NativeEngine(qwen, kv_memory=1)
    with engine.session(SEEDED) as session:
        assert session.budget == 3
    long, short = generate(engine, [Prompt(np.full(100, 5)), Prompt([5], max_tokens=PAGE)], SEEDED)
    assert "Raise `kv_memory`" in long.error
    assert len(short.ids) > 0


def test_recurrent_models_fall_back_to_transformers_and_still_complete(caplog):
    from transformers import AutoModelForCausalLM, MambaConfig

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, bos_token_id=2, eos_token_id=1
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with caplog.at_level(logging.WARNING):
        engine = ENGINES["native"](model)
    assert isinstance(engine, TransformersEngine)
    assert "MambaForCausalLM is generated from by transformers, which is slower: " in caplog.text
    asked = prompts(4, longest=12)
    found = texts(generate(engine, asked, SamplingParams(max_tokens=8, temperature=0)))
    for prompt, ids in zip(asked, found):
        said = model.generate(torch.tensor(prompt.ids).long()[None], max_new_tokens=8, do_sample=False, eos_token_id=[])
        assert ids == said[0, len(prompt.ids) :].tolist()


def test_an_attention_that_answers_differently_falls_back(caplog, monkeypatch):
    from posttrain.rollout.engines.native.attention import DecodeStep

    right = DecodeStep.attend
    monkeypatch.setattr(DecodeStep, "attend", lambda *call: right(*call) * 1.5)
    with caplog.at_level(logging.WARNING):
        engine = ENGINES["native"](loaded("llama"))
    assert isinstance(engine, TransformersEngine)
    assert "LlamaForCausalLM" in caplog.text
    assert "differ from a full forward's" in caplog.text


def test_gemma2_under_sdpa_is_run_without_its_soft_cap_as_it_is_trained():
    model = model_of("gemma2")
    assert model.config._attn_implementation == "sdpa"
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    assert texts(generate(engine, prompts(6), SEEDED)) == texts(generate(TransformersEngine(model), prompts(6), SEEDED))


class FakeGraph:
    """What a CUDA graph does, without CUDA: the captured step again, on the tensors that it was captured with."""

    def __init__(self, program, rows, sampler):
        self.step = (rows, program.rows.table.shape[1], sampler)
        self.program, self.replays = program, 0

    def replay(self):
        self.replays += 1
        self.program.run(*self.step)


@pytest.fixture
def captured(monkeypatch):
    """Graphs that were captured, by number of rows, in a process without CUDA."""
    from posttrain.rollout.engines.native.graphs import StepGraphs

    found = []

    def capture(self, rows, sampler):
        graph = FakeGraph(self._program, rows, sampler)
        graph.replay()  # changes the rows, as the steps that warm up do
        found.append(graph)
        return graph

    monkeypatch.setattr(StepGraphs, "_captured_from_nothing", capture)
    return found


def with_graphs(model, **options):
    engine = NativeEngine(model, **options)
    engine.use_graphs = True
    return engine


def test_graphs_of_powers_of_two_are_captured_once_and_say_the_same(qwen, expected, captured):
    engine = with_graphs(qwen, max_slots=24)
    for _ in range(2):
        assert texts(generate(engine, groups()[:48], SEEDED)) == texts(expected)[:48]
        sizes = [graph.step[0] for graph in captured]
        assert len(set(sizes)) == len(sizes)
        assert set(sizes) <= {1, 2, 4, 8, 16, 24}
    assert sum(graph.replays for graph in captured) > 2 * SEEDED.max_tokens


def test_graphs_are_captured_again_for_other_adapters_weights_and_ways_to_draw(captured):
    model = get_peft_model(loaded("llama"), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    engine = with_graphs(model, max_slots=4)

    def captures(params=SEEDED):
        before = len(captured)
        found = texts(generate(engine, prompts(4), params))
        return len(captured) - before, found

    count, adapted = captures()
    assert count > 0
    with model.disable_adapter():
        count, plain = captures()
        assert count > 0
        assert plain != adapted
    assert captures()[1] == adapted
    assert captures()[0] == 0
    assert captures(replace(SEEDED, seed=9))[0] == 0  # another seed is no other way to draw
    assert captures(SamplingParams(max_tokens=24, temperature=0.5))[0] > 0
    weight = next(model.parameters())
    weight.data = weight.data.clone()  # the same numbers elsewhere
    count, again = captures()
    assert count > 0
    assert again == adapted


def test_compiled_layers_are_compiled_once_for_all_that_the_engine_does():
    """With dynamo alone: what it would compile again is what costs seconds on a GPU."""
    model = loaded("qwen2")
    wanted = texts(generate(NativeEngine(model), prompts(8), SEEDED))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in decoder_layers(model):
        layer.compile(dynamic=True, backend="eager")
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    assert texts(generate(engine, prompts(8), SEEDED)) == wanted
    pieces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert pieces <= 8  # those around the attention, and the full forward of the probe


def test_a_step_that_cannot_be_captured_runs_without_graphs(qwen, expected, captured, monkeypatch, caplog):
    from posttrain.rollout.engines.native.graphs import StepGraphs

    def fails(self, rows, sampler):
        self._program.run(rows, 1, sampler)
        raise RuntimeError("this model waits for the device")

    monkeypatch.setattr(StepGraphs, "_captured_from_nothing", fails)
    with caplog.at_level(logging.WARNING):
        found = generate(with_graphs(qwen), groups()[:20], SEEDED)
    assert texts(found) == texts(expected)[:20]
    assert "Qwen2ForCausalLM decodes without CUDA graphs, which is slower" in caplog.text
    assert len(caplog.records) == 1


def test_in_bfloat16_a_rerun_is_identical(qwen):
    model = model_of("qwen2").to(torch.bfloat16)
    load_model(model, LoadOptions())
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    one, two = (generate(engine, prompts(12, samples=2), SEEDED) for _ in range(2))
    assert texts(one) == texts(two)
    assert all(np.array_equal(a.policy_logps, b.policy_logps) for a, b in zip(one, two))


def test_when_memory_runs_out_samples_are_put_back_and_go_on_as_if_nothing_had_happened(qwen, expected):
    engine = NativeEngine(qwen, max_slots=64)
    with engine.session(SEEDED):
        page_bytes = engine._made[0].store.page_bytes
    engine.kv_memory = 32 * page_bytes
    with engine.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in groups()]
        found = {}
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 10
        assert session.pool.size == 32
        assert session.pool.free == 31
    assert [found[ticket].ids.tolist() for ticket in tickets] == texts(expected)
    assert [found[ticket].finish_reason for ticket in tickets] == [completion.finish_reason for completion in expected]


def test_a_groups_prompt_is_computed_once_and_its_pages_are_shared(qwen, monkeypatch):
    engine = NativeEngine(qwen, max_slots=4)
    asked = prompts(3, samples=8, longest=60)
    with engine.session(SEEDED) as session:
        computed = []
        original = session._prefill
        monkeypatch.setattr(session, "_prefill", lambda prefixes: computed.extend(prefixes) or original(prefixes))
        for prompt in asked:
            session.add(prompt)
        session.advance()
        first = session.scheduler.running[:4]
        assert len({id(run.prefix) for run in first}) == 1
        assert len({page for run in first for page in run.pages}) == sum(len(run.pages) for run in first)
        while session.in_flight:
            session.advance()
        assert len(computed) == 3  # although only four of the eight samples of a group had a slot at a time
        assert session.pool.free == session.pool.size - 1
