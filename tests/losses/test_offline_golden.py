"""Losses of CPO, SimPO, AlphaPO, ORPO, TPO, KTO and BCO against numbers worked by hand, and rules that hold for all inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.losses.reference_free import Answers, log1mexp, log_odds_ratio, reference_free_loss, shaped
from posttrain.losses.unpaired import LogisticRegression, Unpaired, apo_zero_unpaired, bco, density_ratios, kto

NUMBERS = st.floats(-30, -1e-3)
SUMS, MEANS = (-10.0, -12.0), (-2.0, -3.0)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_of(sides, name, alpha=0.0, **options):
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, "tpo_l_gamma": 0.5}
    answers = Answers(tensor(sides[0]), tensor(sides[1]), alpha)
    return reference_free_loss(answers, name, defaults | options).item()


@pytest.mark.parametrize(
    ("sides", "name", "options", "expected"),
    [
        (SUMS, "sigmoid", {}, 0.598139),
        (SUMS, "sigmoid", {"label_smoothing": 0.1}, 0.618139),
        (SUMS, "hinge", {}, 0.8),
        (MEANS, "ipo", {}, 16.0),
        (MEANS, "simpo", {"beta": 2.0}, 0.201413),
        (MEANS, "simpo", {}, 0.913015),
        (MEANS, "simpo", {"beta": 2.0, "alpha": 0.25}, 0.038182),
        (MEANS, "simpo", {"beta": 2.0, "alpha": -0.25}, 0.447026),
        (MEANS, "tpo-l", {"beta": 0.01}, 0.967864),
        (SUMS, "sigmoid", {"beta": 0.01}, 0.683197),
    ],
)
def test_losses_without_a_reference(sides, name, options, expected):
    assert loss_of(sides, name, **options) == pytest.approx(expected, abs=5e-7)


def test_alphapo_shapes_means_and_has_simpo_for_its_limit():
    assert shaped(tensor(*MEANS), 0.25).tolist() == pytest.approx([-2.594885, -4.468000], abs=5e-7)
    assert shaped(tensor(*MEANS), -0.25).tolist() == pytest.approx([-1.573877, -2.110534], abs=5e-7)
    assert loss_of(MEANS, "simpo", beta=2.0, alpha=1e-6) == pytest.approx(0.201413, abs=1e-5)


def test_odds_ratio():
    chosen, rejected = tensor(-2.0).requires_grad_(), tensor(-3.0)
    assert log1mexp(tensor(-2.0, -3.0)).tolist() == pytest.approx([-0.145413, -0.051069], abs=5e-7)
    odds = log_odds_ratio(chosen, rejected)
    assert odds.item() == pytest.approx(1.094344, abs=5e-7)
    assert torch.nn.functional.logsigmoid(odds).item() == pytest.approx(-0.288751, abs=5e-7)
    odds.sum().backward()
    assert chosen.grad.item() == pytest.approx(1.156518, abs=5e-7)


def test_odds_of_a_certain_answer_are_finite():
    sure = log_odds_ratio(tensor(-1e-6), tensor(-2.0))
    assert sure.item() == pytest.approx(15.670097, abs=5e-6)
    assert torch.nn.functional.logsigmoid(sure).item() == pytest.approx(-1.565177e-7, rel=1e-5)
    memorised = torch.zeros(1, requires_grad=True)
    odds = log_odds_ratio(memorised, torch.tensor([-2.0]))
    odds.sum().backward()
    assert math.isfinite(odds.item())
    assert math.isfinite(memorised.grad.item())


@given(NUMBERS, NUMBERS)
def test_swapping_the_pair_negates_the_odds(one, other):
    forth, back = (log_odds_ratio(tensor(a), tensor(b)).item() for a, b in ((one, other), (other, one)))
    assert forth == pytest.approx(-back, abs=1e-9)


@given(NUMBERS)
def test_log1mexp_is_the_logarithm_that_it_says(value):
    assert log1mexp(tensor(value)).item() == pytest.approx(math.log(-math.expm1(value)), rel=1e-12)


# ---- rows with a label -------------------------------------------------------------------------------------------------------

ROWS = Unpaired(
    tensor(2.0, -1.0, 0.5, -3.0), torch.zeros(4, dtype=torch.float64), torch.tensor([True, True, False, False])
)


def test_kto():
    losses = kto(ROWS, beta=0.1, divergence=0.3)
    assert losses.tolist() == pytest.approx([0.457602, 0.532454, 0.505000, 0.418241], abs=5e-7)
    assert losses.mean().item() == pytest.approx(0.478324, abs=5e-7)
    weighted = losses * torch.where(ROWS.wanted, 1.5, 0.5)
    assert weighted.mean().item() == pytest.approx(0.486676, abs=5e-7)


def test_kto_with_the_reference_point_0_is_apo_zero():
    expected = [0.450166, 0.524979, 0.512497, 0.425557]
    assert kto(ROWS, beta=0.1, divergence=0.0).tolist() == pytest.approx(expected, abs=5e-7)
    assert apo_zero_unpaired(ROWS, beta=0.1).tolist() == pytest.approx(expected, abs=5e-7)
    start = Unpaired(torch.zeros(4), torch.zeros(4), ROWS.wanted)
    assert kto(start, beta=0.1, divergence=0.0).tolist() == [0.5] * 4


def test_bco():
    assert bco(ROWS, beta=0.1, delta=0.05).tolist() == pytest.approx([0.620957, 0.770957, 0.693147, 0.533382], abs=5e-7)


def test_metrics_of_a_class_are_nan_elsewhere():
    metrics = ROWS.metrics(0.1)
    assert metrics["rewards/chosen"][:2].tolist() == pytest.approx([0.2, -0.1])
    assert metrics["rewards/chosen"][2:].isnan().all()
    assert metrics["logps/rejected"][:2].isnan().all()


def test_density_ratio():
    assert density_ratios(tensor(0.8, 0.2, 0.95), 0.5, 10.0).tolist() == pytest.approx([4.0, 0.5, 10.0], abs=5e-7)


@pytest.mark.parametrize(
    ("labels", "balanced", "weight", "bias", "at", "probability"),
    [
        ([0, 0, 1, 1], False, 0.958286, -1.437429, 3.0, 0.808056),
        ([0, 0, 0, 1, 1], True, 1.060469, -2.445749, 2.0, 0.419504),
    ],
)
def test_logistic_regression(labels, balanced, weight, bias, at, probability):
    features = torch.arange(len(labels), dtype=torch.float64)[:, None]
    fitted = LogisticRegression.fitted(features, torch.tensor(labels, dtype=torch.bool), balanced)
    assert fitted.weights.item() == pytest.approx(weight, abs=5e-7)
    assert fitted.bias.item() == pytest.approx(bias, abs=5e-7)
    assert fitted.probabilities(tensor(at)[:, None]).item() == pytest.approx(probability, abs=5e-7)


def test_one_class_has_no_density_ratio():
    with pytest.raises(ValueError, match="one class has no rows"):
        LogisticRegression.fitted(torch.zeros(3, 2), torch.ones(3, dtype=torch.bool))
