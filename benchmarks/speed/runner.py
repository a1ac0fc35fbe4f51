"""Starts the processes of a comparison in the order A-B-A and gathers what they wrote."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.measure import GAVE_UP
from benchmarks.speed.settings import LIBRARY

GIVEN_UP_AFTER = 8.0  # of our steps
SETTING_ORDER = ("ours", "default", "tuned", "packed")
TREE = Path(__file__).resolve().parents[2]


@dataclass
class Order:
    """What was asked for on the command line, and where the two libraries live."""

    rows: list[str]
    settings: list[str]
    device: str
    work: Path
    trl_python: str = sys.executable
    trl_path: str | None = None
    tiny: bool = False
    profile: bool = False
    steps: list[int] | None = None
    layers: int | None = None
    threads: int = 0
    limit_seconds: float = 3600.0
    tokenizer: str = ""
    data_rows: int = 4000
    data_procs: list[int] = field(default_factory=lambda: [1])
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.limit_seconds - (time.monotonic() - self.began)


def run_training(order: Order) -> list[dict[str, Any]]:
    """A: posttrain over all rows. B: TRL as it comes, then tuned. A again, and posttrain matched to TRL tuned."""
    ours = [one for one in order.settings if one == "ours"]
    theirs = [one for one in order.settings if LIBRARY[one] == "trl"]
    results = run_process(order, "A1", "posttrain", plan_items(order, ours))
    if order.device == "cpu" and not order.tiny and "default" in theirs:
        theirs.remove("default")
        results += bounded_default(order, results)
    results += run_process(order, "B", "trl", plan_items(order, theirs))
    if theirs:
        results += run_process(order, "A2", "posttrain", [*plan_items(order, ours), *matched_items(order, results)])
    return results


def bounded_default(order: Order, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL as it comes on a CPU: bfloat16 autocast, which some machines emulate several hundred times slower than float32.

    It is given `GIVEN_UP_AFTER` of our steps for its first one; then the ratio is only known to be larger.
    """
    found = []
    for row in order.rows:
        steps = [one["step_seconds"] for one in results if one["row"] == row and "step_seconds" in one]
        if not steps:
            continue
        ours = statistics.median(steps[0])
        limits = {row: GIVEN_UP_AFTER * ours}
        (one,) = run_process(order, f"B-default-{row}", "trl", [{"row": row, "setting": "default"}], limits)
        if f"code {GAVE_UP}" in one.get("error", ""):
            told = f"stopped: its first step was not done after {limits[row]:.0f} s, ours takes {ours:.1f} s"
            one |= {"error": told, "at_least": GIVEN_UP_AFTER}
        found.append(one)
    return found


def plan_items(order: Order, settings: list[str]) -> list[dict[str, Any]]:
    """Setting by setting: Liger patches the classes of transformers, so TRL as it comes must have run before TRL tuned."""
    first = [one for one in SETTING_ORDER if one in settings]
    return [{"row": row, "setting": setting} for setting in first for row in order.rows]


def matched_items(order: Order, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if "matched" not in order.settings:
        return []
    tuned = [one for one in results if one["setting"] == "tuned" and "error" not in one]
    return [{"row": one["row"], "setting": "matched", "tuned_options": one["options"]} for one in tuned]


def run_process(
    order: Order, process: str, library: str, items: list[dict[str, Any]], step_limits: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """What one process wrote; an item it did not get to is reported as such."""
    if not items:
        return []
    order.work.mkdir(parents=True, exist_ok=True)
    plan, results = order.work / f"{process}.plan.json", order.work / f"{process}.jsonl"
    results.unlink(missing_ok=True)
    written = {
        "items": items,
        "process": process,
        "device": order.device,
        "tiny": order.tiny,
        "profile": str(order.work / f"profile-{process}") if order.profile else None,
        "steps": order.steps,
        "layers": order.layers,
        "step_limits": step_limits or {},
        "threads": order.threads,
        "overrides": order.overrides.get(library, {}),
    }
    plan.write_text(json.dumps(written, indent=1), encoding="utf-8")
    end = run_module(order, process, library, "benchmarks.speed.train_side", [str(plan), str(results)])
    found = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    missing = items[len(found) :]
    return found + [{**item, "process": process, "error": f"not run: {end}", "tried": []} for item in missing]


def run_module(order: Order, process: str, library: str, module: str, arguments: list[str]) -> str:
    """How the process ended. Its output goes to a file beside the results."""
    python = order.trl_python if library == "trl" else sys.executable
    limit = order.seconds_left
    start = time.monotonic()
    print(f"{process}: {library} {module.rsplit('.', 1)[1]} (log: {order.work / process}.log) ...", flush=True)
    with open(order.work / f"{process}.log", "w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [python, "-m", module, *arguments], env=environment(order, library), cwd=TREE, stdout=log, stderr=log
        )
        try:
            code = child.wait(timeout=max(limit, 1.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return f"stopped after {limit:.0f} s"
    print(f"{process}: {time.monotonic() - start:.0f} s, exit code {code}", flush=True)
    return f"the process ended with code {code}"


def environment(order: Order, library: str) -> dict[str, str]:
    variables = dict(os.environ)
    paths = [order.trl_path] if library == "trl" and order.trl_path else []
    paths += [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join([*paths, str(TREE)])
    if order.threads:
        variables["OMP_NUM_THREADS"] = str(order.threads)
    return variables
