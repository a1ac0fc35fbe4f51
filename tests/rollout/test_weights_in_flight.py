"""Weights that change while completions are being written: every token says who wrote it, and nothing of the old is left over."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Completion, Prompt, SamplingParams, generate
from tests.rollout.families import SEEDED, groups, loaded, prompts, texts

LONG = replace(SEEDED, max_tokens=40, stop_ids=())


@pytest.fixture(scope="module")
def versions():
    """Four models of one kind; the first is the one that the engine reads, and is written into."""
    made = [copy.deepcopy(loaded("qwen2")) for _ in range(4)]
    for number, model in enumerate(made[1:]):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def into(model, other, version=0):
    """What writes the weights of `other` into `model`, and says which version they are."""

    def load():
        with torch.no_grad():
            for own, new in zip(model.parameters(), other.parameters()):
                own.copy_(new)
        return version

    return load


def run(engine, versions, asked: list[Prompt], params: SamplingParams, looks: list[int], **how) -> list[Completion]:
    """Weights change to the next version before each of these looks."""
    done, look, version = {}, 0, 0
    into(engine.model, versions[0])()
    engine.labels_tokens = True
    engine.load_weights(None, 0)
    with engine.session(params) as session:
        tickets = [session.add(prompt) for prompt in asked]
        while session.in_flight:
            if look in looks:
                version += 1
                session.change_weights(into(engine.model, versions[version], version), **how)
            done |= dict(session.advance())
            look += 1
    return [done[ticket] for ticket in tickets]


def own_logps(model, prompt: Prompt, ids: np.ndarray, temperature: float) -> np.ndarray:
    """log-probs of a completion's tokens by a plain forward."""
    tokens = torch.tensor(np.concatenate([prompt.ids, ids])).long()[None]
    with torch.no_grad():
        logps = (model(input_ids=tokens).logits[0].float() / temperature).log_softmax(-1)
    return logps[len(prompt.ids) - 1 : -1].gather(1, tokens[0, len(prompt.ids) :, None])[:, 0].numpy()


def test_every_token_has_the_log_prob_of_the_version_that_it_names(versions):
    first = copy.deepcopy(versions[0])
    engine = NativeEngine(first, steps_per_look=4, max_slots=5)
    asked = groups()
    found = run(engine, [versions[0], *versions[1:]], asked, LONG, [2, 3, 7])
    changed = [completion for completion in found if len(completion.spans) > 1]
    assert len(changed) > 3
    assert {version for completion in found for _, version in completion.spans} == {0, 1, 2, 3}
    for prompt, completion in zip(asked, found):
        wrote = completion.versions()
        assert len(wrote) == len(completion.ids)
        assert completion.version == wrote[0]
        assert list(wrote) == sorted(wrote)
        by_version = [own_logps(model, prompt, completion.ids, LONG.temperature) for model in versions]
        wanted = np.array([by_version[int(version)][place] for place, version in enumerate(wrote)])
        np.testing.assert_allclose(completion.policy_logps, wanted, atol=1e-5)


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_whoever_joins_after_a_change_sees_the_new_weights_alone(versions, keeps_cache):
    """Prompts with equal tokens would share what old weights have computed."""
    model = copy.deepcopy(versions[0])
    engine = NativeEngine(model, steps_per_look=4)
    prompt = prompts(1)[0]
    into(model, versions[0])()
    with engine.session(LONG) as session:
        session.add(prompt)
        session.advance()
        session.change_weights(into(model, versions[1], 1), keeps_cache)
        late = session.add(replace(prompt, sample=1))
        done = {}
        while session.in_flight:
            done |= dict(session.advance())
    alone = generate(NativeEngine(versions[1]), [replace(prompt, sample=1)], LONG)
    assert texts([done[late]]) == texts(alone)
    np.testing.assert_allclose(done[late].policy_logps, alone[0].policy_logps, atol=1e-5)
    assert done[late].spans is None
    assert done[late].version == 1


def test_keeping_the_cache_changes_what_old_completions_say_and_recomputing_does_not(versions):
    """The two ways differ, and only by what is left of the old weights."""
    asked = prompts(2)
    again, kept = (
        run(NativeEngine(copy.deepcopy(versions[0]), steps_per_look=4), versions, asked, LONG, [2], keeps_cache=keeps)
        for keeps in (False, True)
    )
    for prompt, one, other in zip(asked, again, kept):
        end = one.spans[0][0]
        np.testing.assert_array_equal(one.ids[:end], other.ids[:end])
        scored = own_logps(versions[1], prompt, other.ids, LONG.temperature)
        assert np.abs(other.policy_logps[end:] - scored[end:]).max() > 1e-3
