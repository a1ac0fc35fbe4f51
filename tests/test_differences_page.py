"""docs/differences-from-trl.md tells every difference that the comparison with TRL declares, and no other key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.parity.cases import CASES
from benchmarks.parity.differences import DIFFERENCES, WITNESSED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "differences-from-trl.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
KEYS = {match[1] for line in ROWS if (match := re.match(r"\| `([a-z]+(?:-[a-z]+)+)` \|", line))}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_each_declared_difference_has_a_row_on_the_page(key):
    assert key in KEYS, f"{PAGE.name} has no row for `{key}`: {DIFFERENCES[key]}"


def test_the_page_has_no_key_that_is_not_declared():
    assert set(DIFFERENCES) >= KEYS


def test_each_declared_difference_is_shown_by_a_case():
    used = {key for case in CASES for key in case.differs.values()} | {"step-means"}
    assert used == set(DIFFERENCES)


def test_witnesses_exist_and_are_themselves_cases():
    names = {case.name for case in CASES}
    named = {case.witness for case in CASES if any(key in WITNESSED for key in case.differs.values())} - {None}
    assert named, "no declared difference is proven by a witness"
    assert named <= names
