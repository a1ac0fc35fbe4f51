"""PPO's rewards, advantages, whitening, value loss and controller, against numbers worked by hand and a plain float64 loop."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.losses.gae import (
    KL_ESTIMATORS,
    KLController,
    Moments,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_loss,
    whitened,
)
from posttrain.losses.policy import clipped_ratio

OLD, REFERENCE, VALUES = [-1.0, -0.5, -2.0], [-1.2, -0.4, -1.5], [0.2, 0.4, 0.1]


def double(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize(("name", "found"), [("k1", [0.2, -0.1, -0.5]), ("k3", [0.018731, 0.005171, 0.148721])])
def test_divergences_of_a_hand_worked_completion(name, found):
    assert KL_ESTIMATORS[name](double(*OLD), double(*REFERENCE)).tolist() == pytest.approx(found, abs=1e-6)


def test_a_hand_worked_completion():
    rewards = token_rewards(double(1), counts(3), double(0.2, -0.1, -0.5), 0.05)
    assert rewards.tolist() == pytest.approx([-0.01, 0.005, 1.025])
    advantages, returns = generalised_advantages(rewards, double(*VALUES), counts(3))
    assert advantages.tolist() == pytest.approx([0.744562, 0.583750, 0.925000], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.944562, 0.983750, 1.025], abs=1e-6)
    assert whitened(advantages).tolist() == pytest.approx([-0.038318, -0.980290, 1.018608], abs=1e-6)


def test_the_score_is_on_the_last_token_and_not_on_a_step_after_it():
    """TRL's extra step with a value of its own, 0.05, gives other advantages; the same completion cut off would have ours there."""
    extra, _ = generalised_advantages(double(-0.01, 0.005, 0.025, 1.0), double(*VALUES, 0.05), counts(4))
    assert extra[:3].tolist() == pytest.approx([0.701694, 0.538625, 0.877500], abs=1e-6)


def naive(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    found, following, value = [], 0.0, 0.0
    for reward, own in zip(reversed(rewards), reversed(values)):
        following = reward + gamma * value - own + gamma * lam * following
        value = own
        found.insert(0, following)
    return found


def test_completions_of_any_lengths_equal_a_loop_over_each():
    rng = np.random.default_rng(5)
    sizes = [3, 0, 1, 17, 2, 0, 8]
    rewards, values = (torch.from_numpy(rng.normal(size=sum(sizes))) for _ in range(2))
    advantages, returns = generalised_advantages(rewards, values, counts(*sizes), 0.97, 0.9)
    expected = []
    for r, v in zip(torch.split(rewards, sizes), torch.split(values, sizes)):
        expected += naive(r.tolist(), v.tolist(), 0.97, 0.9)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert (returns - advantages).tolist() == pytest.approx(values.tolist(), abs=1e-12)
    scored = token_rewards(torch.arange(7.0).double(), counts(*sizes), torch.zeros(sum(sizes)).double(), 1.0)
    assert scored.nonzero().flatten().tolist() == [
        3,
        20,
        22,
        30,
    ]  # the first score is 0; those of no tokens are nowhere
    assert scored[[3, 20, 22, 30]].tolist() == [2, 3, 4, 6]


def test_no_completions_have_no_advantages():
    advantages, returns = generalised_advantages(double(), double(), counts(0, 0))
    assert (len(advantages), len(returns)) == (0, 0)
    assert len(whitened(advantages)) == 0


def test_without_discount_returns_are_the_later_rewards_whatever_the_values():
    rewards = double(0.3, -1.0, 2.0, 0.5)
    for values in (double(0, 0, 0, 0), double(5, -3, 8, 1)):
        _, returns = generalised_advantages(rewards, values, counts(3, 1), 1.0, 1.0)
        assert returns.tolist() == pytest.approx([1.3, 1.0, 2.0, 0.5])


def test_with_lam_0_an_advantage_is_one_step_deep():
    advantages, _ = generalised_advantages(double(0.3, -1.0), double(0.2, 0.7), counts(2), 0.9, 0.0)
    assert advantages.tolist() == pytest.approx([0.3 + 0.9 * 0.7 - 0.2, -1.0 - 0.7])


# ---- whitening -----------------------------------------------------------------------------------------------------------


def over(parts: list[torch.Tensor], function: Any) -> list[Any]:
    """`function(part, summed)` in as many threads as parts, which add up their tensors as processes do."""
    import threading

    barrier = threading.Barrier(len(parts), timeout=60)
    slots: list[Any] = [None] * len(parts)
    found: list[Any] = [None] * len(parts)

    def work(rank: int) -> None:
        def summed(tensor: torch.Tensor) -> torch.Tensor:
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        found[rank] = function(parts[rank], summed)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_whitening_over_two_uneven_processes():
    parts = [double(1, 2), double(6)]
    found = torch.cat(over(parts, lambda part, summed: whitened(part, summed=summed)))
    assert found.tolist() == pytest.approx([-0.755929, -0.377964, 1.133893], abs=1e-6)
    kept = torch.cat(over(parts, lambda part, summed: whitened(part, True, summed)))
    assert kept.tolist() == pytest.approx([2.244071, 2.622036, 4.133893], abs=1e-6)


def test_whitening_far_from_0_with_a_process_that_has_nothing():
    values = 1e6 + torch.from_numpy(np.random.default_rng(0).normal(size=40))
    parts = [values[:33], values[33:33], values[33:]]
    found = torch.cat(over(parts, lambda part, summed: whitened(part, summed=summed)))
    torch.testing.assert_close(found, (values - values.mean()) / (values.var() + 1e-8).sqrt(), rtol=0, atol=1e-9)
    assert found.mean().abs() < 1e-9
    assert found.var() == pytest.approx(1, abs=1e-7)


def test_a_single_token_is_safe():
    assert whitened(double(3.5)).tolist() == [0.0]
    assert whitened(double(3.5), keep_mean=True).tolist() == [3.5]
    assert Moments.of(double(3.5)).variance == 0


def test_explained_variance():
    returns = double(1, 2, 3, 6)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(double(3, 3, 3, 3), returns) == 0
    assert explained_variance(double(0, 0, 0, 1), returns) == pytest.approx(1 - (39 - 121 / 4) / (50 - 36))
    assert math.isnan(explained_variance(returns, double(1, 1, 1, 1)))


# ---- the losses and the controller ---------------------------------------------------------------------------------------


def test_hand_worked_clips():
    policy = clipped_ratio(double(1.3, 0.7).log(), double(0.5, -0.5), 0.2, 0.2)
    assert policy.tolist() == pytest.approx([-0.6, 0.4])
    values, clipped = value_loss(double(0.75, 0.3), double(0.4, 0.4), double(1, 1), 0.2)
    assert values.tolist() == pytest.approx([0.08, 0.245])
    assert clipped.tolist() == [1, 0]
    exact, _ = value_loss(double(1.2), double(1.2), double(1.2), 0.2)
    assert exact.tolist() == [0.0]


def test_the_controller_follows_its_target_by_bounded_steps():
    controller = KLController(0.2, 6.0)
    controller.observe(9.0, 256)
    assert controller.coefficient == pytest.approx(0.201024)
    controller.observe(0.0, 256)  # far below: as much less at most
    assert controller.coefficient == pytest.approx(0.201024 * (1 - 0.2 * 0.0256))
    controller.observe(6.0, 256)
    controller.observe(100.0, 0)  # nothing was written
    assert controller.coefficient == pytest.approx(0.201024 * (1 - 0.2 * 0.0256))
    other = KLController(0.7, 6.0)
    other.load(controller.state())
    assert other.coefficient == controller.coefficient
    fixed = KLController(0.05)
    fixed.observe(100.0, 64)
    assert fixed.coefficient == 0.05


def test_moments_of_parts_are_those_of_the_whole():
    values = torch.randn(23, dtype=torch.float64) + 1e6
    parts = [Moments.of(part) for part in torch.split(values, [1, 0, 9, 13])]
    joined, whole = functools.reduce(Moments.joined, parts, Moments(0, 0.0, 0.0)), Moments.of(values)
    assert (joined.number, joined.mean) == (23, pytest.approx(whole.mean, abs=1e-6))
    assert joined.variance == pytest.approx(whole.variance, rel=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("k1", [0.5, -1.0]), ("abs", [0.5, 1.0]), ("mse", [0.125, 0.5])])
def test_the_divergence_of_a_token_under_its_old_names(name, expected):
    logps, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert KL_ESTIMATORS[name](logps, reference).tolist() == expected
