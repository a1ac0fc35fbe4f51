"""What RewardWatch says, and when."""

from __future__ import annotations

import numpy as np

from posttrain.rewards.runtime.statistics import CONSTANT_ROUNDS, RewardWatch
from tests.rewards.faulty import group, judged


def test_healthy_rewards_are_not_mentioned():
    rng, watch = np.random.default_rng(0), RewardWatch()
    for _ in range(50):
        values = np.stack([rng.normal(size=64), rng.integers(0, 2, 64)], axis=1)
        assert watch.look(["a", "b"], values, rng.integers(1, 500, 64)) == []


def test_a_reward_far_outside():
    watch = RewardWatch()
    values = np.array([[1.0, 3.0], [np.nan, -2e6]])
    (said,) = watch.look(["a", "sum"], values, np.array([3, 4]))
    assert said.startswith("Reward sum gave -2e+06, far outside")
    assert watch.look(["a", "sum"], values, np.array([3, 4])) == []  # once


def test_a_constant_reward():
    watch = RewardWatch()
    said = [watch.look(["a"], np.zeros((4, 1)), np.arange(4)) for _ in range(CONSTANT_ROUNDS + 5)]
    assert [bool(sentences) for sentences in said].index(True) == CONSTANT_ROUNDS - 1
    assert sum(map(len, said)) == 1
    assert said[CONSTANT_ROUNDS - 1][0].startswith("Reward a has been 0 for every sample of 20 rounds")


def test_constant_in_each_round_is_not_constant():
    watch = RewardWatch()
    assert not any(watch.look(["a"], np.full((4, 1), i % 2), np.arange(4)) for i in range(60))


def test_no_opinion_is_no_value():
    watch = RewardWatch()
    assert not any(watch.look(["a"], np.full((4, 1), np.nan), np.arange(4)) for _ in range(60))


def test_a_reward_that_follows_length():
    rng = np.random.default_rng(0)
    for sign, word in ((1, "longer"), (-1, "shorter")):
        watch, said = RewardWatch(), []
        for _ in range(10):
            lengths = rng.integers(1, 500, 32)
            values = sign * lengths[:, None] / 100 + rng.normal(size=(32, 1)) * 0.3
            said += watch.look(["a"], values, lengths)
        assert len(said) == 1
        assert f"to write {word} answers" in said[0]
        assert f"correlation {'-' * (sign < 0)}0.9" in said[0]


def test_rounds_are_watched():
    def by_length(completions, completion_ids):
        return [20_000.0 + len(ids) for ids in completion_ids]

    groups = [group(*["x" * (i % 7) for i in range(8)]) for _ in range(20)]
    _, made = judged([by_length], *groups)
    far, follows = made.notes
    assert far.startswith("Reward by_length gave 2.001e+04, far outside")
    assert follows.startswith(
        "Reward by_length follows the length of the completion (correlation 1.00 over 160 samples)"
    )


def test_correlation_is_of_the_last_samples():
    rng, watch, said = np.random.default_rng(0), RewardWatch(), []
    for round_number in range(60):
        lengths = rng.integers(1, 500, 32)
        values = rng.normal(size=(32, 1)) if round_number < 40 else lengths[:, None] / 500
        said += [(round_number, sentence) for sentence in watch.look(["a"], values, lengths)]
    assert len(said) == 1
    assert 45 < said[0][0] < 58
