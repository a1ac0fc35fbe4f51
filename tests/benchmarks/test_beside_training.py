"""What the benchmarks of rollouts beside training compute from what they have measured."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.given_options import options_of
from benchmarks.real_runs import async_sums
from benchmarks.speed.sleeping_table import EPISODES, table
from benchmarks.speed.sleeping_tools import LOADS, workload
from benchmarks.speed.watches import union


def test_time_in_several_intervals_counts_once():
    assert union([(5, 12), (0, 10), (20, 30), (22, 25)]) == 22
    assert union([]) == 0


def test_values_of_options_are_json_or_text():
    found = options_of(["a=1", "b=True", "c=in_order", "d=[1, 2]"])
    assert found == {"a": 1, "b": True, "c": "in_order", "d": [1, 2]}


def test_a_setting_stands_beside_the_synchronous_run_of_its_load():
    of_load = workload(LOADS["tools"], argparse.Namespace(tiny=False, shape="0.5b"))
    numbers = dict.fromkeys(
        ("seconds_a_step", "episodes_a_second_at_end", "tokens_a_second", "waits", "token_age_max", "masked_share"), 1.0
    )
    numbers |= {"cut_share": 0.0, "peak_gib": 1.0, "utilisation": 0.5}
    rates = {"sync": 10.0, "window 2+2": 45.0, "awake": 90.0}
    lines = [{"setting": name, **of_load, **numbers, EPISODES: rate} for name, rate in rates.items()]
    lines.append({"setting": "window 2+2", **of_load, "any_kernel": 0.97})
    (shown,) = (line for line in table(lines).splitlines() if line.startswith("window 2+2"))
    assert {"4.50x", "97%", "50%"} <= {*shown.split()}


@pytest.mark.parametrize(("final", "apart"), [(0.5, "+0.0 se"), (0.4, "-5.0 se")])
def test_rewards_are_compared_in_standard_errors_of_both(final, apart):
    runs = {"sync": 0.5, "lead 4": final}
    lines = [
        {"setting": name, "seed": 0, "steps": 40, "samples": 64, "age": 0.0, "seconds": 1.0, "after": (reward, error)}
        for (name, reward), error in zip(runs.items(), (0.012, 0.016))
    ]
    assert apart in async_sums.table(lines)
