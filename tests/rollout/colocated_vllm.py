"""A real vLLM in this process. `test_vllm_colocate.py` runs this file with an interpreter that has vLLM."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch

from posttrain.core.sample import ImageSpan
from posttrain.models.load.adapters import adapter_in_use
from posttrain.models.load.weight_export import exported_weights
from posttrain.models.load.weights import weights_fingerprint
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import ERROR, LENGTH, STOP, Prompt, SamplingParams, generate
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions, NoWholeWeights
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, WeightsDiffer, scored_by
from tests import tiny
from tests.rollout.families import VOCABULARY, loaded, prompts

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's attention on the CPU wants heads of 32 at least."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, stop_ids=(1,))
SYNCS = int(os.environ.get("COLOCATED_SYNCS", "200"))  # `make trust` takes a thousand


def tiny_model(family="llama", **changes):
    return loaded(family, **{**WIDE, **changes})


def disturb(model, scale=0.02, seed=None):
    """Move every weight that trains, as an optimizer would."""
    generator = torch.Generator().manual_seed(random.randrange(2**31) if seed is None else seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


class Current:
    """The one engine of the process: whoever wants another one ends it."""

    engine = model = None


def engine_of(model, tokenizer=None, **options):
    if Current.engine is not None:
        Current.engine.close()
    Current.engine = Current.model = None
    Current.engine = ColocatedVLLM(model, letters, tokenizer, ColocateOptions(**options))
    return Current.engine


@pytest.fixture
def synced():
    """(model, engine that holds its weights), at the same weights for every test."""
    if Current.model is None:
        model = tiny_model()
        engine_of(model)
        Current.model = model
    Current.model.load_state_dict(tiny_model().state_dict())
    Current.engine.load_weights(None, 1)
    return Current.model, Current.engine


def letters(ids):
    """Token 40 is "(", and so on: a detokeniser in which a stop string can begin in one token and end in another."""
    return "".join(chr(int(token) % 90 + 33) for token in ids)


def assert_agree(model, engine, asked, params=GREEDY):
    """vLLM, the native engine and transformers: 99% of tokens, log-probs to 1e-3 up to where they part."""
    others = [NativeEngine(model, max_slots=32), TransformersEngine(model)]
    found = generate(engine, asked, params)
    for other in others:
        same = written = 0
        for mine, theirs in zip(found, generate(other, asked, params)):
            length = min(len(mine.ids), len(theirs.ids))
            equal = np.cumprod(mine.ids[:length] == theirs.ids[:length]).astype(bool)
            same, written = same + equal.sum(), written + max(len(mine.ids), len(theirs.ids))
            np.testing.assert_allclose(
                mine.policy_logps[:length][equal], theirs.policy_logps[:length][equal], atol=1e-3
            )
            assert mine.sampling_logps.max(initial=0) == mine.sampling_logps.min(initial=0) == 0
        assert same >= 0.99 * written
    return found


@pytest.mark.parametrize("family", ["smollm", "qwen2", "qwen3"])
def test_families_agree_with_the_other_engines(family):
    own = {"smollm": {"num_attention_heads": 2}, "qwen3": {"head_dim": 32}}.get(family, {})
    model = tiny_model(family, **own)
    engine = engine_of(model)
    with pytest.raises(NoWholeWeights, match="no version has been loaded"):
        generate(engine, prompts(1), GREEDY)
    engine.load_weights(None, 5)
    assert {done.version for done in assert_agree(model, engine, prompts(40))} == {5}
    assert engine.differing_tensors(100) == []
    disturb(model)
    names = [name for name, _ in exported_weights(model)]
    assert engine.differing_tensors(10_000) == names  # what vLLM holds is found for every one of them
    engine.load_weights(None, 6)
    assert_agree(model, engine, prompts(20))


def test_what_cannot_be_updated_and_a_second_engine_are_refused():
    with pytest.raises(ValueError, match=r"cannot take new weights.*brought the experts of model\.layers\.0"):
        engine_of(tiny_model("mixtral"))
    engine = engine_of(tiny_model())
    with pytest.raises(RuntimeError, match="in this process already"):
        ColocatedVLLM(tiny_model())
    engine.load_weights(None, 1)
    engine.close()
    Current.engine = None
    with pytest.raises(NoWholeWeights, match="is closed"):
        generate(engine, prompts(1), GREEDY)


def test_syncs_of_changing_weights(synced):
    model, engine = synced
    probe = SyncProbe(VOCABULARY)
    asked = prompts(4)
    for version in range(2, 2 + SYNCS // 8):
        disturb(model)
        engine.load_weights(None, version)
        result = probe.check(scored_by(model), engine.score, version, engine.version, engine.differing_tensors)
        assert result.largest < 1e-4
        if version % 10 == 1:
            asked = prompts(20, seed=version)
            assert_agree(model, engine, asked)
    assert_agree(model, engine, prompts(100))


def test_a_completion_depends_on_its_own_seed_alone(synced):
    _, engine = synced
    params = SamplingParams(max_tokens=10, temperature=0.8, seed=4)
    asked = prompts(12, samples=3)
    first = generate(engine, asked, params)
    order = np.random.default_rng(0).permutation(len(asked))
    again = generate(engine, [asked[place] for place in order], params)
    for place, done in zip(order, again):
        assert done.ids.tolist() == first[place].ids.tolist()
    alone = generate(engine, asked[7:8], params)[0]
    assert alone.ids.tolist() == first[7].ids.tolist()
    assert len({tuple(done.ids.tolist()) for done in first}) > len(first) * 0.9
    other = generate(engine, asked, replace(params, seed=5))
    later = generate(engine, [replace(prompt, first_token=3) for prompt in asked], params)
    for changed in (other, later):
        assert sum(a.ids.tolist() == b.ids.tolist() for a, b in zip(changed, first)) < 3


@torch.no_grad()
def test_log_probs_are_those_of_the_distribution_drawn_from(synced):
    model, engine = synced
    asked = prompts(6)
    for how in ({"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}, {"top_p": 0.6}, {"logit_bias": {9: 4.0}}):
        params = SamplingParams(max_tokens=8, **how)
        for prompt, done in zip(asked, generate(engine, asked, params)):
            ids = np.concatenate([prompt.ids, done.ids])
            rows = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0, len(prompt.ids) - 1 : -1]
            rows = rows + torch.tensor([params.logit_bias.get(token, 0.0) for token in range(VOCABULARY)])
            rows = (rows / params.temperature).log_softmax(-1)
            policy = rows.gather(1, torch.from_numpy(done.ids.astype(np.int64))[:, None])[:, 0].numpy()
            if how.keys() == {"temperature"}:
                np.testing.assert_allclose(done.policy_logps, policy, atol=1e-3)
            else:
                assert np.isnan(done.policy_logps).all()
            if "top_k" in how:
                assert all(int((row > logp + 1e-3).sum()) < 5 for row, logp in zip(rows, policy))
                kept = rows.topk(5).values.logsumexp(-1).numpy()
            elif "top_p" in how:
                assert (done.sampling_logps >= policy - 1e-3).all()
                continue
            else:
                kept = 0.0
            np.testing.assert_allclose(done.sampling_logps, policy - kept, atol=1e-3)


def test_ends_and_refusals(synced):
    _, engine = synced
    asked = prompts(8)
    free = generate(engine, asked, SamplingParams(max_tokens=12, temperature=0))
    assert {done.finish_reason for done in free} == {LENGTH}
    stop_id = int(free[0].ids[4])
    for before, done in zip(
        free, generate(engine, asked, SamplingParams(max_tokens=12, temperature=0, stop_ids=(stop_id,)))
    ):
        if stop_id in before.ids:
            assert done.ids.tolist() == before.ids[: before.ids.tolist().index(stop_id) + 1].tolist()
            assert done.finish_reason == STOP
    text = letters(free[1].ids)[3:6]
    end = letters(free[1].ids).index(text) + 3
    strings = SamplingParams(max_tokens=12, temperature=0, stop=(text,))
    stopped = generate(engine, asked, strings)[1]
    assert (stopped.ids.tolist(), stopped.finish_reason) == (free[1].ids[:end].tolist(), STOP)
    assert len(stopped.policy_logps) == len(stopped.sampling_logps) == end
    odd = [
        Prompt(np.arange(3, 300) % 100, key=1),  # longer than the context of 256
        Prompt([5, VOCABULARY], key=2),
        Prompt([], key=3),
        Prompt([5, 6], key=4, images=(ImageSpan(0, 1, bytes(16), (8, 8), (1,)),)),
        Prompt(np.arange(250) % 100 + 3, key=5),  # room for six
        Prompt([5, 6], key=6, max_tokens=2),
    ]
    found = generate(engine, odd, SamplingParams(max_tokens=12, temperature=0))
    assert [done.finish_reason for done in found] == [ERROR] * 4 + [LENGTH] * 2
    assert [len(done.ids) for done in found] == [0, 0, 0, 0, 6, 2]
    for done, words in zip(found, ("leaves no room", "knows 0 to", "no tokens", "reads texts only")):
        assert words in done.error
    with pytest.raises(ValueError, match="vLLM would draw at"):
        generate(engine, asked, SamplingParams(max_tokens=2, temperature=0.001))
    with pytest.raises(ValueError, match="needs a vLLM with a tokenizer"):
        generate(engine, asked, SamplingParams(max_tokens=2, regex="a"))


def test_prompts_can_be_added_at_any_time_and_left_behind(synced):
    _, engine = synced
    with engine.session(GREEDY) as session:
        assert session.advance() == []
        tickets = [session.add(prompt) for prompt in prompts(3)]
        seen = []
        while session.in_flight:
            for ticket, _ in session.advance():
                seen.append(ticket)
                if len(seen) == 1:
                    tickets.append(session.add(prompts(5)[4]))
        assert sorted(seen) == tickets
        with pytest.raises(RuntimeError, match="between sessions"):
            engine.load_weights(None, 99)
        with pytest.raises(RuntimeError, match="cannot sleep"):
            engine.sleep()
        session.add(prompts(1)[0])
    assert not engine.engine._jobs
    assert len(generate(engine, prompts(2), GREEDY)) == 2


def test_the_trainers_random_numbers_and_threads_are_left_alone(synced):
    model, _ = synced
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    threads, function = torch.get_num_threads(), torch.set_num_threads
    other = engine_of(model)
    other.load_weights(None, 1)
    generate(other, prompts(3), SamplingParams(max_tokens=4))
    other.sleep()
    other.wake()
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn == (torch.rand(3).tolist(), random.random(), np.random.rand())
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, function)


def test_a_load_that_fails_leaves_the_engine_silent_until_a_whole_one(synced):
    model, engine = synced
    weights = list(exported_weights(model))

    def interrupted():
        yield from weights[:5]
        raise KeyboardInterrupt

    broken = {
        "did not come": weights[:-1],
        "came twice": [*weights, weights[0]],
        "not a tensor of this model": [("model.other.weight", weights[0][1]), *weights],
        "has the shape": [(weights[0][0], weights[0][1][:5]), *weights[1:]],
        "it must come in torch.float32": [(weights[0][0], weights[0][1].half()), *weights[1:]],
    }
    for sentence, given in broken.items():
        with pytest.raises(ValueError, match=sentence):
            engine.load_weights(given, 100)
        with pytest.raises(NoWholeWeights, match="the load of version 100 failed"):
            generate(engine, prompts(1), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(interrupted(), 101)
    with pytest.raises(NoWholeWeights, match="version 101 failed"):
        engine.score([np.arange(5)])
    engine.load_weights(weights, 102)
    assert engine.version == 102
    assert_agree(model, engine, prompts(5))


# ---- faults ---------------------------------------------------------------------------------------------------------


def no_sync(weights, held):
    return held


def one_tensor_skipped(weights, held):
    name = random.choice(sorted(weights))
    return weights | {name: held[name]}


def two_tensors_swapped(weights, held):
    by_shape = {}
    for name, tensor in weights.items():
        by_shape.setdefault(tensor.shape, []).append(name)
    one, other = random.sample(random.choice([names for names in by_shape.values() if len(names) > 1]), 2)
    return weights | {one: weights[other], other: weights[one]}


def wrong_dtype(weights, held):
    name = random.choice([name for name in weights if not torch.equal(weights[name].half().float(), weights[name])])
    return weights | {name: weights[name].half().float()}


def one_number_of_one_tensor(weights, held):
    name = random.choice(sorted(weights))
    changed = weights[name].clone()
    changed.view(-1)[random.randrange(changed.numel())] += 1e-3
    return weights | {name: changed}


FAULTS = [no_sync, one_tensor_skipped, two_tensors_swapped, wrong_dtype, one_number_of_one_tensor]


@pytest.mark.parametrize("step_size", [0.02, 1e-6])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_behind_the_checks_of_loading_are_found_at_that_very_step(synced, fault, step_size):
    """The engine reports success and the right version; only what it holds is wrong."""
    model, engine = synced
    probe = SyncProbe(VOCABULARY)
    for trial in range(20):
        random.seed(trial)
        held = {name: tensor.clone() for name, tensor in exported_weights(model)}
        disturb(model, step_size)
        weights = dict(exported_weights(model))
        sent = fault(weights, held)
        wrong = next(name for name in weights if not torch.equal(sent[name], weights[name]))
        engine.load_weights(sent.items(), trial)
        with pytest.raises(WeightsDiffer, match="holds other numbers") as caught:
            probe.check(scored_by(model), engine.score, trial, engine.version, engine.differing_tensors)
        assert caught.value.tensor == wrong
        engine.load_weights(None, trial)
        probe.check(scored_by(model), engine.score, trial, engine.version, engine.differing_tensors)


def test_large_faults_are_found_by_scores_alone_and_an_old_version_by_its_number(synced):
    """As where the other side can be asked for no tensors."""
    model, engine = synced
    probe = SyncProbe(VOCABULARY)
    for trial in range(10):
        random.seed(trial)
        held = {name: tensor.clone() for name, tensor in exported_weights(model)}
        disturb(model, 0.05)
        engine.load_weights(no_sync(None, held).items(), trial)
        with pytest.raises(WeightsDiffer, match="log-probs differ from the trainer's"):
            probe.check(scored_by(model), engine.score, trial, engine.version)
        with pytest.raises(WeightsDiffer, match=f"serves version {trial} .* sent version {trial + 1}"):
            probe.check(scored_by(model), engine.score, trial + 1, engine.version)
    engine.load_weights(None, 10)
    assert probe.check(scored_by(model), engine.score, 10, engine.version).largest < 1e-4


# ---- adapters -------------------------------------------------------------------------------------------------------


def adapted(**changes):
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, **changes}
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(**options)).train()


def base_fingerprint(model):
    with adapter_in_use(model, None):
        return weights_fingerprint(model)


def test_many_merged_syncs_leave_the_frozen_base_as_it_was():
    model = adapted(use_rslora=True)
    before = base_fingerprint(model)
    engine = engine_of(model)
    for version in range(1, SYNCS + 1):
        disturb(model, 0.01, seed=version)
        engine.load_weights(None, version)
    assert base_fingerprint(model) == before
    assert engine.differing_tensors() == []
    assert_agree(model.eval(), engine, prompts(20))


def test_many_adapters_exchanged_leave_both_bases_as_they_were():
    model = adapted()
    before = base_fingerprint(model)
    engine = engine_of(model, adapter_sync=True)
    probe = SyncProbe(VOCABULARY)
    held = held_base(engine)
    for version in range(1, SYNCS + 1):
        disturb(model, 0.01, seed=version)
        engine.load_weights(None, version)
        if version % 100 == 0:
            probe.check(scored_by(model), engine.score, version, engine.version, engine.differing_tensors)
    assert base_fingerprint(model) == before
    assert held_base(engine) == held
    assert_agree(model.eval(), engine, prompts(20))
    with pytest.raises(ValueError, match="did not come"):
        engine.load_weights([], SYNCS + 1)
    assert engine.version == SYNCS  # the adapter before keeps serving
    assert_agree(model, engine, prompts(5))
    disturb(model)
    with pytest.raises(WeightsDiffer, match="lora_A"):
        probe.check(scored_by(model), engine.score, SYNCS, engine.version, engine.differing_tensors)


def held_base(engine):
    return engine.engine.in_workers(_sums_of_base)[0]


def _sums_of_base(worker):
    named = worker.model_runner.model.named_parameters()
    return {name: parameter.double().sum().item() for name, parameter in named}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 1000}, "rank 1000"),
    ],
)
def test_adapters_that_vllm_does_not_know_are_refused_and_go_over_merged(changes, words):
    with pytest.raises(ValueError, match=words):
        engine_of(adapted(**changes), adapter_sync=True)


def test_weights_that_an_adapter_untied_arrive():
    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny_model("smollm", num_attention_heads=2), peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
    )
    disturb(model, 0.2)
    engine = engine_of(model)
    engine.load_weights(None, 1)
    SyncProbe(VOCABULARY).check(scored_by(model), engine.score, 1, engine.version, engine.differing_tensors)


def test_a_regular_expression_and_raw_log_probs():
    model = tiny.causal_lm(family="llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    tokenizer = tiny.tokenizer()
    engine = engine_of(model, tokenizer, logprobs_mode="raw_logprobs")
    engine.load_weights(None, 1)
    params = SamplingParams(
        max_tokens=12, regex="[0-9]{3}(yes|no)", stop_ids=(tokenizer.eos_token_id,), temperature=1.0
    )
    asked = [Prompt(tokenizer.encode("number: "), key=key) for key in range(6)]
    for done in generate(engine, asked, params):
        assert done.finish_reason == STOP
        assert done.ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(done.ids[:-1])
        assert text[:3].isdigit()
        assert text[3:] in ("yes", "no")
        assert np.isnan(done.policy_logps).all()
    for how in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 3}):
        done = generate(engine, asked[:1], SamplingParams(max_tokens=6, **how))[0]
        ids = np.concatenate([asked[0].ids, done.ids])
        policy = scored_by(model)([ids])[0][len(asked[0].ids) - 1 :]
        expected_policy = policy if how["temperature"] == 1 else np.full(6, np.nan)
        expected_sampling = policy if how == {"temperature": 1.0} else np.full(6, np.nan)
        np.testing.assert_allclose(done.policy_logps, expected_policy, atol=1e-3)
        np.testing.assert_allclose(done.sampling_logps, expected_sampling, atol=1e-3)
