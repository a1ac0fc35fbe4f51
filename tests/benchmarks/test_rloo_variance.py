"""The figure of docs/rloo.md is what it says: hand-worked variances, and a small measurement with the trainer's own loss."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rloo_variance as measured


def test_the_variance_of_a_group_s_gradient_by_hand():
    """Gradients (1, 0), (0, 2); groups {0, 0}, {0, 1}, {1, 1} with the weights as given: estimates (1, 0), (1, 3), (0, 1).

    Means 2/3 and 4/3; squares of the differences: 1/9 + 1/9 + 4/9 and 16/9 + 25/9 + 1/9, over 2: 1/3 + 7/3.
    """
    pool = measured.Pool(torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    members = torch.tensor([[0, 0], [0, 1], [1, 1]])
    weights = torch.tensor([[1.0, 1.0], [2.0, 3.0], [1.0, 0.0]])
    assert measured.total_variance(pool, members, weights, chunk=2) == pytest.approx(8 / 3)


def test_rewards_that_all_share_are_taken_away_by_the_others_of_the_group():
    """Of 40 completions all succeed: RLOO's gradient is 0. Of 0.9 it varies by a third at most of REINFORCE's: 0.1 k / (k - 1)."""
    pool = measured.written(measured.tiny_model(), 40)
    plain, leaving_out = measured.variances(pool, torch.ones(40, dtype=torch.float64), 4, 500)
    assert leaving_out == 0 < plain
    rewards = (torch.arange(40) >= 4).double()
    plain, leaving_out = measured.variances(pool, rewards, 4, 500)
    assert leaving_out / plain < 1 / 3
    plain, leaving_out = measured.variances(pool, rewards - 0.9, 4, 500)
    assert 1.1 < leaving_out / plain < 1.6  # nothing in common: the baseline's own noise, 4 / 3
