"""Starts the processes of a comparison in the order A-B-A-C and gathers what they wrote."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.measure import GAVE_UP, OUT_OF_TIME
from benchmarks.speed.rows import row_named
from benchmarks.speed.settings import LIBRARY

GIVEN_UP_AFTER = 8.0  # of our steps
SHORTEST_RUN = 20.0  # seconds: with less left, no further process is started
SETTING_ORDER = ("ours", "default", "tuned", "packed", "matched")
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
    once: bool = False
    limit_seconds: float = 3600.0
    tokenizer: str = ""
    data_rows: int = 4000
    ways: list[str] | None = None  # of the rows of rollouts; None: all
    data_procs: list[int] = field(default_factory=lambda: [1])
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.limit_seconds - (time.monotonic() - self.began)


def run_training(order: Order) -> list[dict[str, Any]]:
    """posttrain over all rows, TRL tuned, posttrain again and matched to TRL tuned; TRL as it comes at last.

    TRL as it comes is the slowest and the one that counts least: where the time is limited, it is what may be cut off. It has a
    process of its own because Liger patches the classes of transformers.
    """
    ours = [one for one in order.settings if one == "ours"]
    theirs = [one for one in order.settings if LIBRARY[one] == "trl" and one != "default"]
    results = run_process(order, "A1", "posttrain", plan_items(order, ours))
    results += fastest_candidates(run_process(order, "B", "trl", plan_items(order, theirs)))
    if theirs:
        again = [] if order.once else plan_items(order, ours)
        results += run_process(order, "A2", "posttrain", [*again, *matched_items(order, results)])
    if "default" in order.settings:
        if order.device == "cpu" and not order.tiny:
            results += bounded_default(order, results)
        else:
            results += run_process(order, "C", "trl", plan_items(order, ["default"]))
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
    """What a process runs, setting by setting. Candidates for TRL tuned are items of their own where a step takes seconds."""
    items = []
    for setting in (one for one in SETTING_ORDER if one in settings):
        for row in map(row_named, order.rows):
            item = {"row": row.name, "setting": setting}
            if order.device == "cuda" and not order.tiny and setting in row.seconds:
                item["seconds"] = row.seconds[setting]
            is_apart = setting == "tuned" and row.is_online
            items += [{**item, "candidate": place} for place in range(len(row.tuned))] if is_apart else [item]
    return items


def fastest_candidates(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each row and setting: the fastest, with what became of the others in its `tried`."""
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for one in results:
        key = (one["row"], one["setting"])
        other = kept.get(key)
        if other is None:
            kept[key] = one
            continue
        best, worse = (one, other) if one.get("rate", 0.0) > other.get("rate", 0.0) else (other, one)
        told = {name: worse[name] for name in ("options", "candidate", "error", "rate", "peak_bytes") if name in worse}
        kept[key] = {**best, "tried": [*best.get("tried", []), *worse.get("tried", []), told]}
    return list(kept.values())


def matched_items(order: Order, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Not of rows in which the model writes: their memory is that of the engines, too."""
    if "matched" not in order.settings:
        return []
    tuned = [one for one in results if one["setting"] == "tuned" and "error" not in one]
    items = {item["row"]: item for item in plan_items(order, ["matched"]) if not row_named(item["row"]).writes}
    return [{**items[one["row"]], "tuned_options": one["options"]} for one in tuned if one["row"] in items]


def run_process(
    order: Order, process: str, library: str, items: list[dict[str, Any]], step_limits: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """What one process wrote; an item it did not get to is reported as such.

    An item that takes longer than it may ends the process, and so may one that crashes; another one goes on with the next item.
    """
    found: list[dict[str, Any]] = []
    name = process
    while len(found) < len(items):
        left = items[len(found) :]
        code, end, written = run_items(order, name, library, left, step_limits)
        found += written
        if len(written) == len(left):
            break
        is_over = code is None or not (code == OUT_OF_TIME or code < 0) or order.seconds_left < SHORTEST_RUN
        failed = left[len(written) :] if is_over else left[len(written) : len(written) + 1]
        found += [{**item, "process": name, "error": f"not run: {end}", "tried": []} for item in failed]
        name = f"{process}-{len(found)}"
    return found


def run_items(
    order: Order, process: str, library: str, items: list[dict[str, Any]], step_limits: dict[str, float] | None
) -> tuple[int | None, str, list[dict[str, Any]]]:
    """(exit code, how the process ended, what it wrote)."""
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
    code, end = run_module(order, process, library, "benchmarks.speed.train_side", [str(plan), str(results)])
    found = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    return code, end, found


def run_module(
    order: Order, process: str, library: str, module: str, arguments: list[str], limit: float | None = None
) -> tuple[int | None, str]:
    """(exit code, how the process ended); no code where it was stopped. Its output goes to a file beside the results."""
    python = order.trl_python if library == "trl" else sys.executable
    limit = min(order.seconds_left, limit or math.inf)
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
            return None, f"stopped after {limit:.0f} s"
    print(f"{process}: {time.monotonic() - start:.0f} s, exit code {code}", flush=True)
    return code, "took longer than it may" if code == OUT_OF_TIME else f"the process ended with code {code}"


def environment(order: Order, library: str) -> dict[str, str]:
    variables = dict(os.environ)
    paths = [order.trl_path] if library == "trl" and order.trl_path else []
    paths += [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables["PYTHONPATH"] = os.pathsep.join([*paths, str(TREE)])
    if order.threads:
        variables["OMP_NUM_THREADS"] = str(order.threads)
    return variables
