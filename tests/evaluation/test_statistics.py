"""Estimators against enumeration, intervals against how often they hold the truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from posttrain.evaluation.result import bootstrap, estimates, pass_at_k, wilson


@pytest.mark.parametrize(("samples", "right"), [(5, 0), (5, 1), (5, 3), (5, 5), (8, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples, right):
    answers = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert math.isnan(pass_at_k(samples, right, samples + 1))


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    p, n, k = 0.3, 6, 4
    found = [pass_at_k(n, int(right), k) for right in rng.binomial(n, p, 20_000)]
    assert np.mean(found) == pytest.approx(1 - (1 - p) ** k, abs=4 * np.std(found) / math.sqrt(len(found)))


def test_wilson_by_hand_and_at_the_ends():
    low, high = wilson(0.5, 10)
    assert (low, high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(1.0, 20)[1] == 1.0


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_as_often_as_they_say(samples):
    """Prompts of different difficulty, Beta(2, 3): pass@1 is 0.4 on average; the reward is the same number."""
    rng = np.random.default_rng(1)
    held = {"reward": 0, "pass@1": 0}
    runs = 100
    for run in range(runs):
        share = rng.binomial(samples, rng.beta(2, 3, 120)) / samples
        found = estimates({"reward": share, "pass@1": share}, {"pass@1"}, samples == 1, run)
        for name in held:
            held[name] += found[name].low <= 0.4 <= found[name].high
    assert all(0.9 <= count / runs <= 0.99 for count in held.values()), held


def test_bootstrap_is_seeded_and_leaves_prompts_without_an_opinion_out():
    values = np.random.default_rng(0).random((50, 1))
    assert (bootstrap(values, 7) == bootstrap(values, 7)).all()
    assert (bootstrap(values, 7) != bootstrap(values, 8)).any()
    with_gaps = np.concatenate([values, np.full((50, 1), np.nan)])
    assert bootstrap(with_gaps, 0) == pytest.approx(bootstrap(values, 0), abs=0.02)


def test_where_all_agree_there_is_still_doubt_and_where_there_is_one_prompt_none_is_claimed():
    found = estimates({"reward": np.zeros(30), "pass@2": np.zeros(30)}, {"pass@2"}, False, 0)
    assert (found["pass@2"].method, found["pass@2"].low) == ("wilson", 0.0)
    assert found["pass@2"].high == pytest.approx(0.1135, abs=1e-3)
    alone = estimates({"reward": np.array([0.5])}, set(), False, 0)["reward"]
    assert alone.method == "none"
    assert alone.as_json() == {"value": 0.5, "low": None, "high": None, "interval": "none"}
