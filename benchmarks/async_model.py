"""The forecast of rollouts beside training against real runs: eight settings of sleeping_tools on the CPU.

    python -m benchmarks.async_model [--seconds 30] [--sleep 1] [--settings ...]

A run without sleeps says what a turn and the engine take; sleeps are a function of (prompt, sample, turn), so the model knows what
each group takes. What an update takes is not the same alone and beside an engine that shares its cores: it is measured once
synchronously and once in the first other setting. Compared are episodes a second over the same windows. Goal: within 15 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.speed.sleeping_tools import SETTINGS, WARM_UP, Load
from posttrain import GRPOConfig
from posttrain.rollout.feed.forecast import Forecast, Parts, forecast

PROMPTS, GROUP, MOST_TURNS = 8, 4, 6
GOAL = 0.15
ORDERED = [name for name in SETTINGS if name not in ("sync", "window 2+2")]


def measured(setting: str, load: Load, seconds: float) -> dict[str, Any]:
    words = ["--tiny", "--seconds", seconds, "--turn", load.turn, "--sleep", load.sleep, "--sigma", load.sigma]
    command = [
        sys.executable,
        "-m",
        "benchmarks.speed.sleeping_tools",
        *map(str, words),
        "--limit",
        load.limit,
        "--one",
        setting,
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def parts_of(load: Load, quick: dict[str, Any]) -> Parts:
    """From a synchronous run that does not sleep: its longest episodes have six turns, and all groups are written at once."""
    writes = quick["seconds_a_step"] * quick["waits"]
    turn = writes / MOST_TURNS

    def episode(number: int, sample: int) -> float:
        turns = load.turns(number, sample)
        naps, spent = (load.nap(number, sample, after) for after in range(1, turns)), turn
        for nap in naps:
            spent += nap + (turn if spent + nap <= load.limit else 0.0)
            if spent > load.limit:
                break
        return spent

    group = cache(lambda number: max(episode(number, sample) for sample in range(GROUP)))
    return Parts(group, quick["seconds_a_step"] - writes, writes / PROMPTS)


def predicted(setting: str, parts: Parts, windows: int) -> Forecast:
    """The sync run is the one without a lead."""
    options = {"async_rollouts": True, "async_lead": 0} if setting == "sync" else SETTINGS[setting]
    config = GRPOConfig(
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, use_cpu=True, report_to="none", **options
    )
    return forecast(config.pace(), config.lead(), parts, windows, WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["sync", "window 2+2", *ORDERED], choices=SETTINGS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each setting, after warm-up")
    parser.add_argument("--turn", type=int, default=2)
    parser.add_argument("--sleep", type=float, default=1.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of an episode")
    args = parser.parse_args()
    load = Load(args.turn, args.sleep, args.sigma, args.limit)
    quick = measured("sync", replace(load, sleep=1e-4), 5.0)
    parts = parts_of(load, quick)
    print(f"without sleeps: {quick['seconds_a_step']:.3f} s a step, of which {parts.update:.3f} s of training")
    print(f"{'setting':<20} {'steps':>5} {'model':>8} {'measured':>9}  {'off by':>7}   waits (model, measured)")
    worst, beside = 0.0, None
    for setting in args.settings:
        found = measured(setting, load, args.seconds)
        if setting != "sync":
            beside = beside or replace(parts, update=found["seconds_a_step"] * (1 - found["waits"]))
            parts = beside
        model = predicted(setting, parts, found["steps"])
        wanted, got = PROMPTS * GROUP / model.seconds, found["episodes_a_second"]
        off = wanted / got - 1
        worst = max(worst, abs(off))
        print(
            f"{setting:<20} {found['steps']:>5} {wanted:>6.1f}/s {got:>7.1f}/s  {off:>+7.1%}   "
            f"{model.waits:.0%} {found['waits']:.0%}",
            flush=True,
        )
    print(f"at most {worst:.1%} off: {'within' if worst <= GOAL else 'NOT within'} {GOAL:.0%}")


if __name__ == "__main__":
    main()
