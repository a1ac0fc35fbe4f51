"""A small row of the speed benchmark against TRL, at 60 % of its goal: a guard against slow creep, not a measurement.

TRL lives in an environment of its own (`.venv-trl`, as `make parity` makes it, or the Python named by SPEED_TRL_PYTHON). Where
there is none it is made, if a package index answers; otherwise the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.report import losses_agree
from benchmarks.speed.rows import GUARD
from benchmarks.speed.runner import Order, run_training

TREE = Path(__file__).resolve().parents[2]
SHARE_OF_GOAL = 0.6


def trl_python() -> str:
    """The Python of an environment with TRL 1.16.0 that borrows everything else from this one."""
    if given := os.environ.get("SPEED_TRL_PYTHON"):
        return given
    script = TREE / "benchmarks" / "trl_environment.sh"
    made = subprocess.run([script, sys.executable], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"TRL 1.16.0 is not installed and could not be: {made.stderr.strip().splitlines()[-1]}")
    return str(TREE / made.stdout.strip())


def fastest_step(results: list[dict[str, Any]], setting: str) -> float:
    """Tokens a second of the best step of all runs: what another program on the machine takes is not ours to judge."""
    runs = [one for one in results if one["setting"] == setting and "error" not in one]
    assert runs, [one.get("error") for one in results if one["setting"] == setting]
    return max(tokens / taken for one in runs for tokens, taken in zip(one["step_tokens"], one["step_seconds"]))


@pytest.mark.slow
def test_sft_on_the_cpu_is_faster_than_trl(tmp_path: Path) -> None:
    order = Order(
        [GUARD.name],
        ["ours", "default", "tuned"],
        "cpu",
        tmp_path,
        trl_python=trl_python(),
        threads=1,
        limit_seconds=600,
    )
    results = run_training(order)
    ours = fastest_step(results, "ours")
    default, tuned = (next(one for one in results if one["setting"] == name) for name in ("default", "tuned"))
    agree, told = losses_agree(next(one for one in results if one["setting"] == "ours"), tuned)
    assert agree, told
    assert ours / fastest_step(results, "tuned") >= SHARE_OF_GOAL * GUARD.goal[1]
    ratio = default["at_least"] if "at_least" in default else ours / fastest_step(results, "default")
    assert ratio >= SHARE_OF_GOAL * GUARD.goal[0]
