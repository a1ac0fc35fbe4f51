"""`posttrain sweep SWEEP.yaml`: one run after another over a grid or over random draws of any options; the same command goes on."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.cli.arguments import known_name
from posttrain.cli.errors import UsageError, nearest
from posttrain.cli.option_table import method_names, table_of
from posttrain.cli.values import value_of
from posttrain.core.config_file import ConfigFileError, read_config

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

A trial that has ended is not run again; one that was interrupted goes on from its last checkpoint."""
KEYS = ("method", "options", "over", "trials", "metric", "goal", "take", "output_dir", "seed")
GOALS, TAKES, SCALES = ("minimize", "maximize"), ("last", "best"), ("linear", "log")
RESULT = "trial.json"


@dataclass
class Sweep:
    method: str
    options: dict[str, Any]
    over: dict[str, Any]
    metric: str
    goal: str
    take: str
    folder: Path
    trials: int | None = None
    seed: int = 0


@dataclass
class Trial:
    number: int
    values: dict[str, Any]
    folder: Path
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        return "exit_code" in self.result and self.result["exit_code"] == 0


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    unknown = [word for word in words[1:] if word != "--dry-run"]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is no option of a sweep; options of the runs stand in the file.")
    sweep = read_sweep(words[0])
    trials = list(trials_of(sweep))
    if "--dry-run" in words:
        for trial in trials:
            print(f"{trial.folder.name}  {told(trial.values)}")
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    for trial in trials:
        run_trial(sweep, trial, len(trials))
    return report(sweep, trials)


# ---- the file ----------------------------------------------------------------------------------------------------------------


def read_sweep(path: str) -> Sweep:
    try:
        given, _ = read_config(path)
    except ConfigFileError as error:
        raise UsageError(str(error)) from error
    for key in given:
        if key not in KEYS:
            raise UsageError(f"{path} has the key `{key}`, which a sweep does not know.{nearest(key, KEYS)}")
    method = given.get("method")
    if method not in method_names():
        raise UsageError(f"{path}: `method` is {method!r}; it takes one of {', '.join(method_names())}.")
    if not isinstance(given.get("over"), dict) or not given["over"]:
        raise UsageError(f"{path}: `over` is missing; it maps options to lists of values, or to ranges.")
    for name, choices in (("goal", GOALS), ("take", TAKES)):
        if given.get(name, choices[0]) not in choices:
            raise UsageError(f"{path}: `{name}` is {given[name]!r}; it takes one of {', '.join(choices)}.")
    trials = given.get("trials")
    if trials is not None and (type(trials) is not int or trials < 1):
        raise UsageError(f"{path}: `trials` is {trials!r}; it takes a whole number above 0.")
    options = checked(method, given.get("options") or {}, f"{path}, `options`")
    over = {known_name(name): choices for name, choices in given["over"].items()}
    for name, choices in over.items():
        check_choices(method, name, choices, trials, path)
    folder = Path(given.get("output_dir", f"runs/sweep-{method}"))
    return Sweep(
        method, options, over, given.get("metric", "loss"), given.get("goal", GOALS[0]), given.get("take", TAKES[0]), folder,
        trials, given.get("seed", 0),
    )  # fmt: skip


def checked(method: str, options: dict[str, Any], where: str) -> dict[str, Any]:
    table, found = table_of(method), {}
    for key, given in options.items():
        name = known_name(key)
        if name not in table.options:
            raise UsageError(
                f"{where} sets `{key}`, which posttrain {method} does not know.{nearest(name, table.options)}"
            )
        found[name] = value_of(table.options[name], given, where)
    return found


def check_choices(method: str, name: str, choices: Any, trials: int | None, path: str) -> None:
    if isinstance(choices, list) and choices:
        for value in choices:
            checked(method, {name: value}, f"{path}, `over`")
        return
    if not isinstance(choices, dict) or not {"min", "max"} <= set(choices) <= {"min", "max", "scale", "int"}:
        raise UsageError(
            f"{path}: `over.{name}` is {choices!r}; it takes a list of values, or a mapping with min, max and scale."
        )
    low, high = (float(choices[key]) for key in ("min", "max"))
    if not low < high or choices.get("scale", SCALES[0]) not in SCALES or (choices.get("scale") == "log" and low <= 0):
        raise UsageError(
            f"{path}: `over.{name}` is {choices!r}; min must be below max, scale one of {', '.join(SCALES)}, and log needs min "
            "above 0."
        )
    if trials is None:
        raise UsageError(f"{path}: `over.{name}` is a range, which has no end to a grid; set `trials`.")


# ---- the trials ---------------------------------------------------------------------------------------------------------------


def trials_of(sweep: Sweep) -> Iterator[Trial]:
    for number, values in enumerate(_grid(sweep) if sweep.trials is None else _draws(sweep)):
        values = checked(sweep.method, values, "the sweep")
        key = hashlib.blake2b(json.dumps([sweep.options, values], sort_keys=True).encode(), digest_size=4).hexdigest()
        folder = sweep.folder / f"{number:03d}-{key}"  # other options are another trial, not an old one gone on with
        yield Trial(number, values, folder, _read_result(folder))


def _grid(sweep: Sweep) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(*sweep.over.values()):
        yield dict(zip(sweep.over, combination))


def _draws(sweep: Sweep) -> Iterator[dict[str, Any]]:
    drawn = random.Random(sweep.seed)
    for _ in range(sweep.trials):
        yield {name: _draw(drawn, choices) for name, choices in sweep.over.items()}


def _draw(drawn: random.Random, choices: Any) -> Any:
    if isinstance(choices, list):
        return drawn.choice(choices)
    low, high = float(choices["min"]), float(choices["max"])
    is_log = choices.get("scale") == "log"
    value = math.exp(drawn.uniform(math.log(low), math.log(high))) if is_log else drawn.uniform(low, high)
    return round(value) if choices.get("int") else value


def _read_result(folder: Path) -> dict[str, Any]:
    file = folder / RESULT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def run_trial(sweep: Sweep, trial: Trial, total: int) -> None:
    import yaml

    label = f"trial {trial.number + 1}/{total}  {told(trial.values)}"
    if trial.has_ended:
        print(f"{label}  done before", flush=True)
        return
    print(label, flush=True)
    trial.folder.mkdir(parents=True, exist_ok=True)
    options = {"method": sweep.method, **sweep.options, **trial.values, "output_dir": str(trial.folder)}
    file = trial.folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "posttrain.cli.main", sweep.method, str(file)]
    with open(trial.folder / "log.txt", "a", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    trial.result = {"values": trial.values, "exit_code": code, "metric": _metric(sweep, trial) if code == 0 else None}
    (trial.folder / RESULT).write_text(json.dumps(trial.result, indent=1) + "\n", encoding="utf-8")
    if code != 0:
        print(f"  ended with exit code {code}; see {trial.folder / 'log.txt'}", flush=True)


def _metric(sweep: Sweep, trial: Trial) -> float | None:
    lines = (trial.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [entry[sweep.metric] for entry in map(json.loads, lines) if sweep.metric in entry]
    if not values:
        known = sorted({name for entry in map(json.loads, lines) for name in entry})
        print(f"  logged no {sweep.metric!r}.{nearest(sweep.metric, known)}", flush=True)
        return None
    return values[-1] if sweep.take == "last" else (min if sweep.goal == "minimize" else max)(values)


def told(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    )


# ---- the end ------------------------------------------------------------------------------------------------------------------


def report(sweep: Sweep, trials: list[Trial]) -> int:
    """A table, `sweep.csv` and `sweep.svg`; exit code 1 where no trial gave a number."""
    import csv

    from rich.console import Console
    from rich.table import Table

    done = [trial for trial in trials if trial.result.get("metric") is not None]
    done.sort(key=lambda trial: trial.result["metric"], reverse=sweep.goal == "maximize")
    table = Table(title=f"{sweep.metric}, best first", title_justify="left")
    for name in ("trial", sweep.metric, *sweep.over):
        table.add_column(name, justify="right" if name != "trial" else "left")
    for trial in done:
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in trial.values.values()]
        table.add_row(trial.folder.name, f"{trial.result['metric']:.5g}", *shown)
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
    return 0 if done else 1
