"""Weights and masks for tokens of a sampler that is not the trainer."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.losses.importance import (
    CORRECTION_MODES,
    check_correction,
    effective_sample_size,
    off_policy_mask,
    sampler_correction,
    sampling_metrics,
)
from tests.losses.policy_oracle import token_batch, values_of

NAN = float("nan")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def sampled():
    """Two completions. Ratios of trainer to sampler: 4, 1/2 | 1/4, unknown, 1/2. Products: 2 and 1/8."""
    sampling = numbers(0.2, 0.8, 0.8, NAN, 0.5).log()
    old = numbers(0.8, 0.4, 0.2, 0.3, 0.25).log()
    return token_batch([2, 3]), old, sampling


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights"),
    [
        ("token_truncate", None, 3.0, [3, 0.5, 0.25, 1, 0.5]),
        ("token_truncate", 0.4, 3.0, [3, 0.5, 0.4, 1, 0.5]),
        ("token_mask", None, 3.0, [0, 0.5, 0.25, 1, 0.5]),
        ("token_mask", 0.4, None, [4, 0.5, 0, 1, 0.5]),
        ("sequence_truncate", None, 1.5, [1.5, 1.5, 0.125, 0.125, 0.125]),
        ("sequence_truncate", 0.5, None, [2, 2, 0.5, 0.5, 0.5]),
        ("sequence_mask", None, 3.0, [2, 2, 0.125, 0.125, 0.125]),
        ("sequence_mask", 0.5, 3.0, [2, 2, 0, 0, 0]),
        ("sequence_mask", None, 1.5, [0, 0, 0.125, 0.125, 0.125]),
    ],
)
def test_weights_by_hand(sampled, mode, low, high, weights):
    batch, old, sampling = sampled
    assert sampler_correction(old, sampling, batch, mode, low, high).tolist() == pytest.approx(weights, abs=1e-12)


def test_metrics_by_hand(sampled):
    """|log ratio|: ln 4, ln 2, ln 4, 0, ln 2. k3 of the sampler's KL: rho - ln rho - 1.
    Effective share of completions: (2 + 1/8)^2 / (2 (4 + 1/64)) = 4.515625 / 8.03125 = 0.562256809339.
    """
    batch, old, sampling = sampled
    found = sampling_metrics(old, sampling, batch, "sequence_mask", 0.5, 3.0)
    two = math.log(2)
    assert found["sampling/sampling_logp_difference/mean"].tolist() == pytest.approx([2 * two, two, 2 * two, 0, two])
    assert found["sampling/sampling_logp_difference/max"].values.max() == pytest.approx(2 * two)
    assert found["sampling/sampling_logp_difference/max"].is_largest
    assert found["sampling/importance_sampling_ratio/mean"].tolist() == pytest.approx([2, 0])
    assert found["sampling/importance_sampling_ratio/min"].values.tolist() == pytest.approx([2, 0])
    assert not found["sampling/importance_sampling_ratio/min"].is_largest
    assert found["sampling/importance_sampling_ratio/max"].values.tolist() == pytest.approx([2, 0])
    assert found["sampling/importance_sampling_ratio/max"].is_largest
    assert found["sampling/masked_share"].tolist() == [0, 1]
    assert found["sampling/effective_sample_size"].tolist() == pytest.approx([0.562256809339])
    of_longest = found["sampling/masked_share/longest_quarter"].tolist()
    assert (math.isnan(of_longest[0]), of_longest[1]) == (True, 1)
    assert found["sampling/effective_sample_size/longest_quarter"].tolist() == [1]
    kl = [4 - 2 * two - 1, 0.5 + two - 1, 0.25 + 2 * two - 1, 0, 0.5 + two - 1]
    assert found["sampling/kl"].tolist() == pytest.approx(kl, abs=1e-12)
    per_token = sampling_metrics(old, sampling, batch, "token_truncate", None, 3.0)
    assert per_token["sampling/importance_sampling_ratio/mean"].tolist() == pytest.approx([3, 0.5, 0.25, 1, 0.5])
    assert per_token["sampling/importance_sampling_ratio/max"].values.max() == pytest.approx(3)
    # (1/4 + 1 + 1/2)^2 / (3 (1/16 + 1 + 1/4)) = 3.0625 / 3.9375
    assert per_token["sampling/effective_sample_size/longest_quarter"].tolist() == pytest.approx([7 / 9])
    assert per_token["sampling/masked_share/longest_quarter"].isnan().tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_sampler_that_agrees_changes_nothing(mode):
    batch, old = token_batch([2, 0, 3]), numbers(-1, -2, -3, -4, -5)
    assert sampler_correction(old, old, batch, mode, 0.5, 2.0).tolist() == [1] * 5
    assert sampler_correction(old, torch.full_like(old, NAN), batch, mode, 0.5, 2.0).tolist() == [1] * 5
    found = sampling_metrics(old, old, batch, mode, 0.5, 2.0)
    assert found["sampling/effective_sample_size"].tolist() == [1]
    assert found["sampling/kl"].abs().max() == 0


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_ratio_on_a_bound_is_inside(mode):
    batch, old = token_batch([2]), numbers(-1, -2)
    assert sampler_correction(old, old, batch, mode, 1.0, 2.0).tolist() == [1, 1]
    assert sampler_correction(old, old, batch, mode, 0.5, 1.0).tolist() == [1, 1]


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_an_empty_batch_has_no_metrics(mode):
    batch, nothing = token_batch([0], num_units=0), torch.zeros(0)
    assert len(sampler_correction(nothing, nothing, batch, mode, 0.5, 2.0)) == 0
    found = values_of(sampling_metrics(nothing, nothing, batch, mode, 0.5, 2.0))
    assert {len(values) for values in found} == {0}


def test_ratios_beyond_float32_stay_finite():
    batch, old = token_batch([2]), torch.tensor([0.0, 0.0])
    for mode in CORRECTION_MODES:
        for sampling in (-200.0, 200.0):
            logps = torch.full((2,), sampling)
            assert sampler_correction(old, logps, batch, mode, 1e-3, 3.0).isfinite().all()
            found = sampling_metrics(old, logps, batch, mode, 1e-3, 3.0)
            assert all(values.isfinite().all() for values in values_of(found))


def test_effective_sample_size_of_one_dominant_weight():
    """One of four weights is all: 1 / 4. Equal ones: 1."""
    assert effective_sample_size(torch.tensor([1e30, 1.0, 1.0, 1.0])).item() == pytest.approx(0.25)
    assert effective_sample_size(torch.full((7,), 1e-3)).item() == pytest.approx(1)


def test_weights_carry_no_gradient(sampled):
    batch, old, sampling = sampled
    assert not sampler_correction(old.requires_grad_(), sampling, batch, "token_mask", None, 3.0).requires_grad


@pytest.mark.parametrize(
    ("mode", "low", "high", "message"),
    [
        ("token", None, 3.0, "'token' is unknown"),
        ("token_mask", 3.0, 2.0, "must rise"),
        ("sequence_mask", -1.0, 2.0, "must rise"),
        ("token_truncate", None, None, "truncates to nothing"),
    ],
)
def test_bounds_without_meaning_are_refused(mode, low, high, message):
    with pytest.raises(ValueError, match=message):
        check_correction(mode, low, high)


def test_off_policy_completions_are_left_out_only_when_bad():
    """mean(s - l): 1.0 for the first three, 0.1 for the fourth; A = -1, 1, 0, -1. Only the first is bad and far away."""
    batch = token_batch([2, 1, 1, 2])
    sampling = numbers(-1, -1, -1, -1, -1, NAN)
    logps = numbers(-1.5, -2.5, -2, -2, -1.2, -9).requires_grad_()
    advantages = numbers(-1, -1, 1, 0, -1, -1)
    mask = off_policy_mask(batch, logps, sampling, advantages, 0.5)
    assert mask.tolist() == [False, False, True, True, True, True]
    assert off_policy_mask(batch, logps, sampling, advantages, 1.0).all()  # the bound itself is still inside
