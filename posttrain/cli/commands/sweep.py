"""`posttrain sweep SWEEP.yaml`: one run after another over a grid, random draws or TPE's proposals; the same command continues."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.commands import sweep_file
from posttrain.cli.commands.sweep_file import Sweep, checked, planned_values, read_sweep, refuse_impossible
from posttrain.cli.errors import UsageError, nearest
from posttrain.cli.running.child_process import Ended, run_child
from posttrain.core.secrets import without_secrets, write_whole
from posttrain.view.json_lines import GrowingLines, series_of

if TYPE_CHECKING:
    import optuna

USAGE = """usage: posttrain sweep SWEEP.yaml [--dry-run]

SWEEP.yaml:
  method: sft
  options: {model_name_or_path: MODEL, dataset_name: FILE.jsonl, eval_strategy: steps, test_split_size: 0.1}
  over:
    learning_rate: [1e-5, 1e-4]                     a grid takes every combination
    weight_decay: {min: 1e-4, max: 0.1, scale: log} only with `trials` (scale: linear or log; int: true)
  trials: 10                                        how many; without it, the grid
  sampler: random                                   grid, random or tpe (chosen from the results so far)
  pruner: none                                      or median or hyperband: hopeless trials are stopped early
  metric: eval_loss
  goal: minimize                                    or maximize
  take: last                                        or best: of the values that a run has logged
  output_dir: runs/sweep
  seed: 0

The options of all trials are checked before the first begins (with tpe: its first ten, each listed value and the ends of each
range). A trial that has ended is not run again; one that was interrupted continues from its last checkpoint.
Exit code 0: every trial gave a number or was stopped early; 1: some did not; 2: the sweep cannot be done; 130: Control-C."""
RESULT, STUDY = "trial.json", "study.db"
LONGEST_NAME = 60


@dataclass
class Trial:
    number: int
    values: dict[str, Any]
    folder: Path
    study: str
    result: dict[str, Any]

    @property
    def is_pruned(self) -> bool:
        """By this study: to another metric or pruner it may not have been hopeless."""
        return self.result.get("pruned_by") == self.study

    @property
    def has_ended(self) -> bool:
        return self.result.get("exit_code") == 0 or self.is_pruned


def main(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    unknown = [word for word in words if word.startswith("-") and word != "--dry-run"]
    if unknown:
        raise UsageError(f"{unknown[0]!r} is an unknown option; options of the runs belong in the file.")
    files = [word for word in words if not word.startswith("-")]
    if len(files) != 1:
        raise UsageError(f"A sweep has one file, and there are {len(files)}: posttrain sweep SWEEP.yaml [--dry-run].")
    sweep = read_sweep(files[0])
    drawn, planned = planned_values(sweep)
    if sweep.sampler == "random" and len(planned) < sweep.trials:
        print(f"`over` has few values: {len(planned)} different trials were drawn, not {sweep.trials}.")
    trials = [trial_of(sweep, number, values) for number, values in enumerate(planned)]
    to_run = [trial.values for trial in trials if not trial.has_ended]
    to_run += sweep_file.extreme_values(sweep) if sweep.sampler == "tpe" and to_run else []
    if to_run:
        labelled = [(label_of(values), options_of(sweep, values)) for values in to_run]
        refuse_impossible(sweep.method, sweep.metric, labelled, {**os.environ, **sweep.environment})
    if "--dry-run" in words:
        for trial in trials:
            print(f"{trial.folder.name}  {label_of(trial.values)}")
        if sweep.sampler == "tpe" and sweep.trials > len(trials):
            print(f"and up to {sweep.trials - len(trials)} more, chosen from the results of those before")
        return 0
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with only_sweep_in(sweep.folder):
        return run(sweep, drawn)


@contextlib.contextmanager
def only_sweep_in(folder: Path) -> Iterator[None]:
    """A second one would take the trial that runs for one that was left behind. The system frees the lock of a killed process."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / ".sweep.lock", timeout=0):
            yield
    except Timeout as error:
        raise UsageError(
            f"{folder} is in use by another sweep; wait for it, or choose another `output_dir`."
        ) from error


def run(sweep: Sweep, drawn: list[dict[str, Any]]) -> int:
    study, trials = study_of(sweep, drawn), []
    total = sweep.trials if sweep.sampler == "tpe" else len(drawn)
    for trial, asked in trials_of(sweep, study, total):
        trials.append(trial)
        stopped = run_trial(sweep, trial, asked, total)
        if stopped is not None:
            print("Stopped; the same command continues it.", flush=True)
            return stopped
    return report(sweep, trials)


# ---- the study: which values come next, and which trials are hopeless ---------------------------------------------------------


def storage_of(sweep: Sweep) -> Any:
    """SQLite: a commit is on the disk whole or not at all, and the lock of a killed process is freed by the system.

    Optuna's journal file is neither: half a line at its end spoils the next one, and its lock is a file that a kill leaves behind.
    """
    from optuna.storages import RDBStorage

    file = sweep.folder / STUDY  # through `creator`: a URL would read `?` and `%` in a folder's name
    return RDBStorage("sqlite://", engine_kwargs={"creator": lambda: sqlite3.connect(file, check_same_thread=False)})


def study_name(sweep: Sweep) -> str:
    """Another file is another study, whose trials may be the same; more `trials` are the same study."""
    meaning = {name: value for name, value in asdict(sweep).items() if name not in ("trials", "environment", "folder")}
    return hashlib.blake2b(json.dumps(meaning, sort_keys=True).encode(), digest_size=8).hexdigest()


def study_of(sweep: Sweep, drawn: list[dict[str, Any]]) -> optuna.Study:
    """With the planned trials in it."""
    import optuna
    from sqlalchemy.exc import DatabaseError

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(
            storage=storage_of(sweep), study_name=study_name(sweep), direction=sweep.goal, load_if_exists=True,
            pruner=getattr(optuna.pruners, sweep_file.PRUNERS[sweep.pruner])(),
        )  # fmt: skip
    except DatabaseError as error:
        raise UsageError(
            f"{sweep.folder / STUDY} cannot be read ({error.orig}). Delete it: trials that have ended are recorded in their "
            "folders and are not run again."
        ) from error
    space, known = space_of(sweep), [trial.params for trial in study.get_trials(deepcopy=False)]
    for values in drawn:
        # choices are JSON in the study: they may be mappings, and 1 is not true
        params = {n: json.dumps(value) if isinstance(sweep.over[n], list) else value for n, value in values.items()}
        if params not in known:
            state = optuna.trial.TrialState.RUNNING  # as far as the study is concerned: its values are settled
            study.add_trial(optuna.trial.create_trial(state=state, params=params, distributions=space))
    return study


def space_of(sweep: Sweep) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for name, choices in sweep.over.items():
        if isinstance(choices, list):
            found[name] = CategoricalDistribution(list(dict.fromkeys(json.dumps(choice) for choice in choices)))
        else:
            kind = IntDistribution if choices.get("int") else FloatDistribution
            found[name] = kind(*sweep_file.bounds(choices), log=choices.get("scale") == "log")
    return found


def trials_of(sweep: Sweep, study: optuna.Study, total: int) -> Iterator[tuple[Trial, optuna.Trial]]:
    """Those that the study knows, then new ones, each with its place in the study; the same values only once."""
    import optuna

    space, seen = space_of(sweep), {}
    for number in range(total if sweep.sampler != "tpe" else total * sweep_file.DRAWS_PER_TRIAL):
        known = study.get_trials(deepcopy=False)
        if number < len(known):
            asked = optuna.trial.Trial(study, known[number]._trial_id)
        else:  # a seed of its own for each, so that a killed sweep does not draw the same again
            study.sampler = optuna.samplers.TPESampler(seed=sweep.seed + number, n_startup_trials=1)
            asked = study.ask(space)
        if asked.params.keys() != space.keys():  # killed while its values were being written
            continue
        drawn = {n: json.loads(v) if isinstance(sweep.over[n], list) else v for n, v in asked.params.items()}
        trial = trial_of(sweep, len(seen), checked(sweep.method, drawn, "the sweep"))
        if trial.folder in seen:
            if (metric := seen[trial.folder].result.get("metric")) is not None:
                study.tell(asked, metric, skip_if_finished=True)
            continue
        seen[trial.folder] = trial
        yield trial, asked
        if len(seen) == total:
            return
    print(f"`over` has few values: there were {len(seen)} different trials, not {total}.")


# ---- the trials ---------------------------------------------------------------------------------------------------------------


def trial_of(sweep: Sweep, number: int, values: dict[str, Any]) -> Trial:
    folder = sweep.folder / folder_name(sweep, values)
    return Trial(number, values, folder, study_name(sweep), _read_result(folder / RESULT))


def folder_name(sweep: Sweep, values: dict[str, Any]) -> str:
    """The values, which say what it is, and a hash of all options: other options are another trial, not an old one continued.

    No number: a value that is put in front of the others must not make them run again.
    """
    described = json.dumps({**sweep.options, **values}, sort_keys=True)
    key = hashlib.blake2b(described.encode(), digest_size=4).hexdigest()
    shown = ",".join(f"{name}={_shown(values[name])}" for name in sorted(values))
    shown = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", shown)
    return f"{shown}-{key}" if len(shown) <= LONGEST_NAME else f"trial-{key}"


def options_of(sweep: Sweep, values: dict[str, Any]) -> dict[str, Any]:
    return {**sweep.options, **values, "output_dir": str(sweep.folder / folder_name(sweep, values))}


def _read_result(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"is_damaged": True}


def run_trial(sweep: Sweep, trial: Trial, asked: optuna.Trial, total: int) -> int | None:
    """Run it, unless it has ended before. An exit code: the sweep is to stop."""
    import yaml

    label = f"trial {trial.number + 1}/{total}  {label_of(trial.values)}"
    if trial.has_ended:
        print(f"{label}  {'stopped early' if trial.is_pruned else 'done'} before", flush=True)
        trial.result["metric"] = _metric(sweep, trial)  # another one may have been asked for then
        return _settle(sweep, trial, asked)
    print(label, flush=True)
    if trial.result.get("is_damaged"):
        print(f"{trial.folder / RESULT} is damaged; the trial continues from its last checkpoint.", flush=True)
    trial.folder.mkdir(parents=True, exist_ok=True)
    file = trial.folder.resolve() / "sweep.yaml"
    options = {"method": sweep.method, **options_of(sweep, trial.values)}
    command = trainer_command(sweep.method, file)
    end_leftover(command)

    def is_hopeless() -> bool:
        return any(asked.should_prune() for _ in newly_reported(sweep, trial, asked))

    with open(trial.folder / "log.txt", "a", encoding="utf-8") as log:
        write_whole(file, yaml.safe_dump(options, sort_keys=False))
        try:
            if sweep.pruner != "none" and is_hopeless():  # so the sweep had decided when it was killed
                ended = Ended(-signal.SIGTERM, stopped=True)
            else:
                watch = is_hopeless if sweep.pruner != "none" else None
                ended = run_child(command, watch, stdout=log, stderr=log, env={**os.environ, **sweep.environment})
        finally:  # the trial needed its secrets; who reads the file later does not
            write_whole(file, yaml.safe_dump(without_secrets(options), sort_keys=False))
    if ended.signal is not None:
        return ended.code
    pruned = {"pruned_by": trial.study} if ended.stopped and ended.code != 0 else {}
    metric = _metric(sweep, trial) if pruned or ended.code == 0 else None
    trial.result = {
        "values": trial.values, "exit_code": ended.code, "metric_name": sweep.metric, "metric": metric, **pruned,
    }  # fmt: skip
    write_whole(trial.folder / RESULT, json.dumps(trial.result, indent=1) + "\n", private=False)
    if pruned:
        print(f"  stopped early at step {max(_curve(sweep, trial))}: {sweep.metric} is {metric}", flush=True)
    elif ended.code != 0:
        print(f"  ended with exit code {ended.code}; see {trial.folder / 'log.txt'}", flush=True)
    return _settle(sweep, trial, asked)


def trainer_command(method: str, file: Path) -> list[str]:
    return [sys.executable, "-m", "posttrain.cli.main", method, str(file)]


def end_leftover(command: list[str]) -> None:
    """A sweep that was killed could not end its trial, which still holds the folder: it saves and exits, and is then continued."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:] == command[1:]:
                print("  still runs from a sweep that was killed; waiting until it has saved", flush=True)
                process.terminate()
                process.wait()


def newly_reported(sweep: Sweep, trial: Trial, asked: optuna.Trial) -> Iterator[None]:
    """Reports to the pruner what the run has logged since the last call, one value at a time."""
    known = _frozen(asked)
    reported = known.intermediate_values
    if known.state.is_finished():  # its folder was deleted, and it is run again
        return
    if reported:
        yield  # a decision that was made before the sweep was killed is made again
    for step, value in _curve(sweep, trial).items():
        if step not in reported:
            asked.report(value, step)
            yield


def _curve(sweep: Sweep, trial: Trial) -> dict[int, float]:
    """Step -> metric; NaN where it was not finite."""
    lines = GrowingLines(trial.folder / "metrics.jsonl")
    lines.refresh()
    steps, values = series_of(lines.entries).get(sweep.metric, ([], []))
    return {step: math.nan if value is None else value for step, value in zip(steps, values)}


def _frozen(asked: optuna.Trial) -> optuna.trial.FrozenTrial:
    return asked.study.get_trials(deepcopy=False)[asked.number]


def _settle(sweep: Sweep, trial: Trial, asked: optuna.Trial) -> None:
    """Tell the study. A trial without a number stays open in it: the next start runs it again."""
    from optuna.trial import TrialState

    if not trial.has_ended or _frozen(asked).state.is_finished():
        return
    for _ in newly_reported(sweep, trial, asked):
        pass
    if trial.is_pruned:
        asked.study.tell(asked, state=TrialState.PRUNED)
    elif trial.result["metric"] is not None:
        asked.study.tell(asked, trial.result["metric"])


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


def label_of(values: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- the end ------------------------------------------------------------------------------------------------------------------


def report(sweep: Sweep, trials: list[Trial]) -> int:
    """A table, `sweep.csv` and `sweep.svg`; exit code 1 where a trial gave no number. Trials that were stopped early come last."""
    import csv

    from rich.console import Console
    from rich.table import Table

    ranked = [trial for trial in trials if trial.result.get("metric") is not None]
    ranked.sort(key=lambda trial: trial.result["metric"], reverse=sweep.goal == "maximize")
    done, pruned = [[t for t in ranked if t.is_pruned is stopped] for stopped in (False, True)]
    last_step = {trial.folder: max(_curve(sweep, trial), default="") for trial in pruned}
    more = ["stopped at"] if sweep.pruner != "none" else []
    table = Table(title=f"{sweep.metric}, best first", title_justify="left")
    for name in ("trial", sweep.metric, *sweep.over, *more):
        table.add_column(name, justify="right" if name != "trial" else "left")
    for trial in (*done, *pruned):
        cells = map(_shown, (*trial.values.values(), *(last_step.get(trial.folder, "") for _ in more)))
        table.add_row(trial.folder.name, f"{trial.result['metric']:.5g}", *cells)
    Console().print(table)
    with open(sweep.folder / "sweep.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["trial", "exit_code", sweep.metric, *sweep.over, *more])
        for t in trials:
            stopped = [last_step.get(t.folder, "") for _ in more]
            ended = [t.result.get("exit_code"), t.result.get("metric")]
            rows.writerow([t.folder.name, *ended, *t.values.values(), *stopped])
    if done:
        (sweep.folder / "sweep.svg").write_text(plot(sweep.metric, sweep.over, done), encoding="utf-8")
        print(f"Best: {done[0].folder}. Table: {sweep.folder / 'sweep.csv'}, plot: {sweep.folder / 'sweep.svg'}.")
    failed = sum(trial.result.get("metric") is None and not trial.is_pruned for trial in trials)
    if failed:
        print(f"{failed} of {len(trials)} trials gave no number.")
    return 1 if failed else 0


WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 220, 60, 40, 30


def plot(metric: str, over: dict[str, Any], trials: list[Trial]) -> str:
    panels = [_panel(metric, name, trials, place * (WIDTH + 20)) for place, name in enumerate(over)]
    total = len(over) * (WIDTH + 20)
    style = "text{font:11px system-ui,sans-serif;fill:#555}circle{fill:#2a6fdb;fill-opacity:.75}line{stroke:#bbb}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(metric)} by option"><style>{style}</style>{"".join(panels)}</svg>\n'
    )


def _panel(metric: str, name: str, trials: list[Trial], left: int) -> str:
    values = [trial.values[name] for trial in trials]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = [_position(value, values, is_number) for value in values]
    results = [trial.result["metric"] for trial in trials]
    low, high = min(results), max(results)
    span = (high - low) or 1.0
    inner, tall = WIDTH - LEFT - 10, HEIGHT - BOTTOM - TOP
    points = "".join(
        f'<circle cx="{left + LEFT + place * inner:.1f}" cy="{TOP + tall * (1 - (result - low) / span):.1f}" r="4">'
        f"<title>{escape(f'{name}={value}, {metric}={result:.5g}')}</title></circle>"
        for place, result, value in zip(places, results, values)
    )
    ends = sorted({str(v): p for v, p in zip(values, places)}.items())
    if is_number:
        ends = [(min(values), 0.0), (max(values), 1.0)]
    labels = "".join(
        f'<text x="{left + LEFT + place * inner:.1f}" y="{HEIGHT - 22}" text-anchor="middle">'
        f"{escape(f'{value:.3g}' if is_number else str(value))}</text>"
        for value, place in ends
    )
    return (
        f'<text x="{left + LEFT}" y="18">{escape(metric)} by {escape(name)}</text>'
        f'<line x1="{left + LEFT}" y1="{TOP + tall}" x2="{left + WIDTH - 10}" y2="{TOP + tall}"/>'
        f'<text x="{left + LEFT - 6}" y="{TOP + 8}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left + LEFT - 6}" y="{TOP + tall}" text-anchor="end">{low:.4g}</text>{points}{labels}'
    )


def _position(value: Any, values: list[Any], is_number: bool) -> float:
    if not is_number:
        names = sorted({str(one) for one in values})
        return names.index(str(value)) / max(len(names) - 1, 1)
    low, high = min(values), max(values)
    if low == high:
        return 0.5
    if low > 0 and high / low >= 10:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
