"""One task: the same answers whatever the batch and the processes; scores that are those of the answers."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.data.render.renderer import Renderer
from posttrain.evaluation.run import TaskEvaluation, engine_for, stop_ids
from posttrain.evaluation.spec import EvalSpec
from posttrain.rollout.engines.select import ENGINES
from tests import tiny

ROWS = [{"prompt": f"What is {i}?", "answer": i} for i in range(12)]


def odd(completion_ids, answer, **columns):
    return [float((sum(ids) + a) & 1) for ids, a in zip(completion_ids, answer)]


def parts(completion_ids, prompts, **columns):
    """0, 0.5 or 1; None: no opinion about some prompts."""
    return [None if "0" in prompt else sum(ids) % 3 / 2 for prompt, ids in zip(prompts, completion_ids)]


def sometimes_raises(completion_ids, answer, **columns):
    if answer[0] == 3:
        raise RuntimeError("no")
    return [1.0] * len(answer)


@pytest.fixture(scope="module")
def model():
    return tiny.causal_lm()


def run(model, spec, engine="native", **options):
    tokenizer = tiny.tokenizer()
    task = TaskEvaluation(spec, spec.rows(Renderer(tokenizer)), tokenizer)
    made = (
        ENGINES[engine](model, decode=tokenizer.decode, **options) if options else engine_for(engine, tokenizer)(model)
    )
    found = task(made, stop_ids(model, tokenizer), keep_samples=True)
    task.close()
    return found


def texts(result):
    return {(one["row"], one["sample"]): one["completion_ids"] for one in result.samples}


def test_answers_do_not_depend_on_slots_engine_or_limit(model):
    spec = EvalSpec(ROWS, odd, samples=3, max_new_tokens=10, seed=5)
    whole = run(model, spec)
    assert len(texts(whole)) == 36
    assert texts(run(model, spec, max_slots=2)) == texts(whole)
    assert texts(run(model, spec, engine="transformers")) == texts(whole)
    few = texts(run(model, EvalSpec(ROWS, odd, samples=2, max_new_tokens=10, seed=5, limit=4)))
    assert few == {key: texts(whole)[key] for key in few}
    assert texts(run(model, EvalSpec(ROWS, odd, samples=3, max_new_tokens=10, seed=6))) != texts(whole)


def test_scores_are_those_of_the_answers(model):
    found = run(model, EvalSpec(ROWS, odd, samples=4, max_new_tokens=10))
    by_hand = np.zeros((12, 4))
    for (row, sample), ids in texts(found).items():
        by_hand[row, sample] = (sum(ids) + row) & 1
    assert found.scores["reward"].value == pytest.approx(by_hand.mean())
    assert found.score.value == found.scores["pass@1"].value == pytest.approx(by_hand.mean())
    assert found.scores["pass@4"].value == pytest.approx(by_hand.any(1).mean())
    assert 0 < found.scores["pass@1"].value < found.scores["pass@2"].value < found.scores["pass@4"].value <= 1
    assert found.metrics()["truncated"] == np.mean([one["finish_reason"] == "length" for one in found.samples])
    assert found.metrics()["length"] == np.mean([len(ids) for ids in texts(found).values()])


def test_rewards_that_are_not_0_or_1_pass_from_a_threshold_on(model):
    plain = run(model, EvalSpec(ROWS, parts, samples=2, max_new_tokens=6))
    assert list(plain.scores) == ["reward"]
    passing = run(model, EvalSpec(ROWS, parts, samples=2, max_new_tokens=6, threshold=0.5))
    judged = passing.answers.totals[~np.isnan(passing.answers.totals)]
    assert len(judged) == 20  # rows 0 and 10 have no opinion
    assert passing.scores["pass@1"].value == pytest.approx((judged >= 0.5).mean())


def test_several_rewards_are_weighed(model):
    one, two = (run(model, EvalSpec(ROWS, reward, max_new_tokens=6)) for reward in (odd, parts))
    both = run(model, EvalSpec(ROWS, [odd, parts], max_new_tokens=6, reward_weights=[2.0, 1.0]))
    assert both.answers.totals == pytest.approx(2 * one.answers.totals + np.nan_to_num(two.answers.totals))
    assert both.metrics()["rewards/parts"] == pytest.approx(np.nanmean(two.answers.totals))


def test_an_answer_whose_reward_failed_is_left_out_and_counted(model):
    found = run(model, EvalSpec(ROWS, sometimes_raises, samples=2, max_new_tokens=4))
    assert found.metrics()["failed"] == 2
    assert found.scores["pass@1"].value == 1.0
    assert found.answers.rows[found.answers.failed].tolist() == [3, 3]
    assert "RuntimeError" in next(one["error"] for one in found.samples if one["row"] == 3)


def last_token(completion_ids, prompts, **columns):
    """What picks an answer; it has no opinion about one prompt."""
    return [None if "7" in prompt else float(ids[-1]) for prompt, ids in zip(prompts, completion_ids)]


def test_the_best_of_several_answers_against_the_first(model):
    found = run(model, EvalSpec(ROWS, odd, best_of=4, select_by=last_token, max_new_tokens=6))
    rewards, liked = np.zeros((12, 4)), np.zeros((12, 4))
    for (row, sample), ids in texts(found).items():
        rewards[row, sample], liked[row, sample] = (sum(ids) + row) & 1, ids[-1]
    kept = [row for row in range(12) if row != 7]
    first, best = rewards[kept, 0], rewards[kept, liked[kept].argmax(1)]
    gain = best - first
    shown = found.scores
    assert shown["first-of-4"].value == pytest.approx(first.mean())
    assert shown["best-of-4"].value == pytest.approx(best.mean())
    assert shown["gain"].value == pytest.approx(gain.mean())
    assert found.standard_errors() == pytest.approx(
        {n: v.std(ddof=1) / 11**0.5 for n, v in {"first-of-4": first, "best-of-4": best, "gain": gain}.items()}
    )
    assert shown["reward"].value == pytest.approx(rewards.mean())  # what picks is not counted
    assert found.as_json()["standard_errors"]["gain"] == found.standard_errors()["gain"]
    assert found.metrics()["best-of-4"] == shown["best-of-4"].value


def test_the_best_by_the_reward_itself_is_never_worse(model):
    found = run(model, EvalSpec(ROWS, odd, best_of=4, select_by=odd, max_new_tokens=6))
    assert found.scores["best-of-4"].value == found.scores["pass@4"].value > found.scores["first-of-4"].value


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"samples": 0}, "samples"),
        ({"samples": 2, "temperature": 0.0}, "temperature 0"),
        ({"limit": 0}, "limit"),
        ({"every": 0}, "every"),
        ({"top_p": 2.0}, "top_p"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights"),
        ({"name": "a b"}, "name"),
        ({"best_of": 1, "select_by": odd}, "best_of` is 1; it must be at least 2"),
        ({"best_of": 4}, "select_by` is None; it must be given where `best_of` is"),
        ({"select_by": odd}, "select_by"),
        ({"best_of": 4, "select_by": odd, "samples": 3}, "samples` is 3; it must be left out, or `best_of`"),
        ({"best_of": 4, "select_by": odd, "temperature": 0.0}, "temperature 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        EvalSpec(ROWS, odd, **wrong)


def test_a_reward_that_wants_a_column_that_is_not_there_is_refused_before_anything_is_written():
    spec = EvalSpec([{"prompt": "a"}], odd)
    with pytest.raises(ValueError, match="odd needs the column 'answer'"):
        spec.rows(Renderer(tiny.tokenizer()))
