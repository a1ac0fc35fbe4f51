"""Entropy bonus, its controller, and the mask of undecided tokens."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.results import LossOutput
from posttrain.losses.entropy import EntropyController, entropy_bonus, entropy_threshold, top_entropy_mask
from tests.losses.policy_oracle import token_batch


def test_the_bonus_is_the_mean_over_tokens_whatever_the_completions():
    """-0.1 * (1 + 2 + 6) / 3 = -0.3; the gradient is -0.1 / 3 for each token."""
    entropies = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64, requires_grad=True)
    loss = LossOutput([entropy_bonus(entropies, 0.1)]).local(token_batch([2, 1]))
    (gradient,) = torch.autograd.grad(loss, entropies)
    assert loss.item() == pytest.approx(-0.3)
    assert gradient.tolist() == pytest.approx([-0.1 / 3] * 3)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_the_threshold_is_the_quantile(values, share):
    entropies = torch.tensor([*values, float("nan")], dtype=torch.float64)
    expected = torch.quantile(torch.tensor(values, dtype=torch.float64), 1 - share)
    assert entropy_threshold(entropies, share).item() == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize(
    ("share", "kept"), [(1.0, [1, 1, 1, 1, 1]), (0.5, [0, 1, 0, 1, 1]), (0.25, [0, 0, 0, 1, 1]), (0.0, [0, 0, 0, 1, 0])]
)
def test_the_mask_keeps_the_most_undecided_tokens(share, kept):
    """Sorted 0, 1, 2, 3, 4; half: the quantile 0.5 is 2; a quarter: the quantile 0.75 is 3; none but the largest: 4."""
    entropies = torch.tensor([0.0, 2.0, 1.0, 4.0, 3.0])
    assert top_entropy_mask(entropies, entropy_threshold(entropies, share)).int().tolist() == kept


def test_rounding_does_not_decide_between_ties():
    """The first tokens of a group have one entropy; a token that is truly less undecided stays out."""
    entropies = torch.tensor([1.0, 5.4341283, 5.4341288, 5.4341278, 5.43, 6.0])
    assert top_entropy_mask(entropies, entropy_threshold(entropies, 0.5)).int().tolist() == [0, 1, 1, 1, 0, 1]


def test_the_mask_of_no_tokens_and_of_a_share_above_one():
    nothing = torch.zeros(0)
    assert len(top_entropy_mask(nothing, entropy_threshold(nothing, 0.2))) == 0
    with pytest.raises(ValueError, match="from 0 to 1"):
        entropy_threshold(nothing, 1.5)


def controller(**fields):
    return EntropyController(**{"coefficient": 0.01, "target": 0.2, "delta": 0.005, "maximum": 0.02, **fields})


def test_the_controller_by_hand():
    """Entropies 0.1, 0.2, 0.1, 0.5 and the target 0.2: up, up (the target itself), held at the maximum, down."""
    made = controller()
    assert made.in_force == 0
    seen = []
    for entropy in (0.1, 0.2, 0.1, 0.5):
        made.observe(entropy)
        seen.append((made.coefficient, made.in_force))
    assert [c for c, _ in seen] == pytest.approx([0.015, 0.02, 0.02, 0.015])
    assert [f for _, f in seen] == pytest.approx([0.015, 0.02, 0.02, 0])


def test_the_controller_stops_at_its_minimum():
    made = controller(coefficient=0.004, minimum=0.001)
    made.observe(0.9)
    assert made.coefficient == 0.001


def test_a_resumed_controller_goes_on_as_if_nothing_had_happened():
    first, second = controller(), controller()
    first.observe(0.1)
    second.load(json.loads(json.dumps(first.state())))
    for made in (first, second):
        made.observe(0.15)
    assert first == second


def test_a_start_outside_of_the_bounds_is_refused():
    with pytest.raises(ValueError, match="lies outside"):
        controller(coefficient=0.5)
    with pytest.raises(ValueError, match="negative"):
        controller(delta=-0.1)
