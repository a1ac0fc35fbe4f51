"""LossOutput: the one division. The gradient of a step does not depend on how its rows were cut up."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.batch import StepTotals
from posttrain.core.results import LossOutput, LossTerm


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


TOTALS = StepTotals({"token": 10, "sequence": 4, "unit": 2, "batch": 5, "token:chosen": 3})


@pytest.mark.parametrize(("per", "expected"), [("token", 0.6), ("sequence", 1.5), ("unit", 3), ("batch", 1.2)])
def test_values_are_summed_and_divided_by_the_step(per, expected):
    """1 + 2 + 3 = 6, over 10 tokens, 4 sequences, 2 units or 5 micro-batches of the step."""
    assert LossOutput(numbers(1, 2, 3), per).reduce(TOTALS).item() == pytest.approx(expected, abs=1e-12)


def test_terms_have_their_own_weights_and_denominators():
    """0.5 * 6 / 2 + 2 * 9 / 3 = 1.5 + 6 = 7.5."""
    output = LossOutput([LossTerm(numbers(1, 2, 3), "unit", 0.5), LossTerm(numbers(4, 5), "token:chosen", 2.0)])
    assert output.reduce(TOTALS).item() == 7.5


def test_processes_multiply_because_gradients_are_averaged():
    """Two processes hold 1 + 2 and 6 of 3 units: (2 * 3/3 + 2 * 6/3) / 2 = 3 = 9 / 3."""
    totals = StepTotals({"unit": 3})
    parts = [LossOutput(values).reduce(totals, world_size=2).item() for values in (numbers(1, 2), numbers(6))]
    assert sum(parts) / 2 == 3


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    world_size=st.integers(1, 3),
)
def test_any_split_over_micro_batches_and_processes_gives_the_same_gradient(data, cuts, world_size):
    parameter = numbers(0.7).requires_grad_()
    values = numbers(*data)
    totals = StepTotals({"unit": len(data)})
    (expected,) = torch.autograd.grad((parameter * values).pow(2).mean(), parameter)

    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    micro_batches = [values[start:stop] for start, stop in pairwise(edges)]
    by_process = torch.zeros(world_size, dtype=torch.float64)
    for i, part in enumerate(micro_batches):  # empty ones included, dealt out unevenly
        loss = LossOutput((parameter * part).pow(2)).reduce(totals, world_size)
        by_process[i % world_size] += torch.autograd.grad(loss, parameter)[0].item()
    assert by_process.mean().item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)


def test_a_step_without_a_trained_token_has_loss_zero():
    empty = torch.zeros(0, requires_grad=True)
    loss = LossOutput(empty, "token").reduce(StepTotals({"token": 0}))
    loss.backward()
    assert loss.item() == 0
    assert empty.grad.shape == (0,)


def test_totals_may_live_on_the_device():
    totals = StepTotals({"unit": torch.tensor(4.0, dtype=torch.float64)})
    assert LossOutput(numbers(2, 6)).reduce(totals).item() == 2


def test_a_loss_is_per_unit_and_without_metrics_unless_it_says_so():
    output = LossOutput(numbers(1))
    assert [(term.per, term.weight) for term in output.terms] == [("unit", 1.0)]
    assert output.metrics == {}
