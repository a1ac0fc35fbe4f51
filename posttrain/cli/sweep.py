"""`posttrain sweep SWEEP.yaml`: one run after another over a grid or over random draws of any options; the same command goes on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.cli.child_process import run_child
from posttrain.cli.errors import UsageError, nearest
from posttrain.cli.sweep_check import refuse_impossible
from posttrain.cli.sweep_file import Sweep, read_sweep, values_of
from posttrain.core.secrets import private_opener, without_secrets

USAGE = """usage: posttrain sweep SWEEP.yaml [--dry-run]

SWEEP.yaml:
  method: sft
  options: {model_name_or_path: MODEL, dataset_name: FILE.jsonl, eval_strategy: steps, test_split_size: 0.1}
  over:
    learning_rate: [1e-5, 1e-4]                     a grid takes every combination
    weight_decay: {min: 1e-4, max: 0.1, scale: log} only with `trials`: drawn at random (scale: linear or log; int: true)
  trials: 10                                        random draws; without it, the grid
  metric: eval_loss
  goal: minimize                                    or maximize
  take: last                                        or best: of the values that a run has logged
  output_dir: runs/sweep
  seed: 0

The options of all trials are checked before the first is begun. A trial that has ended is not run again; one that was
interrupted goes on from its last checkpoint.
Exit code 0: every trial gave a number; 1: some did not; 2: the sweep cannot be done; 130: Control-C."""
RESULT = "trial.json"
LONGEST_NAME = 60


@dataclass
class Trial:
    number: int
    values: dict[str, Any]
    folder: Path
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return self.result.get("exit_code") == 0


def main(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    unknown = [word for word in words if word.startswith("-") and word != "--dry-run"]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no option of a sweep; options of the runs stand in the file.")
    files = [word for word in words if not word.startswith("-")]
    if len(files) != 1:
        raise UsageError(f"A sweep has one file, and there are {len(files)}: posttrain sweep SWEEP.yaml [--dry-run].")
    sweep = read_sweep(files[0])
    trials = list(trials_of(sweep))
    if sweep.trials is not None and len(trials) < sweep.trials:
        print(f"`over` has few values: {len(trials)} different trials were drawn, not {sweep.trials}.")
    to_run = [(told(trial.values), options_of(sweep, trial)) for trial in trials if not trial.has_ended]
    if to_run:
        refuse_impossible(sweep.method, sweep.metric, to_run, {**os.environ, **sweep.environment})
    if "--dry-run" in words:
        for trial in trials:
            print(f"{trial.folder.name}  {told(trial.values)}")
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    for trial in trials:
        stopped = run_trial(sweep, trial, len(trials))
        if stopped is not None:
            print("Stopped; the same command goes on.", flush=True)
            return stopped
    return report(sweep, trials)


# ---- the trials ---------------------------------------------------------------------------------------------------------------


def trials_of(sweep: Sweep) -> Iterator[Trial]:
    for number, values in enumerate(values_of(sweep)):
        folder = sweep.folder / folder_name(sweep, values)
        yield Trial(number, values, folder, _read_result(folder))


def folder_name(sweep: Sweep, values: dict[str, Any]) -> str:
    """The values, which say what it is, and a hash of all options: other options are another trial, not an old one gone on with.

    No number: a value that is put in front of the others must not make them run again.
    """
    told = json.dumps({**sweep.options, **values}, sort_keys=True)
    key = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
    shown = ",".join(f"{name}={_shown(values[name])}" for name in sorted(values))
    shown = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", shown)
    return f"{shown}-{key}" if len(shown) <= LONGEST_NAME else f"trial-{key}"


def options_of(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    return {**sweep.options, **trial.values, "output_dir": str(trial.folder)}


def _read_result(folder: Path) -> dict[str, Any]:
    file = folder / RESULT
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        print(f"{file} is damaged; the trial goes on from its last checkpoint.", flush=True)
        return {}
    return found


def run_trial(sweep: Sweep, trial: Trial, total: int) -> int | None:
    """Run it, unless it has ended before. An exit code: the sweep was told to stop."""
    import yaml

    label = f"trial {trial.number + 1}/{total}  {told(trial.values)}"
    if trial.has_ended:
        print(f"{label}  done before", flush=True)
        trial.result["metric"] = _metric(sweep, trial)  # another one may have been asked for then
        return None
    print(label, flush=True)
    trial.folder.mkdir(parents=True, exist_ok=True)
    file = trial.folder / "sweep.yaml"
    options = {"method": sweep.method, **options_of(sweep, trial)}
    command = [sys.executable, "-m", "posttrain.cli.main", sweep.method, str(file)]
    with open(trial.folder / "log.txt", "a", encoding="utf-8") as log:
        _write_private(file, yaml.safe_dump(options, sort_keys=False))
        try:
            ended = run_child(command, stdout=log, stderr=log, env={**os.environ, **sweep.environment})
        finally:  # the trial needed its secrets; who reads the file later does not
            _write_private(file, yaml.safe_dump(without_secrets(options), sort_keys=False))
    if ended.signal is not None:
        return ended.code
    metric = _metric(sweep, trial) if ended.code == 0 else None
    trial.result = {"values": trial.values, "exit_code": ended.code, "metric_name": sweep.metric, "metric": metric}
    part = trial.folder / f".{RESULT}"
    part.write_text(json.dumps(trial.result, indent=1) + "\n", encoding="utf-8")
    part.replace(trial.folder / RESULT)  # whole or not at all
    if ended.code != 0:
        print(f"  ended with exit code {ended.code}; see {trial.folder / 'log.txt'}", flush=True)
    return None


def _write_private(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8", opener=private_opener) as out:
        out.write(text)


def _metric(sweep: Sweep, trial: Trial) -> float | None:
    """What the run has logged; None, and why, where there is no number."""
    entries = _logged(trial.folder / "metrics.jsonl")
    values = [entry[sweep.metric] for entry in entries if isinstance(entry.get(sweep.metric), int | float)]
    if not values:
        known = sorted({name for entry in entries for name in entry})
        print(f"  logged no {sweep.metric!r}.{nearest(sweep.metric, known)}", flush=True)
        return None
    finite = [value for value in values if math.isfinite(value)]
    if not finite or (sweep.take == "last" and not math.isfinite(values[-1])):
        print(f"  {sweep.metric} is {values[-1]} at its end", flush=True)
        return None
    return finite[-1] if sweep.take == "last" else (min if sweep.goal == "minimize" else max)(finite)


def _logged(file: Path) -> list[dict[str, Any]]:
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            print(f"  {file}, line {number} is damaged and left out", flush=True)
    return [entry for entry in entries if isinstance(entry, dict)]


def told(values: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- the end ------------------------------------------------------------------------------------------------------------------


def report(sweep: Sweep, trials: list[Trial]) -> int:
    """A table, `sweep.csv` and `sweep.svg`; exit code 1 where a trial gave no number."""
    import csv

    from rich.console import Console
    from rich.table import Table

    done = [trial for trial in trials if trial.result.get("metric") is not None]
    done.sort(key=lambda trial: trial.result["metric"], reverse=sweep.goal == "maximize")
    table = Table(title=f"{sweep.metric}, best first", title_justify="left")
    for name in ("trial", sweep.metric, *sweep.over):
        table.add_column(name, justify="right" if name != "trial" else "left")
    for trial in done:
        table.add_row(trial.folder.name, f"{trial.result['metric']:.5g}", *map(_shown, trial.values.values()))
    Console().print(table)
    with open(sweep.folder / "sweep.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["trial", "exit_code", sweep.metric, *sweep.over])
        rows.writerows(
            [t.folder.name, t.result.get("exit_code"), t.result.get("metric"), *t.values.values()] for t in trials
        )
    if done:
        from posttrain.cli.sweep_plot import plot

        (sweep.folder / "sweep.svg").write_text(plot(sweep.metric, sweep.over, done), encoding="utf-8")
        print(f"Best: {done[0].folder}. Table: {sweep.folder / 'sweep.csv'}, plot: {sweep.folder / 'sweep.svg'}.")
    failed = len(trials) - len(done)
    if failed:
        print(f"{failed} of {len(trials)} trials gave no number.")
    return 1 if failed else 0
