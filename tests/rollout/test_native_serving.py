"""Our own engine as an engine of the server, asked without the server."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from posttrain.models.load.weight_export import exported_weights
from posttrain.rollout.engines.native import serving
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.native.serving import ServedNative, make_engine
from posttrain.rollout.engines.noise import noise_base
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.serve.engine.protocol import Accepted, CacheUse, GenerateJob, Sampling, ScoreJob
from posttrain.serve.errors import EngineFailed
from posttrain.serve.launch import StartError, parser
from tests import tiny
from tests.rollout.families import VOCABULARY, model_of

ANY = Accepted(0, 100)


def served(model=None, **engine):
    return ServedNative("tiny", tiny.causal_lm(0) if model is None else model, None, None, **engine)


def job(name, ids=(1, 2, 3), key=0, tokens=12, **sampling):
    return GenerateJob(name, tuple(ids), Sampling(max_tokens=tokens, **sampling), ANY, noise=(noise_base(7, key, 0), 0))


def run(engine, jobs, before_step=lambda number: None):
    """Finished jobs by name, in the order in which they finished."""
    for one in jobs:
        engine.add(one, None)
    finished = {}
    for number in itertools.count():
        before_step(number)
        moved = engine.step()
        if not moved:
            return finished
        finished |= {one.job_id: one for one in moved if one.finish_reason is not None}


def written_here(jobs, model=None):
    """The same by the engine in this process."""
    engine = NativeEngine(tiny.causal_lm(0) if model is None else model)
    params = SamplingParams(12, seed=7)
    prompts = [Prompt(np.array(one.ids), key=key, max_tokens=one.sampling.max_tokens) for key, one in enumerate(jobs)]
    return [completion.ids.tolist() for completion in generate(engine, prompts, params)]


def test_cancelled_jobs_leave_the_others_what_they_would_have_written():
    jobs = [job(f"j{key}", range(1, 4 + key % 3), key, 40) for key in range(12)]
    wanted = written_here(jobs)
    engine = served(max_slots=4, steps_per_look=2)
    gone = {f"j{key}" for key in (0, 3, 4, 9, 11)}  # some run when they are cancelled, some wait

    def cancel(number):
        if number == 2:
            engine.abort([*gone, "never asked for"])

    finished = run(engine, jobs, cancel)
    assert set(finished) == {one.job_id for one in jobs} - gone
    for one, ids in zip(jobs, wanted):
        if one.job_id not in gone:
            assert finished[one.job_id].ids == ids


def test_engine_args_may_ask_for_8_bits():
    jobs = [job(f"j{key}", range(1, 4 + key), key, 40) for key in range(6)]
    native = NativeEngine(tiny.causal_lm(0), kv_dtype="fp8")
    prompts = [Prompt(np.array(one.ids), key=key, max_tokens=one.sampling.max_tokens) for key, one in enumerate(jobs)]
    wanted = [completion.ids.tolist() for completion in generate(native, prompts, SamplingParams(12, seed=7))]
    engine = served(kv_dtype="fp8")
    assert engine.engine.rounds_cache
    finished = run(engine, jobs)
    assert [finished[one.job_id].ids for one in jobs] == wanted


def test_all_pages_are_free_after_a_cancel():
    engine = served(max_slots=4)
    for key in range(8):
        engine.add(job(f"j{key}", [1, 2, 3], key, 60), None)
    engine.step()
    session = engine._open[1]
    engine.abort([f"j{key}" for key in range(8)])
    assert session.pool.free == session.pool.size - 1  # page 0 is nobody's
    assert engine._open is None
    assert run(engine, [job("after")])["after"].ids == written_here([job("after")])[0]


def test_what_the_server_says_of_pages_and_of_completions_that_had_to_wait_again():
    """Six completions of 3 + 60 tokens want 4 pages of their own each, and one for the prompt; there are 12."""
    roomy, engine = served(), served(max_slots=6, steps_per_look=1)
    page = engine.engine._made[0].page_bytes
    engine.engine.kv_memory = 13 * page
    jobs, shares = [job(f"j{key}", [1, 2, 3], key, 60) for key in range(6)], []
    finished = run(engine, jobs, lambda number: shares.append(engine.cache_use.used_share))
    assert [finished[one.job_id].ids for one in jobs] == [run(roomy, jobs)[one.job_id].ids for one in jobs]
    assert shares[0] == 0
    assert 10 / 12 <= max(shares) <= 1
    assert all(share * 12 == pytest.approx(round(share * 12)) for share in shares)
    once = engine.cache_use
    assert once.used_share == 0
    assert once.preempted > 0
    run(engine, jobs)  # in another session
    assert engine.cache_use == CacheUse(0.0, 2 * once.preempted)
    assert roomy.cache_use == CacheUse(0.0, 0)


def test_ways_to_draw_take_turns():
    """Whoever asks for another way waits for those before, and those behind wait for him."""
    greedy = [job("g0", tokens=4, temperature=0.0), job("g1", tokens=9, temperature=0.0)]
    drawn = [job("d0", key=0, tokens=6), job("d1", key=1, tokens=3)]
    finished = run(served(), [drawn[0], greedy[0], drawn[1], greedy[1]])
    assert [*finished] == ["d0", "g0", "d1", "g1"]
    assert [finished[one.job_id].ids for one in drawn] == written_here(drawn)


def test_scores_and_completions_are_those_of_a_plain_forward():
    model = tiny.causal_lm(0)
    ids = [1, 2, 3, 9, 40, 41]
    finished = run(served(), [ScoreJob("score", tuple(ids), 2, 3, ANY), job("draw", ids, temperature=0.7)])
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        drawn = torch.tensor([ids + finished["draw"].ids])
        tempered = (model(drawn).logits[0, len(ids) - 1 : -1] / 0.7).log_softmax(-1)
    assert finished["score"].logps == pytest.approx([float(rows[i - 1, ids[i]]) for i in range(2, 6)], abs=1e-5)
    assert [token for token, _ in finished["score"].top[0]] == rows[1].topk(3).indices.tolist()
    wanted = tempered.gather(1, drawn[0, len(ids) :, None])[:, 0]
    np.testing.assert_allclose(finished["draw"].logps, wanted, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])  # gemma2: windows of 20 tokens, and soft-caps
def test_scores_of_many_are_those_of_each_alone_and_share_passes(family, monkeypatch):
    rng = np.random.default_rng(0)
    asked = [
        (30, 1, 0),
        (7, 3, 5),
        (30, 29, 2),
        (40, 10, 0),
        (2, 1, 999),
        (90, 1, 0),
    ]  # tokens, first scored, likeliest
    jobs = [
        ScoreJob(f"j{n}", tuple(rng.integers(3, VOCABULARY, length).tolist()), start, top_k, ANY)
        for n, (length, start, top_k) in enumerate(asked)
    ]
    engine = served(model_of(family), prefill_tokens=90)
    shapes, forward = [], engine.model.model.forward
    seen = lambda **given: (shapes.append(tuple(given["input_ids"].shape)), forward(**given))[1]  # noqa: E731
    monkeypatch.setattr(engine.model.model, "forward", seen)
    finished = run(engine, jobs)
    assert shapes == [(3, 30), (2, 40), (1, 90)]
    for one in jobs:
        with torch.no_grad():
            rows = engine.model(torch.tensor([one.ids])).logits[0, one.start - 1 : -1].log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(one.ids[one.start :])[:, None])[:, 0]
        np.testing.assert_allclose(finished[one.job_id].logps, wanted, atol=1e-5)
        likeliest = rows.topk(min(one.top_k, VOCABULARY))
        for place, ids, logps in zip(finished[one.job_id].top, likeliest.indices, likeliest.values):
            assert [token for token, _ in place] == ids.tolist()
            np.testing.assert_allclose([logp for _, logp in place], logps, atol=1e-5)
        assert len(finished[one.job_id].top) == (len(rows) if one.top_k else 0)


@pytest.mark.parametrize(
    "changes", [{}, {"family": "llama"}, {"tie_word_embeddings": True}, {"family": "qwen3_moe"}], ids=str
)
def test_new_weights_by_the_names_of_checkpoints(changes):
    new = tiny.causal_lm(1, **changes)
    engine = served(tiny.causal_lm(0, **changes))
    second_names = {"lm_head.weight": new.get_output_embeddings().weight}  # of tied weights they may come, too
    engine.load_weights((second_names | dict(exported_weights(new))).items())
    assert engine.reset_prefix_cache(running=False)
    assert run(engine, [job("a", tokens=20)])["a"].ids == written_here([job("a", tokens=20)], new)[0]


def test_weights_that_are_no_part_of_a_parameter_cannot_be_replaced_and_that_is_said(monkeypatch):
    monkeypatch.setattr(serving, "weights_in_place", lambda model: {"a.weight": None})
    info = served().info
    assert not info.capabilities["weights"]
    assert "a.weight is made of others when it is sent" in info.notes[0]


def test_weights_that_do_not_fit_are_named():
    engine = served()
    whole = dict(exported_weights(tiny.causal_lm(1)))
    name = "model.norm.weight"
    with pytest.raises(EngineFailed, match=f"no tensor {name} of the shape"):
        engine.load_weights((whole | {name: torch.zeros(3)}).items())
    with pytest.raises(EngineFailed, match=f"1 tensors were not sent, {name} first"):
        engine.load_weights(one for one in whole.items() if one[0] != name)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"stop": ("x",)}, "no detokeniser"),
        ({"regex": "a+", "stop_ids": (1,)}, "detokeniser"),
        ({"logit_bias": ((10**6, 1.0),)}, "names token 1000000"),
        ({"tokens": 10**6}, "more than the memory for keys and values holds"),
    ],
)
def test_a_job_that_cannot_be_run_is_refused_alone(asked, sentence):
    engine = served(kv_memory=1 << 20)
    with pytest.raises(ValueError, match=sentence):
        engine.add(job("wrong", **asked), None)
    assert [*run(engine, [job("right")])] == ["right"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--adapter-folder", "x"], "merged weights"),
        (["--images", "2"], "need vLLM"),
        (["--tensor-parallel", "2"], "one device"),
        (["--sleep"], "keeps its weights"),
        (["--logprobs-mode", "raw_logprobs"], "processed_logprobs"),
        (["--engine-args", '{"max_num_seqs": 8}'], "max_num_seqs"),
        (["--dtype", "float33"], "float33"),
    ],
)
def test_options_of_vllm_are_refused_at_the_start(words, sentence):
    with pytest.raises(StartError, match=sentence):
        make_engine(parser().parse_args(["--model", "nothing", *words]))
