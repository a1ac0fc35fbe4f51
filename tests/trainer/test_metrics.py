"""MetricStore: means over all values, extrema over all values, whatever the micro-batches, and exact after a resume."""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.core.batch import StepTotals
from posttrain.core.results import LossOutput, LossTerm
from posttrain.losses.extrema import highest, lowest
from posttrain.trainer.step.metrics import EvaluationLoss, MetricStore

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def added(store: MetricStore, *batches: tuple[float, ...]) -> MetricStore:
    for values in batches:
        measured = numbers(*values)
        store.add("train", {"mean": measured, "min": lowest(measured), "max": highest(measured)})
    return store


def test_a_mean_is_of_all_values_and_an_extremum_is_one_of_them():
    store = added(MetricStore(), (1.0, 5.0), (-2.0,), (4.0, NAN))
    assert store.flush("train", CPU) == {"mean": 2.0, "min": -2.0, "max": 5.0}
    assert store.flush("train", CPU) == {}


def test_where_nothing_was_measured_nothing_is_said():
    store = added(MetricStore(), (), (NAN,))
    assert store.flush("train", CPU) == {}
    assert added(store, (), (3.0,)).flush("train", CPU) == {"mean": 3.0, "min": 3.0, "max": 3.0}


def test_an_infinite_value_is_not_hidden():
    found = added(MetricStore(), (INF, 1.0)).flush("train", CPU)
    assert (found["min"], found["max"]) == (1.0, INF)


@pytest.mark.parametrize("before", [((0.1, 7.0),), ((),), ()])
def test_what_was_not_logged_yet_survives_a_checkpoint(before):
    store = added(MetricStore(), *before)
    store.count("num_tokens", 12)
    again = MetricStore()
    again.load_state(json.loads(json.dumps(store.state())))
    assert again.totals == {"num_tokens": 12}
    expected = added(store, (3.0, 0.2)).flush("train", CPU)
    assert added(again, (3.0, 0.2)).flush("train", CPU) == expected


def test_evaluation_is_apart():
    store = added(MetricStore(), (1.0,))
    store.add("eval", {"max": highest(numbers(9.0))})
    assert store.flush("eval", CPU) == {"max": 9.0}
    assert store.flush("train", CPU)["max"] == 1.0


def test_the_loss_of_an_evaluation_is_that_of_all_rows_as_one_batch():
    """3 tokens of loss 1 in one batch, 1 token of loss 5 in another: (3 + 5) / 4, not (1 + 5) / 2; and a pair's term of its own."""
    evaluation = EvaluationLoss()
    assert evaluation.value() is None
    for tokens, pairs in (((1.0, 1.0, 1.0), (2.0,)), ((5.0,), (4.0, 6.0))):
        terms = [LossTerm(numbers(*tokens), "token"), LossTerm(numbers(*pairs), "unit", 0.5)]
        totals = StepTotals({"token": float(len(tokens)), "unit": float(len(pairs))})
        evaluation.add(LossOutput(terms), totals)
    assert evaluation.value() == 8 / 4 + 0.5 * 12 / 3
