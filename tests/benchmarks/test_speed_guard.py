"""Small rows of the speed benchmark against TRL, at 60 % of their goals: a guard against slow creep, not a measurement.

TRL lives in an environment of its own (`.venv-trl`, as `make parity` makes it, or the Python named by SPEED_TRL_PYTHON). Where
there is none it is made, if a package index answers; otherwise the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.report import agreement
from benchmarks.speed.rows import GUARDS, Row
from benchmarks.speed.runner import Order, run_training

TREE = Path(__file__).resolve().parents[2]
SHARE_OF_GOAL = 0.6

pytestmark = pytest.mark.trust


def trl_python() -> str:
    """The Python of an environment with TRL 1.16.0 that borrows everything else from this one."""
    if given := os.environ.get("SPEED_TRL_PYTHON"):
        return given
    script = TREE / "benchmarks" / "trl_environment.sh"
    made = subprocess.run([script, sys.executable], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"TRL 1.16.0 is not installed and could not be: {made.stderr.strip().splitlines()[-1]}")
    return str(TREE / made.stdout.strip())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of all rows: the processes import their libraries once."""
    order = Order(
        [row.name for row in GUARDS],
        ["ours", "default", "tuned"],
        "cpu",
        tmp_path_factory.mktemp("speed"),
        trl_python=trl_python(),
        threads=1,
        once=True,
        limit_seconds=600,
    )
    return run_training(order)


def of(results: list[dict[str, Any]], row: Row, setting: str) -> dict[str, Any]:
    return next(one for one in results if (one["row"], one["setting"]) == (row.name, setting))


def fastest_step(one: dict[str, Any]) -> float:
    """Tokens of a second of processor time, in the best step: what other programs of the machine take is not ours to judge."""
    assert "error" not in one, one["error"]
    return max(tokens / taken for tokens, taken in zip(one["step_tokens"], one["processor_seconds"]))


@pytest.mark.parametrize("row", GUARDS, ids=lambda row: row.name)
def test_both_libraries_do_the_same_work(results: list[dict[str, Any]], row: Row) -> None:
    agree, told = agreement(of(results, row, "ours"), of(results, row, "tuned"))
    assert agree, told


@pytest.mark.parametrize("row", GUARDS, ids=lambda row: row.name)
def test_a_step_on_the_cpu_is_faster_than_that_of_trl_tuned(results: list[dict[str, Any]], row: Row) -> None:
    ours, tuned = (fastest_step(of(results, row, setting)) for setting in ("ours", "tuned"))
    assert ours / tuned >= SHARE_OF_GOAL * row.goal[1]


@pytest.mark.parametrize("row", GUARDS, ids=lambda row: row.name)
def test_a_step_on_the_cpu_is_faster_than_that_of_trl_as_it_comes(results: list[dict[str, Any]], row: Row) -> None:
    default = of(results, row, "default")
    ratio = default.get("at_least") or fastest_step(of(results, row, "ours")) / fastest_step(default)
    assert ratio >= SHARE_OF_GOAL * row.goal[0]
