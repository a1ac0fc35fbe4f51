"""The stand-in for an engine keeps the promises of one."""

from __future__ import annotations

import numpy as np

from posttrain.rollout.engines.protocol import Completion, Prompt, SamplingParams, generate
from tests.rollout.scripted_engine import ScriptedEngine


def count_up(prompt):
    return np.arange(prompt.ids[-1], prompt.ids[-1] + 3 + prompt.sample)


PARAMS = SamplingParams(max_tokens=5, stop_ids=(9,), seed=2)
PROMPTS = [Prompt([1, start], key=start, sample=sample) for start in (3, 8) for sample in range(4)]


def test_completions_are_those_of_the_script_in_the_order_of_the_prompts():
    finished = []
    engine = ScriptedEngine(count_up, per_advance=3, shuffle=1)
    engine.load_weights(None, 4)
    found = generate(engine, PROMPTS, PARAMS, lambda place, completion: finished.append(place))
    assert [completion.ids.tolist() for completion in found] == [
        [3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [8, 9], [8, 9], [8, 9], [8, 9],
    ]  # fmt: skip
    assert [completion.finish_reason for completion in found] == ["length"] * 4 + ["stop"] * 4
    assert {completion.version for completion in found} == {4}
    assert sorted(finished) == list(range(8))
    assert finished != list(range(8))
    assert engine.log == ["load_weights", "session", "end of session"]
    assert engine.prompts == PROMPTS


def test_log_probs_depend_on_who_speaks_alone():
    one, two = (generate(ScriptedEngine(count_up, shuffle=seed), PROMPTS, PARAMS) for seed in (1, 2))
    assert all(np.array_equal(a.policy_logps, b.policy_logps) for a, b in zip(one, two))
    assert all((a.policy_logps < 0).all() and len(a.policy_logps) == len(a.ids) for a in one)
    assert not np.array_equal(one[1].policy_logps[:3], one[2].policy_logps[:3])


def test_a_whole_completion_is_passed_on():
    engine = ScriptedEngine(lambda prompt: Completion.failed("no"))
    assert generate(engine, PROMPTS[:1], PARAMS)[0].error == "no"
