"""Bradley-Terry with margin and centring: worked numbers and naive formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.reward import bradley_terry, centring, reward_metrics


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_golden_bradley_terry():
    """r_c - r_r = 2 and -1.5: ln(1 + e^-2) = 0.126928011043, ln(1 + e^1.5) = 1.701413277983.

    Slope by r_c: -S(-2) = -0.119202922022, -S(1.5) = -0.817574476194; by r_r the opposite.
    """
    chosen, rejected = numbers(3, -1), numbers(1, 0.5)
    values = bradley_terry(chosen, rejected)
    assert values.tolist() == pytest.approx([0.126928011043, 1.701413277983], abs=1e-11)
    values.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.119202922022, -0.817574476194], abs=1e-11)
    assert rejected.grad.tolist() == pytest.approx([0.119202922022, 0.817574476194], abs=1e-11)


def test_golden_bradley_terry_with_margin():
    """Margins 1 and -0.5 leave 2 - 1 = 1 and -1.5 + 0.5 = -1: ln(1 + e^-1) = 0.313261687518, ln(1 + e) = 1.313261687518.

    Slope by r_c: -S(-1) = -0.268941421370, -S(1) = -0.731058578630.
    """
    chosen, rejected = numbers(3, -1), numbers(1, 0.5)
    values = bradley_terry(chosen, rejected, torch.tensor([1.0, -0.5], dtype=torch.float64))
    assert values.tolist() == pytest.approx([0.313261687518, 1.313261687518], abs=1e-11)
    values.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.268941421370, -0.731058578630], abs=1e-11)


def test_golden_centring():
    """(3 + 1)^2 = 16, (-1 + 0.5)^2 = 0.25; slopes 2 * 4 = 8 and 2 * -0.5 = -1 by both rewards."""
    chosen, rejected = numbers(3, -1), numbers(1, 0.5)
    values = centring(chosen, rejected)
    assert values.tolist() == [16, 0.25]
    values.sum().backward()
    assert chosen.grad.tolist() == rejected.grad.tolist() == [8, -1]


@settings(max_examples=50, deadline=None)
@given(c=st.floats(-30, 30), r=st.floats(-30, 30), m=st.floats(-5, 5))
def test_equals_the_naive_formula(c, r, m):
    """-ln(e^(r_c - m) / (e^(r_c - m) + e^r_r)), the probability that chosen wins as Bradley and Terry wrote it.

    Its derivative by r_c is minus the probability that rejected wins.
    """
    chosen, rejected = numbers(c), numbers(r)
    value = bradley_terry(chosen, rejected, torch.tensor([m], dtype=torch.float64))
    value.backward()
    wins, loses = math.exp(c - m), math.exp(r)
    assert value.item() == pytest.approx(math.log1p(loses / wins), rel=1e-9)
    assert chosen.grad.item() == pytest.approx(-loses / (wins + loses), rel=1e-9)
    assert rejected.grad.item() == pytest.approx(loses / (wins + loses), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(c=st.floats(-100, 100), r=st.floats(-100, 100), offset=st.floats(-100, 100))
def test_bradley_terry_is_blind_to_an_offset_and_centring_is_not(c, r, offset):
    """Bradley-Terry leaves the offset free; centring is least where the two rewards are opposite."""
    plain, moved = bradley_terry(numbers(c), numbers(r)), bradley_terry(numbers(c + offset), numbers(r + offset))
    assert plain.item() == pytest.approx(moved.item(), abs=1e-9)
    middle = (c + r) / 2
    assert centring(numbers(c - middle), numbers(r - middle)).item() == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_for_rewards_that_ran_away(dtype):
    chosen = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-1e4, 1e4, 0.0], dtype=dtype, requires_grad=True)
    values = bradley_terry(chosen, rejected) + centring(chosen, rejected)
    assert values.tolist() == pytest.approx([0, 2e4, math.log(2)])
    values.sum().backward()
    assert torch.isfinite(chosen.grad).all()
    assert torch.isfinite(rejected.grad).all()


def test_metrics():
    """Pair 0 is won by 2, pair 1 lost by 1.5, pair 2 a tie, which is no win; smallest of all rewards -1, largest 3."""
    metrics = reward_metrics(numbers(3, -1, 2), numbers(1, 0.5, 2))
    assert metrics["mean_reward"].tolist() == [3, -1, 2, 1, 0.5, 2]
    assert metrics["min_reward"].tolist() == [-1]
    assert metrics["max_reward"].tolist() == [3]
    assert metrics["accuracy"].tolist() == [1, 0, 0]
    assert metrics["margin"].tolist() == [2, -1.5, 0]
    assert not any(values.requires_grad for values in metrics.values())


def test_metrics_of_no_pairs():
    metrics = reward_metrics(torch.zeros(0), torch.zeros(0))
    assert all(len(values) == 0 for values in metrics.values())
