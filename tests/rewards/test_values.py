"""Every row of the table in posttrain/rewards/runtime/values.py."""

from __future__ import annotations

import itertools
from collections import deque
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from posttrain.rewards.runtime.invoke import Wants, invoke
from posttrain.rewards.runtime.values import InvalidAnswer, InvalidValue, entries_of, number_of

ACCEPTED_ANSWERS = [
    [1.0, 0.5],
    (1.0, 0.5),
    deque([1.0, 0.5]),
    np.array([1.0, 0.5]),
    np.array([1.0, 0.5], dtype=np.float16),
    torch.tensor([1.0, 0.5]),
    torch.tensor([1.0, 0.5], requires_grad=True),
    torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
    (x for x in (1.0, 0.5)),
    map(float, ("1", "0.5")),
    {"a": 1.0, "b": 0.5}.values(),
]


@pytest.mark.parametrize("returned", ACCEPTED_ANSWERS, ids=lambda value: type(value).__name__)
def test_accepted_answer(returned):
    assert [number_of(entry) for entry in entries_of(returned, 2)] == [1.0, 0.5]


def test_range_is_a_sequence():
    assert entries_of(range(2), 2) == [0, 1]


REFUSED_ANSWERS = [
    (None, "returned None for 2 samples: is a `return` missing"),
    ("12", "returned a str"),
    (b"12", "returned a bytes"),
    ({"a": 1, "b": 2}, "returned a dict"),
    ({1.0, 2.0}, "returned a set"),
    (1.0, r"one float, not a list of 2 numbers. Write \[value\]"),
    (True, "one bool"),
    (np.float64(1.0), "one float64"),
    (torch.tensor(1.0), "one Tensor"),
    (np.zeros((2, 1)), r"shape \(2, 1\) for 2 samples"),
    (torch.zeros(2, 3), r"shape \(2, 3\)"),
    ([1.0], "returned 1 values for 2 samples"),
    ([1.0, 2.0, 3.0], "returned 3 values for 2 samples"),
    (np.zeros(3), "returned 3 values for 2 samples"),
    (iter([1.0]), "returned 1 values for 2 samples"),
    (itertools.count(), "more than the 2 values"),
    (object(), "one object"),
]


@pytest.mark.parametrize(("returned", "sentence"), REFUSED_ANSWERS, ids=lambda value: str(value)[:20])
def test_refused_answer(returned, sentence):
    with pytest.raises(InvalidAnswer, match=sentence):
        entries_of(returned, 2)


def test_a_number_is_no_list_even_for_one_sample():
    with pytest.raises(InvalidAnswer, match="one float"):
        entries_of(0.5, 1)


NUMBERS = [
    (0.25, 0.25),
    (3, 3.0),
    (True, 1.0),
    (False, 0.0),
    (Fraction(1, 4), 0.25),
    (Decimal("0.25"), 0.25),
    (np.float32(0.25), 0.25),
    (np.int64(3), 3.0),
    (np.bool_(True), 1.0),
    (np.array(0.25), 0.25),
    (np.array([0.25]), 0.25),
    (torch.tensor(0.25), 0.25),
    (torch.tensor([0.25]), 0.25),
    (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
    (None, None),
]


@pytest.mark.parametrize(("entry", "number"), NUMBERS, ids=repr)
def test_number(entry, number):
    found = number_of(entry)
    assert found == number
    assert found is None or type(found) is float


REFUSED_ENTRIES = [
    (float("nan"), "returned nan"),
    (float("inf"), "returned inf"),
    (float("-inf"), "returned -inf"),
    (np.float64("nan"), "returned nan"),
    (torch.tensor(float("inf")), "returned inf"),
    (10**400, "too large for a float"),
    ("1.0", "the text '1.0', not a number"),
    (b"1", "the text b'1'"),
    ([1.0], "a list"),
    ({}, "a dict"),
    (1j, "a complex"),
    (np.zeros(2), "a ndarray"),
    (torch.zeros(2), "a Tensor"),
]


@pytest.mark.parametrize(("entry", "sentence"), REFUSED_ENTRIES, ids=lambda value: str(value)[:20])
def test_refused_entry(entry, sentence):
    with pytest.raises(InvalidValue, match=sentence):
        number_of(entry)


async def _later(value):
    return value


async def _endless(completions):
    yield 1.0


def test_awaitable_of_a_plain_function_is_awaited():
    function = lambda completions: _later([1.0, 0.5])  # noqa: E731
    assert invoke(function, Wants(function), {"completions": ["a", "b"]})["values"] == [1.0, 0.5]


def test_async_generator_is_refused():
    answer = invoke(_endless, Wants(_endless), {"completions": ["a"]})
    assert answer["fault"][0] == "invalid"


@pytest.mark.parametrize("leave", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_whatever_is_raised_is_an_answer(leave):
    def function(completions):
        raise leave

    assert invoke(function, Wants(function), {"completions": ["a"]})["fault"][0] == "error"
