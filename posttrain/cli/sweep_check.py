"""Whether the trials of a sweep can be run, in a process of its own: a config takes a GPU, which belongs to the runs.

    python -m posttrain.cli.sweep_check < {"method": ..., "metric": ..., "trials": [[label, options], ...]}

The answer is a line of JSON: what is wrong with the first trial that cannot be run, or null.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import Any

from posttrain.cli.errors import UsageError


def refuse_impossible(method: str, metric: str, trials: list[tuple[str, dict[str, Any]]], env: dict[str, str]) -> None:
    """UsageError where a trial's options would be refused by the train command. Loads no model and reads no rows."""
    asked = json.dumps({"method": method, "metric": metric, "trials": trials})
    command = [sys.executable, "-m", "posttrain.cli.sweep_check"]
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
            told = str(error)
            return told if label in told else f"trial {label}: {told}"
    return None


def _check(method: str, metric: str, options: dict[str, Any], where: str) -> None:
    """What `trainer_of` does before it reads data."""
    from posttrain.cli.arguments import RunConfig
    from posttrain.cli.assemble import config_of, model_name, parts_of, rewards_of, told
    from posttrain.cli.explain import as_processes, processes_of
    from posttrain.cli.launch import command_of
    from posttrain.methods.table import METHODS

    config = RunConfig(method, dict(options), dict.fromkeys(options, where))
    command_of(config, [])
    with as_processes(METHODS[method].config_class, processes_of(config)):
        args = told(lambda: config_of(config))
    model_name(config)
    rewards_of(config)
    told(lambda: parts_of(config))
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
