"""The file of a sweep: what is run, over which values, and which number is the result; and whether its trials can be run.

    python -m posttrain.cli.commands.sweep_file < {"method": ..., "metric": ..., "trials": [[label, options], ...]}

checks trials in a process of its own, because a config takes a GPU, which belongs to the runs. The answer is a line of JSON: what
is wrong with the first trial that cannot be run, or null.
"""

from __future__ import annotations

import contextlib
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

from posttrain.cli.errors import UsageError, as_usage_error, nearest
from posttrain.cli.options.arguments import known_name
from posttrain.cli.options.table import method_names, table_of
from posttrain.cli.options.values import value_of
from posttrain.core.config_file import read_config

KEYS = ("method", "options", "over", "trials", "sampler", "pruner", "metric", "goal", "take", "output_dir", "seed")
GOALS, TAKES, SCALES = ("minimize", "maximize"), ("last", "best"), ("linear", "log")
SAMPLERS = ("grid", "random", "tpe")
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "hyperband": "HyperbandPruner"}
"""By optuna's names."""
STARTUP_TRIALS = 10
"""Drawn at random before TPE has results to choose from."""
DRAWS_PER_TRIAL = 100
"""A draw that repeats an earlier one is drawn again, so many times for each trial."""


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
    sampler: str = "grid"
    pruner: str = "none"
    environment: dict[str, str] = field(default_factory=dict)


def read_sweep(path: str) -> Sweep:
    given, environment = as_usage_error(lambda: read_config(path))
    for key in given:
        if key not in KEYS:
            raise UsageError(f"{path} has the key `{key}`, which is unknown to a sweep.{nearest(key, KEYS)}")
    method = given.get("method")
    if method not in method_names():
        raise UsageError(f"{path}: `method` is {method!r}; it takes one of {', '.join(method_names())}.")
    _check_kinds(given, path)
    options = checked(method, given.get("options") or {}, f"{path}, `options`")
    over = {known_name(name): choices for name, choices in given["over"].items()}
    if len(over) < len(given["over"]):
        raise UsageError(f"{path}: `over` has an option under two names; leave one of them out.")
    for name, choices in over.items():
        check_choices(method, name, choices, given.get("trials"), path)
    return Sweep(
        method, options, over, given.get("metric", "loss"), given.get("goal", GOALS[0]), given.get("take", TAKES[0]),
        Path(given.get("output_dir", f"runs/sweep-{method}")).expanduser(), given.get("trials"), given.get("seed", 0),
        given.get("sampler") or _default_sampler(given), given.get("pruner", "none"), environment,
    )  # fmt: skip


def _check_kinds(given: dict[str, Any], path: str) -> None:
    """Of all keys but `method`."""
    over, trials = given.get("over"), given.get("trials")
    if not isinstance(over, dict) or not over or not all(isinstance(name, str) for name in over):
        raise UsageError(f"{path}: `over` is missing; it maps options to lists of values, or to ranges.")
    options = given.get("options")
    if options is not None and not (isinstance(options, dict) and all(isinstance(name, str) for name in options)):
        raise UsageError(f"{path}: `options` is {options!r}; it maps options to values.")
    for name in ("metric", "output_dir"):
        if name in given and not (isinstance(given[name], str) and given[name]):
            raise UsageError(f"{path}: `{name}` is {given[name]!r}; it takes text.")
    for name, choices in (("goal", GOALS), ("take", TAKES), ("sampler", SAMPLERS), ("pruner", tuple(PRUNERS))):
        if given.get(name, choices[0]) not in choices:
            raise UsageError(f"{path}: `{name}` is {given[name]!r}; it takes one of {', '.join(choices)}.")
    if trials is not None and (type(trials) is not int or trials < 1):
        raise UsageError(f"{path}: `trials` is {trials!r}; it takes a whole number above 0.")
    if type(given.get("seed", 0)) is not int:
        raise UsageError(f"{path}: `seed` is {given['seed']!r}; it takes a whole number.")
    sampler = given.get("sampler") or _default_sampler(given)
    if (sampler == "grid") != (trials is None):
        remedy = "leave `trials` out" if sampler == "grid" else "set `trials` to how many there are to be"
        raise UsageError(f"{path}: `sampler` is {sampler} and `trials` is {trials}; {remedy}.")


def _default_sampler(given: dict[str, Any]) -> str:
    return "grid" if given.get("trials") is None else "random"


def checked(method: str, options: dict[str, Any], where: str) -> dict[str, Any]:
    table, found = table_of(method), {}
    for key, given in options.items():
        name = known_name(key)
        if name not in table.options:
            raise UsageError(
                f"{where} sets `{key}`, an unknown option of posttrain {method}.{nearest(name, table.options)}"
            )
        if name == "output_dir":
            raise UsageError(
                f"{where} sets `{key}`; every trial has a folder of its own below the sweep's `output_dir`."
            )
        if name in found:
            raise UsageError(f"{where} sets `{name}` under two names; leave one of them out.")
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
    low, high = (_number(choices[key], f"{path}: `over.{name}.{key}`") for key in ("min", "max"))
    if not low < high or choices.get("scale", SCALES[0]) not in SCALES or (choices.get("scale") == "log" and low <= 0):
        raise UsageError(
            f"{path}: `over.{name}` is {choices!r}; min must be below max, scale one of {', '.join(SCALES)}, and log needs min "
            "above 0."
        )
    if not isinstance(choices.get("int", False), bool) or (choices.get("int") and math.ceil(low) > math.floor(high)):
        raise UsageError(
            f"{path}: `over.{name}` is {choices!r}; int is true or false, and true needs whole numbers in it."
        )
    checked(method, {name: _draw(random.Random(0), choices)}, f"{path}, `over`")
    if trials is None:
        raise UsageError(f"{path}: `over.{name}` is a range, which has no end to a grid; set `trials`.")


def _number(given: Any, where: str) -> float:
    try:
        found = math.nan if isinstance(given, bool) else float(given)  # YAML reads 1e-5 as text
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{where} is {given!r}; it takes a number.")
    return found


# ---- the values of the trials -------------------------------------------------------------------------------------------------


def planned_values(sweep: Sweep) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of the trials that do not depend on results, none twice: as they were drawn, and as options."""
    most = sweep.trials if sweep.sampler != "tpe" else min(sweep.trials, STARTUP_TRIALS)
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for drawn in _grid(sweep) if most is None else _draws(sweep):
        values = checked(sweep.method, drawn, "the sweep")
        found.setdefault(json.dumps(values, sort_keys=True), (drawn, values))
        if len(found) == most:
            break
    return [drawn for drawn, _ in found.values()], [values for _, values in found.values()]


def _grid(sweep: Sweep) -> Iterator[dict[str, Any]]:
    for combination in itertools.product(*sweep.over.values()):
        yield dict(zip(sweep.over, combination))


def _draws(sweep: Sweep) -> Iterator[dict[str, Any]]:
    drawn = random.Random(sweep.seed)
    for _ in range(sweep.trials * DRAWS_PER_TRIAL):
        yield {name: _draw(drawn, choices) for name, choices in sweep.over.items()}


def _draw(drawn: random.Random, choices: Any) -> Any:
    if isinstance(choices, list):
        return drawn.choice(choices)
    low, high = float(choices["min"]), float(choices["max"])
    is_log = choices.get("scale") == "log"
    value = math.exp(drawn.uniform(math.log(low), math.log(high))) if is_log else drawn.uniform(low, high)
    least, most = bounds(choices)
    return min(max(round(value) if choices.get("int") else value, least), most)


def bounds(choices: dict[str, Any]) -> tuple[float, float]:
    """Of a range; whole numbers where it takes whole numbers."""
    low, high = float(choices["min"]), float(choices["max"])
    return (math.ceil(low), math.floor(high)) if choices.get("int") else (low, high)


def extreme_values(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Every listed value and both ends of every range once, the other options as in the first trial: what TPE may come to."""
    ((first, *_), _) = planned_values(sweep)
    for name, choices in sweep.over.items():
        for value in choices if isinstance(choices, list) else bounds(choices):
            yield checked(sweep.method, {**first, name: value}, "the sweep")


# ---- whether they can be run --------------------------------------------------------------------------------------------------


def refuse_impossible(method: str, metric: str, trials: list[tuple[str, dict[str, Any]]], env: dict[str, str]) -> None:
    """UsageError where a trial's options would be refused by the train command. Loads no model and reads no rows."""
    asked = json.dumps({"method": method, "metric": metric, "trials": trials})
    command = [sys.executable, "-m", "posttrain.cli.commands.sweep_file"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise UsageError(f"The trials' options could not be checked:\n{done.stderr.strip()[-2000:]}")
    if problem := json.loads(done.stdout.splitlines()[-1]):
        raise UsageError(problem)


def first_problem(method: str, metric: str, trials: list[tuple[str, dict[str, Any]]]) -> str | None:
    for label, options in trials:
        try:
            _check(method, metric, options, f"trial {label}")
        except UsageError as error:
            sentence = str(error)
            return sentence if label in sentence else f"trial {label}: {sentence}"
    return None


def _check(method: str, metric: str, options: dict[str, Any], where: str) -> None:
    """What `trainer_of` does before it reads data."""
    from posttrain.cli.options.arguments import RunConfig
    from posttrain.cli.running.assemble import described
    from posttrain.cli.running.processes import as_planned, command_of

    config = RunConfig(method, dict(options), dict.fromkeys(options, where))
    command_of(config, [])
    with as_planned(config):
        args, *_ = as_usage_error(lambda: described(config))
    if not (config.get("dataset_name") or config.get("datasets")):
        raise UsageError(f"posttrain {method} needs rows: `dataset_name` or `datasets` in `options`.")
    _check_metric(metric, args)


def _check_metric(metric: str, args: Any) -> None:
    """A sweep whose number is never logged would run to its end for nothing."""
    if metric.startswith("eval_") and args.eval_strategy == "no":
        raise UsageError(f"`metric` is {metric}, and nothing is evaluated: set `eval_strategy` in `options`.")
    if metric == "loss" and args.logging_strategy == "no":
        raise UsageError("`metric` is loss, and `logging_strategy` is no: set it to steps in `options`.")


def main() -> None:
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        problem = first_problem(asked["method"], asked["metric"], asked["trials"])
    print(json.dumps(problem))


if __name__ == "__main__":
    main()
