"""What the paired losses do everywhere: finite, monotone, symmetric where they should be, right at their limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.divergences import F_DIVERGENCES
from posttrain.losses.pair import Pair
from posttrain.losses.preference import (
    PREFERENCE_LOSSES,
    aot,
    aot_unpaired,
    check_preference_losses,
    exo_pair,
    hinge,
    preference_loss,
    robust,
    sigmoid,
    sigmoid_norm,
)

OPTIONS = {"beta": 0.5, "label_smoothing": 0.1, "discopop_tau": 0.05}
log_ratio = st.floats(-1e4, 1e4)
moderate = st.floats(-50, 50)
CASES = [
    (name, divergence)
    for name, loss in PREFERENCE_LOSSES.items()
    for divergence in (F_DIVERGENCES if loss.f_divergences else ["reverse_kl"])
]


def pair_of(log_ratios, dtype=torch.float64, **fields) -> Pair:
    """Pairs with these (chosen, rejected) log-ratios over a reference whose log-probs are 0."""
    chosen, rejected = torch.tensor(log_ratios, dtype=dtype).reshape(-1, 2).unbind(1)
    chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    zeros, lengths = torch.zeros_like(chosen), torch.arange(1, len(chosen) + 1)
    return Pair(chosen, rejected, zeros, zeros, lengths, lengths.flip(0), chosen_nll=-chosen, **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "divergence"), CASES)
@settings(max_examples=25, deadline=None)
@given(log_ratios=st.lists(st.tuples(log_ratio, log_ratio), min_size=1, max_size=4), alpha=st.floats(-1, 3))
def test_finite_for_any_log_ratio(name, divergence, dtype, log_ratios, alpha):
    pair = pair_of(log_ratios, dtype, f_divergence=divergence, f_alpha=alpha)
    (term,) = preference_loss(pair, [name], None, OPTIONS)
    assert torch.isfinite(term.values).all()
    term.values.sum().backward()
    for logps in (pair.chosen_logps, pair.rejected_logps):
        assert logps.grad is None or torch.isfinite(logps.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_finite_at_the_corners(name, divergence, dtype):
    corners = [(x, y) for x in (-1e4, 0.0, 1e4) for y in (-1e4, 0.0, 1e4)]
    for alpha in (-1.0, 0.0, 0.999999, 1.0, 1.000001, 3.0):
        pair = pair_of(corners, dtype, f_divergence=divergence, f_alpha=alpha)
        (term,) = preference_loss(pair, [name], None, OPTIONS)
        assert torch.isfinite(term.values).all()
        term.values.sum().backward()
        for logps in (pair.chosen_logps, pair.rejected_logps):
            assert logps.grad is None or torch.isfinite(logps.grad).all()


DECREASING_IN_CHOSEN = ["sigmoid", "sigmoid_norm", "hinge", "robust", "bco_pair", "apo_zero", "aot", "sft"]


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("name", DECREASING_IN_CHOSEN)
@settings(max_examples=25, deadline=None)
@given(chosen=log_ratio, rejected=log_ratio, gain=st.floats(0, 1e3))
def test_a_likelier_chosen_or_less_likely_rejected_answer_never_costs(name, divergence, chosen, rejected, gain):
    if divergence != "reverse_kl" and not PREFERENCE_LOSSES[name].f_divergences:
        return
    options = OPTIONS | {"label_smoothing": 0.0 if name == "aot" else 0.1}  # smoothed aot has its minimum inside

    def value(c, r):
        pair = pair_of([(c, r)], f_divergence=divergence)
        return preference_loss(pair, [name], None, options)[0].values.item()

    before = value(chosen, rejected)
    rounding = 1e-12 * (1 + abs(before))
    assert value(chosen + gain, rejected) <= before + rounding
    assert value(chosen, rejected - gain) <= before + rounding


@settings(max_examples=50, deadline=None)
@given(chosen=moderate, rejected=moderate, beta=st.floats(0.01, 5))
def test_swapping_the_answers_changes_dpo_by_the_margin(chosen, rejected, beta):
    """-log S(z) + log S(-z) = -z, the antisymmetric part of the logistic loss."""
    there = sigmoid(pair_of([(chosen, rejected)]), beta=beta)
    back = sigmoid(pair_of([(rejected, chosen)]), beta=beta)
    assert (there - back).item() == pytest.approx(-beta * (chosen - rejected), rel=1e-9, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(chosen=moderate, rejected=moderate, beta=st.floats(0.01, 5))
def test_exo_with_an_even_label_does_not_know_which_answer_was_chosen(chosen, rejected, beta):
    there = exo_pair(pair_of([(chosen, rejected)]), beta=beta, label_smoothing=0.5)
    back = exo_pair(pair_of([(rejected, chosen)]), beta=beta, label_smoothing=0.5)
    assert there.item() == pytest.approx(back.item(), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(chosen=moderate, rejected=moderate, shift=moderate)
def test_losses_of_the_margin_ignore_what_both_answers_share(chosen, rejected, shift):
    for loss in (sigmoid, hinge):
        there = loss(pair_of([(chosen, rejected)]), beta=0.3)
        moved = loss(pair_of([(chosen + shift, rejected + shift)]), beta=0.3)
        assert there.item() == pytest.approx(moved.item(), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(chosen=moderate, rejected=moderate, beta=st.floats(0.01, 5))
def test_robust_without_flips_is_dpo(chosen, rejected, beta):
    pair = pair_of([(chosen, rejected)])
    assert robust(pair, beta=beta, label_smoothing=0.0).item() == sigmoid(pair, beta=beta).item()


@settings(max_examples=50, deadline=None)
@given(chosen=moderate, rejected=moderate, beta=st.floats(0.01, 2), flips=st.floats(0.0, 0.45))
def test_robust_is_unbiased_under_flipped_labels(chosen, rejected, beta, flips):
    """The point of the loss: its mean over labels flipped with probability e is DPO's loss of the true label."""
    seen = robust(pair_of([(chosen, rejected)]), beta=beta, label_smoothing=flips).item()
    flipped = robust(pair_of([(rejected, chosen)]), beta=beta, label_smoothing=flips).item()
    true = sigmoid(pair_of([(chosen, rejected)]), beta=beta).item()
    assert (1 - flips) * seen + flips * flipped == pytest.approx(true, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("e", [0.001, 0.1, 0.5])
def test_limits_of_exo(e):
    """0 where the policy's preference equals the smoothed label, -ln(1 - e) when sure and right, -ln e when sure and wrong."""
    agreed = math.log((1 - e) / e)
    values = exo_pair(pair_of([(agreed, 0.0), (1e4, 0.0), (-1e4, 0.0)]), beta=1.0, label_smoothing=e)
    assert values.tolist() == pytest.approx([0.0, -math.log(1 - e), -math.log(e)], abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(log_ratio=moderate, e=st.floats(0.001, 0.999))
def test_exo_is_a_divergence(log_ratio, e):
    assert exo_pair(pair_of([(log_ratio, 0.0)]), beta=1.0, label_smoothing=e).item() >= -1e-12


@settings(max_examples=50, deadline=None)
@given(log_ratios=st.lists(st.tuples(moderate, moderate), min_size=1, max_size=6, unique_by=lambda p: p[0] - p[1]))
def test_aot_of_one_pair_is_smoothed_dpo_and_order_does_not_matter(log_ratios):
    options = {"beta": 0.5, "label_smoothing": 0.0}
    alone = pair_of(log_ratios[:1])
    assert aot(alone, **options).item() == pytest.approx(sigmoid(alone, beta=0.5).item(), abs=1e-12)
    assert aot_unpaired(alone, **options).item() == pytest.approx(sigmoid(alone, beta=0.5).item(), abs=1e-12)
    pair, turned = pair_of(log_ratios), pair_of(log_ratios[::-1])
    assert aot(turned, **options).tolist() == pytest.approx(aot(pair, **options).tolist()[::-1], abs=1e-12)


def test_sigmoid_norm_of_one_token_answers_is_dpo():
    pair = replace(pair_of([(1.0, -2.0), (0.5, 3.0)]), chosen_lengths=torch.ones(2), rejected_lengths=torch.ones(2))
    assert torch.equal(sigmoid_norm(pair, beta=0.3), sigmoid(pair, beta=0.3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["sigmoid", "dpo"]}, r"\['dpo'\] is unknown"),
        ({"names": []}, "empty"),
        ({"weights": [1.0, 2.0]}, "2 numbers for the 1 losses"),
        ({"f_divergence": "kl"}, "'kl' is unknown"),
        ({"names": ["apo_zero"], "f_divergence": "js_divergence"}, "apo_zero is defined with reverse_kl only"),
        ({"names": ["aot"], "weighted": True}, "no pair to weigh"),
        ({"names": ["exo_pair"], "label_smoothing": 0.0}, "exo_pair takes a label_smoothing above 0"),
        ({"names": ["robust"], "label_smoothing": 0.5}, "robust takes a label_smoothing at least 0 and below 0.5"),
        ({"names": ["aot"], "label_smoothing": 0.6}, "aot takes a label_smoothing from 0 to 0.5"),
        ({"names": ["discopop"], "discopop_tau": 0.0}, "discopop_tau above 0"),
    ],
)
def test_a_choice_without_meaning_is_refused_with_its_reason(changes, message):
    choice = {"names": ["sigmoid"], "weights": None, "f_divergence": "reverse_kl", "weighted": False} | changes
    options = OPTIONS | {name: choice.pop(name) for name in list(choice) if name in OPTIONS}
    with pytest.raises(ValueError, match=message):
        check_preference_losses(choice.pop("names"), choice.pop("weights"), options, **choice)


@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_every_loss_passes_the_check_with_sound_options(name, divergence):
    check_preference_losses([name], [0.5], OPTIONS, f_divergence=divergence, weighted=False)


def test_sft_needs_the_chosen_nll():
    with pytest.raises(ValueError, match="chosen_nll"):
        preference_loss(replace(pair_of([(0.0, 0.0)]), chosen_nll=None), ["sft"], None, OPTIONS)


def test_weights_of_pairs_multiply_every_term():
    weights = torch.tensor([2.0, 0.0, 0.5], dtype=torch.float64)
    pair = pair_of([(1.0, 0.0), (2.0, 1.0), (-1.0, 1.0)])
    for name in PREFERENCE_LOSSES:
        (plain,) = preference_loss(pair, [name], [3.0], OPTIONS)
        (weighted,) = preference_loss(replace(pair, weights=weights), [name], [3.0], OPTIONS)
        torch.testing.assert_close(weighted.values, plain.values * weights)
        assert weighted.weight == 3.0
