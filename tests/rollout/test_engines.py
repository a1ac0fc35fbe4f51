"""Every family: the native engine says what transformers and the plain engine say, however it is run."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Mamba2Config, MambaConfig, RecurrentGemmaConfig

from posttrain import Sample
from posttrain.data.collate import collate
from posttrain.models.layers.fused_lora import fuse_lora
from posttrain.models.scoring.token_scores import install_scores, score_tokens
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from tests.rollout.families import FAMILIES, SEEDED, groups, letters, loaded, prompts, texts

CLOSE = 1e-3  # a gap between the two best tokens, or between noise and the edge of a token, that rounding may bridge


def by_generate(model, asked, **how):
    """Greedy completions of transformers' own loop, in one batch that is padded on its left."""
    width = max(len(prompt.ids) for prompt in asked)
    ids, mask = torch.zeros(len(asked), width, dtype=torch.long), torch.zeros(len(asked), width, dtype=torch.long)
    for row, prompt in enumerate(asked):
        ids[row, width - len(prompt.ids) :] = torch.from_numpy(prompt.ids)
        mask[row, width - len(prompt.ids) :] = 1
    said = model.generate(ids, attention_mask=mask, do_sample=False, **how)[:, width:].tolist()
    return [row[: row.index(1) + 1] if how["eos_token_id"] and 1 in row else row for row in said]


def top_two_gap(model, ids):
    """Of the distribution after these tokens."""
    best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def assert_same_up_to_rounding(model, asked, found, wanted):
    """Equal, or they part where the two best tokens are as good as one another; that in 1% of the rows at most."""
    excused = 0
    for prompt, one, other in zip(asked, found, wanted):
        if one == other:
            continue
        same = next(place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1])
        assert top_two_gap(model, [*prompt.ids, *one[:same]]) < CLOSE
        excused += 1
    assert excused <= max(len(found) // 100, 1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_completions_are_those_of_generate(family):
    model = loaded(family)
    engine = ENGINES["native"](model, max_slots=50)
    assert isinstance(engine, NativeEngine)
    asked = prompts(100)
    found = texts(generate(engine, asked, SamplingParams(max_tokens=12, temperature=0, stop_ids=(1,))))
    wanted = by_generate(model, asked, max_new_tokens=12, eos_token_id=1)
    assert_same_up_to_rounding(model, asked, found, wanted)
    assert len({token for ids in found for token in ids}) > 20


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_seeded_completions_are_the_plain_engines_and_log_probs_are_the_scorers(family):
    model = loaded(family)
    params = SamplingParams(max_tokens=20, temperature=0.8, stop_ids=(1,), seed=11)
    asked = prompts(16, samples=3)
    found = generate(NativeEngine(model, max_slots=13), asked, params)
    wanted = generate(TransformersEngine(model), asked, params)
    assert texts(found) == texts(wanted)
    install_scores(model)
    units = [
        (Sample(np.concatenate([p.ids, c.ids]), np.arange(len(p.ids) + len(c.ids)) >= len(p.ids)),)
        for p, c in zip(asked, found)
    ]
    scores = score_tokens(model, collate(units, ("text",), "padded"), temperature=0.8).logps
    ours = torch.from_numpy(np.concatenate([c.policy_logps for c in found]))
    assert torch.allclose(ours, scores, atol=1e-5)
    assert all(np.array_equal(c.policy_logps, c.sampling_logps) for c in found)
    plain = np.concatenate([c.policy_logps for c in wanted])
    assert np.allclose(ours.numpy(), plain, atol=1e-5)


@pytest.fixture(scope="module")
def qwen():
    return loaded("qwen2")


@pytest.fixture(scope="module")
def expected(qwen):
    return generate(NativeEngine(qwen), groups(), SEEDED)


@pytest.mark.parametrize("slots", [1, 7, 64])
def test_completions_do_not_depend_on_the_slots(qwen, expected, slots):
    asked = groups()[: 6 if slots == 1 else None]
    found = generate(NativeEngine(qwen, max_slots=slots, steps_per_look=slots), asked, SEEDED)
    assert texts(found) == texts(expected)[: len(asked)]


def test_completions_do_not_depend_on_the_order_or_on_who_else_is_there(qwen, expected):
    asked = groups()
    order = np.random.default_rng(1).permutation(len(asked))[:40]
    found = generate(NativeEngine(qwen, max_slots=16), [asked[place] for place in order], SEEDED)
    assert texts(found) == [texts(expected)[place] for place in order]


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_plain_engine_does_not_depend_on_its_batches_either(qwen, expected, batch):
    count = 6 if batch == 1 else 64
    found = generate(TransformersEngine(qwen, batch_size=batch), groups()[:count], SEEDED)
    assert texts(found) == texts(expected)[:count]


def test_samples_of_a_group_differ_and_another_seed_says_something_else(qwen, expected):
    said = np.array([hash(tuple(ids)) for ids in texts(expected)]).reshape(16, 4)
    assert all(len(set(group)) == 4 for group in said)
    other = generate(NativeEngine(qwen), groups(), replace(SEEDED, seed=6))
    assert all(one != two for one, two in zip(texts(other), texts(expected)))


def test_prompts_can_be_added_while_others_run(qwen, expected):
    asked = groups()
    engine = NativeEngine(qwen, max_slots=8)
    found, tickets, waiting = {}, {}, list(enumerate(asked))
    with engine.session(SEEDED) as session:
        while waiting or session.in_flight:
            for place, prompt in waiting[:3]:
                tickets[session.add(prompt)] = place
            waiting = waiting[3:]
            found.update({tickets[ticket]: completion.ids.tolist() for ticket, completion in session.advance()})
    assert [found[place] for place in range(len(asked))] == texts(expected)


def test_a_later_turn_goes_on_counting(qwen, expected):
    """Given what was said so far as part of the prompt, the rest is what would have been said."""
    place = next(i for i, completion in enumerate(expected) if len(completion.ids) == SEEDED.max_tokens)
    prompt, said = groups()[place], expected[place].ids
    rest = Prompt(np.concatenate([prompt.ids, said[:12]]), prompt.key, prompt.sample, first_token=12, max_tokens=10)
    for engine in (NativeEngine(qwen), TransformersEngine(qwen)):
        completion = generate(engine, [rest], SEEDED)[0]
        assert completion.ids.tolist() == said[12:22].tolist()
        assert completion.finish_reason == "length"


def dict_of(stop_id, texts_of_tokens):
    assert stop_id not in {token for tokens in texts_of_tokens.values() for token in tokens}
    return texts_of_tokens


class FakeIndex:
    def __init__(self, regex, vocabulary):
        self.letters = {letter: vocabulary[letter] for letter in "ab"}


class FakeGuide:
    """Of the expression aaab*."""

    def __init__(self, index):
        self.letters, self.said = index.letters, 0

    def get_tokens(self):
        return self.letters["a" if self.said < 3 else "b"]

    def advance(self, token):
        assert token in self.get_tokens()
        self.said += 1

    def is_finished(self):
        return self.said >= 3


@pytest.mark.parametrize("name", ENGINES)
class TestBothEngines:
    def engine(self, name, model, **options):
        return ENGINES[name](model, **options)

    def test_stop_ids_end_a_completion_and_belong_to_it(self, qwen, name):
        free = generate(self.engine(name, qwen), prompts(8), SamplingParams(max_tokens=20, seed=1))
        stops = tuple({completion.ids[9] for completion in free[:4]})
        found = generate(self.engine(name, qwen), prompts(8), SamplingParams(max_tokens=20, seed=1, stop_ids=stops))
        for one, whole in zip(found, free):
            ends = [place for place, token in enumerate(whole.ids) if token in stops]
            length = ends[0] + 1 if ends else 20
            assert one.ids.tolist() == whole.ids[:length].tolist()
            assert len(one.policy_logps) == len(one.sampling_logps) == length
            assert one.finish_reason == ("stop" if ends else "length")

    def test_stop_strings_end_at_the_token_that_completes_them(self, qwen, name):
        free = generate(self.engine(name, qwen), prompts(8), SamplingParams(max_tokens=20, seed=1))
        stop = tuple(letters(free[row].ids[5 + row : 7 + row]) for row in range(3))
        params = SamplingParams(max_tokens=20, seed=1, stop=stop)
        found = generate(self.engine(name, qwen, decode=letters), prompts(8), params)
        for one, whole in zip(found, free):
            text = letters(whole.ids)
            ends = [text.index(part) + len(part) for part in stop if part in text]
            assert letters(one.ids) == text[: min(ends, default=20)]
            assert one.finish_reason == ("stop" if ends else "length")
        with pytest.raises(ValueError, match="no detokeniser"):
            generate(self.engine(name, qwen), prompts(1), params)

    def test_a_bias_forbids_and_demands_and_policy_log_probs_do_not_see_it(self, qwen, name):
        bias = dict.fromkeys(range(100), -1000000000.0)
        found = generate(self.engine(name, qwen), prompts(8), SamplingParams(max_tokens=10, logit_bias=bias))
        assert min(completion.ids.min() for completion in found) >= 100
        for completion in found:
            assert (completion.sampling_logps > completion.policy_logps).all()

    def test_a_penalty_is_that_of_transformers(self, qwen, name):
        params = SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.7)
        found = generate(self.engine(name, qwen), prompts(6), params)
        assert texts(found) == by_generate(qwen, prompts(6), max_new_tokens=20, repetition_penalty=1.7, eos_token_id=[])

    def test_truncated_draws_are_likely_ones_and_say_so(self, qwen, name):
        params = SamplingParams(max_tokens=30, top_p=0.8, seed=2)
        found = generate(self.engine(name, qwen), prompts(20), params)
        gaps = np.concatenate([completion.sampling_logps - completion.policy_logps for completion in found])
        assert (gaps > -1e-5).all()
        assert (gaps <= -np.log(0.8) + 1e-4).all()  # what was kept is at least 0.8 of the policy
        assert gaps.mean() > 0.1

    def test_a_prompt_that_is_too_long_fails_alone(self, qwen, name):
        asked = [Prompt(np.arange(3, 3 + n) % 190 + 3, key=n) for n in (10, 300, 250)]
        short, long, cut = generate(self.engine(name, qwen), asked, SamplingParams(max_tokens=20))
        assert short.finish_reason == "length"
        assert len(short.ids) == 20
        assert (long.finish_reason, len(long.ids)) == ("error", 0)
        assert long.error == (
            "Prompt 300 has 300 tokens, which leaves no room in a context of 256. Shorten it, or leave the row out."
        )
        assert (cut.finish_reason, len(cut.ids)) == ("length", 6)

    def test_an_empty_prompt_or_an_unknown_token_fails_alone(self, qwen, name):
        asked = [Prompt([]), Prompt([5]), Prompt([5, 200], key=3), Prompt([5, -1], key=4)]
        empty, full, unknown, negative = generate(self.engine(name, qwen), asked, SamplingParams(max_tokens=3))
        assert "no tokens" in empty.error
        assert unknown.error == "Prompt 3 has the token 200; this model knows 0 to 199."
        assert negative.error == "Prompt 4 has the token -1; this model knows 0 to 199."
        assert len(full.ids) == 3

    def test_lora_is_applied_and_switched_off(self, name):
        model = loaded("llama")
        base = generate(self.engine(name, model), prompts(6), SEEDED)
        torch.manual_seed(1)
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        fuse_lora(adapted)
        engine = self.engine(name, adapted)
        with_adapter = generate(engine, prompts(6), SEEDED)
        with adapted.disable_adapter():
            without = generate(engine, prompts(6), SEEDED)
        assert texts(without) == texts(base)
        assert texts(with_adapter) != texts(base)
        merged = adapted.merge_and_unload()
        assert texts(generate(self.engine(name, merged), prompts(6), SEEDED)) == texts(with_adapter)

    def test_the_model_is_left_as_it_was(self, name):
        model = loaded("gemma2").train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()]
        implementation = model.config._attn_implementation
        generate(self.engine(name, model), prompts(3), SamplingParams(max_tokens=3))
        assert [module.training for module in model.modules()] == before
        assert model.config._attn_implementation == implementation
        assert torch.is_grad_enabled()

    def test_changed_weights_are_used_at_once_and_versions_are_noted(self, name):
        model = loaded("llama")
        engine = self.engine(name, model)
        first = generate(engine, prompts(4), SEEDED)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)
        engine.load_weights(None, 7)
        second = generate(engine, prompts(4), SEEDED)
        assert texts(first) != texts(second)
        assert {completion.version for completion in second} == {7}
        with pytest.raises(ValueError, match="in place"):
            engine.load_weights([], 8)

    def test_finished_ones_are_announced_and_times_are_taken(self, qwen, name):
        seen = {}
        found = generate(self.engine(name, qwen), prompts(9), SEEDED, on_finished=seen.__setitem__)
        assert [seen[place] for place in range(9)] == found
        assert all(set(completion.seconds) == {"queued", "prefill", "decode"} for completion in found)

    def test_structured_output_says_what_is_missing(self, qwen, name):
        asked = SamplingParams(max_tokens=3, regex="a+", stop_ids=(1,))
        with pytest.raises(ValueError, match="needs an engine with a detokeniser"):
            generate(self.engine(name, qwen), prompts(1), asked)
        with pytest.raises(ValueError, match="Give `stop_ids`"):
            generate(self.engine(name, qwen, decode=letters), prompts(1), replace(asked, stop_ids=()))
        if importlib.util.find_spec("outlines_core") is None:
            with pytest.raises(ValueError, match="pip install outlines-core"):
                generate(self.engine(name, qwen, decode=letters), prompts(1), asked)

    def test_structured_output_follows_its_guide(self, qwen, name, monkeypatch):
        """With a stand-in for outlines-core that knows one expression: three letters a, then any number of b."""
        monkeypatch.setitem(
            sys.modules, "outlines_core", SimpleNamespace(Index=FakeIndex, Vocabulary=dict_of, Guide=FakeGuide)
        )
        params = SamplingParams(max_tokens=9, regex="aaab*", stop_ids=(1,), seed=4)
        found = generate(self.engine(name, qwen, decode=letters), prompts(6, samples=2), params)
        for completion in found:
            whole = letters([token for token in completion.ids if token != 1])
            assert re.fullmatch("aaab*", whole)
            assert completion.finish_reason == ("stop" if completion.ids[-1] == 1 else "length")
        assert len({tuple(completion.ids) for completion in found}) > 6

    def test_broken_weights_are_an_error_of_the_completion(self, name):
        model = loaded("llama")
        engine = self.engine(name, model)
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")
        completion = generate(engine, prompts(1), SEEDED)[0]
        assert completion.finish_reason == "error"
        assert "not numbers" in completion.error


# ---- families that keep more than keys and values --------------------------------------------------------------------------


RECURRENT = {
    "mamba": lambda: MambaConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, state_size=8),
    "mamba2": lambda: Mamba2Config(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
}


def large_weights(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.mark.parametrize("family", RECURRENT)
def test_log_probs_of_recurrent_families_are_those_of_a_full_forward(family):
    """Mamba's were 0.55 off on average: it took the mask of all tokens for that of the new one."""
    model = large_weights(RECURRENT[family]())
    asked = [Prompt((np.arange(length, dtype=np.int32) * 7) % 190 + 3, key=length) for length in (7, 20, 7, 3)]
    for prompt, completion in zip(
        asked, generate(TransformersEngine(model), asked, SamplingParams(max_tokens=8, seed=1))
    ):
        ids = torch.from_numpy(np.concatenate([prompt.ids, completion.ids])).long()
        with torch.no_grad():
            logps = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt.ids) - 1, len(ids) - 1)
        wanted = logps[places, ids[len(prompt.ids) :]].numpy()
        np.testing.assert_allclose(completion.policy_logps, wanted, atol=1e-4)


def test_a_family_that_cannot_be_continued_token_by_token_is_refused():
    """RecurrentGemma keeps its state in its modules and begins it anew at every token: its log-probs were 0.29 off."""
    config = RecurrentGemmaConfig(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, lru_width=32, attention_window_size=16,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"RecurrentGemmaForCausalLM cannot write rollouts here: .* differ from those of a full"
    ):
        TransformersEngine(large_weights(config))


@pytest.mark.parametrize("engine", [TransformersEngine, NativeEngine])
def test_a_mixture_of_experts_that_is_trained_with_its_routers_loss_is_continued(engine):
    """transformers computes that loss in every forward, and cannot with a cache."""
    model = loaded("qwen2_moe")
    expected = texts(generate(engine(model), groups()[:4], SEEDED))
    model.config.output_router_logits = True
    assert texts(generate(engine(model), groups()[:4], SEEDED)) == expected
