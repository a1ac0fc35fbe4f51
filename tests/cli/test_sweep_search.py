"""`posttrain sweep` with TPE and pruning: what it saves over random search, and that a kill costs it nothing.

A script of a few lines stands where the trainer would: it logs a curve to metrics.jsonl, keeps a checkpoint, and saves and exits
on SIGTERM, as a run does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
from collections import Counter
from pathlib import Path

import optuna
import psutil
import pytest
import yaml

from posttrain.cli.commands import sweep
from posttrain.cli.errors import UsageError
from posttrain.cli.running import child_process
from posttrain.cli.running.child_process import Ended
from tests.cli.runs import posttrain
from tests.forked import Child

OVER = {"learning_rate": {"min": 1e-6, "max": 1.0, "scale": "log"}, "weight_decay": {"min": 0, "max": 1}}
STEPS, NEAR = 20, 0.03


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, **changes):
    given = {
        "method": "sft", "options": {"model_name_or_path": "model", "dataset_name": "sft.jsonl"}, "over": OVER,
        "trials": 60, "metric": "loss", "output_dir": "sweep", "pruner": "median", "sampler": "tpe",
    }  # fmt: skip
    (folder / "sweep.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return "sweep.yaml"


def loss_at(step, learning_rate, weight_decay):
    """The optimum is planted at a learning rate of 1e-3 and a weight decay of 0.3."""
    distance = (math.log10(learning_rate) + 3) ** 2 / 4 + 4 * (weight_decay - 0.3) ** 2
    return distance + 2 * math.exp(-step / 4)


def steps_to_the_optimum(folder, monkeypatch, **changes):
    """Optimizer steps of all trials until one is near the optimum. Runs are played in this process, and the study is in memory."""
    taken = []

    def run(command, watch=None, **named):
        options = yaml.safe_load(Path(command[-1]).read_text())
        values = {name: options[name] for name in OVER}
        with open(Path(options["output_dir"], "metrics.jsonl"), "w") as file:
            for step in range(1, STEPS + 1):
                taken.append(step)
                print(json.dumps({"step": step, "loss": loss_at(step, **values)}), file=file, flush=True)
                if watch is not None and watch():
                    return Ended(143, stopped=True)
        return Ended(0, signal.SIGINT if loss_at(math.inf, **values) < NEAR else None)  # found: nothing more is run

    monkeypatch.setattr(sweep, "run_child", run)
    monkeypatch.setattr(sweep, "refuse_impossible", lambda *given: None)
    monkeypatch.setattr(sweep, "end_leftover", lambda command: None)
    monkeypatch.setattr(sweep, "storage_of", lambda sweep: None)
    assert posttrain("sweep", written(folder, **changes)) in (0, 130)
    return len(taken)


@pytest.mark.parametrize(
    ("seeds", "middle"),
    [
        pytest.param(7, statistics.mean, id="short"),
        pytest.param(20, statistics.median, id="long", marks=pytest.mark.trust),
    ],
)
def test_tpe_with_pruning_finds_the_optimum_in_fewer_steps_than_random_search(
    folder, monkeypatch, capsys, seeds, middle
):
    searches = {"random": {"sampler": "random", "pruner": "none"}, "tpe": {}}
    steps = {
        name: [
            steps_to_the_optimum(folder, monkeypatch, seed=seed, output_dir=f"{name}-{seed}", **changes)
            for seed in range(seeds)
        ]
        for name, changes in searches.items()
    }
    assert middle(steps["tpe"]) < middle(steps["random"]) / 2, steps


# ---- real processes ----------------------------------------------------------------------------------------------------------

TOY = """
import fcntl, json, math, os, signal, sys, time
from pathlib import Path
import yaml

options = yaml.safe_load(Path(sys.argv[1]).read_text())
folder = Path(options["output_dir"])
events = open(folder.parent / "events.txt", "a", buffering=1)  # the test's record: what a real run would not write
lock = open(folder / "lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the trainer locks its folder
except OSError:
    sys.exit("in use by another run")
stops = []
signal.signal(signal.SIGTERM, lambda *given: stops.append(1))
checkpoint = folder / "checkpoint"
first = int(checkpoint.read_text()) if checkpoint.exists() else 0
lines = (folder / "metrics.jsonl").read_text().splitlines() if first else []
print("began", first, folder.name, file=events)
end = time.monotonic() + 100  # where the test has failed
with open(folder / "metrics.jsonl", "w", buffering=1) as metrics:
    metrics.writelines(line + "\\n" for line in lines if json.loads(line)["step"] <= first)
    for step in range(first + 1, STEPS + 1):
        loss = LOSS
        metrics.write(json.dumps({"step": step, "loss": loss + math.exp(-step / 4)}) + "\\n")
        while HOPELESS and not stops and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.02)
        if stops or step % 4 == 0:
            part = folder / "checkpoint.part"
            part.write_text(str(step))
            part.replace(checkpoint)
        if stops:
            print("stopped", step, folder.name, file=events)
            sys.exit(143)
print("finished", STEPS, folder.name, file=events)
"""


def drive(folder):
    """`posttrain sweep` with the toy in the place of the trainer."""
    os.chdir(folder)
    child_process.WATCH_SECONDS = 0.05
    sweep.trainer_command = lambda method, file: [sys.executable, "toy.py", str(file)]
    sweep.refuse_impossible = lambda *given: None
    sys.exit(sweep.main(["sweep.yaml"]))


def with_toy(folder, loss, hopeless="False", steps=12):
    script = TOY.replace("STEPS", str(steps)).replace("LOSS", loss).replace("HOPELESS", hopeless)
    (folder / "toy.py").write_text(script)


def started(folder):
    return Child(lambda: drive(folder), folder / f"log-{len(list(folder.iterdir()))}")


def events_of(folder):
    file = folder / "sweep" / "events.txt"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def kill_when(folder, lines):
    process = started(folder)
    process.wait_until(lambda: len(events_of(folder)) >= lines, f"there were {lines} events")
    process.end()


@pytest.fixture
def _no_toy_outlives_the_test(folder):
    yield
    for process in psutil.process_iter():
        try:
            if "toy.py" in process.cmdline() and process.cwd() == str(folder):
                process.kill()
        except psutil.Error:
            continue


@pytest.mark.usefixtures("_no_toy_outlives_the_test")
@pytest.mark.slow
def test_a_hopeless_trial_is_stopped_with_the_signal_that_saves(folder):
    """Those of seeds 6 and 7 would never end by themselves."""
    with_toy(folder, "1 / options['seed'] + 9 * (options['seed'] in (6, 7))", "options['seed'] in (6, 7)")
    written(folder, over={"seed": list(range(1, 9))}, trials=None, sampler="grid")
    process = started(folder)
    code, shown = process.wait(), process.output()
    assert code == 0, shown
    ends = {name.partition("-")[0]: (what, int(step)) for what, step, name in events_of(folder) if what != "began"}
    assert ends == {f"seed={seed}": ("stopped", 1) if seed in (6, 7) else ("finished", 12) for seed in range(1, 9)}
    assert shown.count("stopped early at step 1") == 2
    rows = [line.split(",") for line in (folder / "sweep" / "sweep.csv").read_text().splitlines()]
    assert rows[0] == ["trial", "exit_code", "loss", "seed", "stopped at"]
    assert [(row[1], row[-1]) for row in rows[6:8]] == [("143", "1")] * 2
    process = started(folder)  # nothing is left to run
    assert process.wait() == 0
    assert process.output().count("stopped early before") == 2
    assert len(events_of(folder)) == 16
    written(folder, over={"seed": list(range(1, 9))}, trials=None, sampler="grid", pruner="none")
    with_toy(folder, "1")
    assert started(folder).wait() == 0  # without the pruner these two are continued to their end
    assert sorted((step, name[:6]) for what, step, name in events_of(folder)[16:] if what == "began") == [
        ("1", "seed=6"), ("1", "seed=7")
    ]  # fmt: skip


@pytest.mark.usefixtures("_no_toy_outlives_the_test")
@pytest.mark.slow
def test_a_killed_sweep_loses_no_trial_and_repeats_none(folder):
    with_toy(folder, "abs(math.log10(options['learning_rate']) + 3) + options['weight_decay']")
    written(folder, trials=13, pruner="hyperband")
    for lines in (7, 24):  # in a trial that was drawn, and in one that TPE has proposed or after it
        kill_when(folder, lines)
    process = started(folder)
    code, shown = process.wait(), process.output()
    assert code == 0, shown
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{folder}/sweep/study.db")
    states = Counter(trial.state.name for trial in study.get_trials())
    names = {name for _, _, name in events_of(folder)}
    assert states["COMPLETE"] + states["PRUNED"] == 13 == len(names), states
    ends = Counter(steps_of(folder, name)[-1][0] for name in names)
    assert ends.keys() <= {"finished", "stopped"}
    # A hopeless one may have finished while no sweep was there to stop it.
    assert ends["finished"] >= states["COMPLETE"]


def steps_of(folder, name):
    """What a trial did. Each time it has begun where it had ended before: no step was lost, and none was made twice."""
    mine = [(what, int(step)) for what, step, one in events_of(folder) if one == name]
    assert [step for _, step in mine[::2]] == [0, *(step for _, step in mine[1:-1:2])], mine
    return mine


@pytest.mark.usefixtures("_no_toy_outlives_the_test")
def test_a_trial_that_outlived_its_sweep_saves_and_is_continued(folder):
    """It waits for a signal when it is begun for the first time."""
    with_toy(folder, "1", "first == 0")
    written(folder, over={"seed": [1]}, trials=None, sampler="grid", pruner="none")
    kill_when(folder, 1)
    process = started(folder)
    code, shown = process.wait(), process.output()
    assert code == 0, shown
    assert "still runs from a sweep that was killed; waiting until it has saved" in shown
    (name,) = {name for _, _, name in events_of(folder)}
    assert steps_of(folder, name) == [("began", 0), ("stopped", 1), ("began", 1), ("finished", 12)]


def test_one_sweep_for_a_folder_at_a_time(folder):
    (folder / "sweep").mkdir()
    with (
        sweep.only_sweep_in(folder / "sweep"),
        pytest.raises(UsageError, match="in use by another sweep"),
        sweep.only_sweep_in(folder / "sweep"),
    ):
        pass


def test_a_damaged_study_is_named_with_what_to_do(folder, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "refuse_impossible", lambda *given: None)
    (folder / "sweep").mkdir()
    (folder / "sweep" / "study.db").write_bytes(b"no database" * 100)
    assert posttrain("sweep", written(folder)) == 2
    assert "sweep/study.db cannot be read (file is not a database). Delete it" in capsys.readouterr().err


def test_a_dry_run_of_tpe_names_the_trials_that_do_not_depend_on_results(folder, monkeypatch, capsys):
    checked = []
    monkeypatch.setattr(sweep, "refuse_impossible", lambda method, metric, trials, env: checked.extend(trials))
    assert posttrain("sweep", written(folder), "--dry-run") == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 11
    assert shown[-1] == "and up to 50 more, chosen from the results of those before"
    ends = {(options["learning_rate"], options["weight_decay"]) for _, options in checked}
    assert {rate for rate, _ in ends} >= {1e-6, 1.0}
    assert {decay for _, decay in ends} >= {0.0, 1.0}
    assert not (folder / "sweep").exists()


def test_tpe_with_fewer_values_than_trials_ends(folder, monkeypatch, capsys):
    def run(command, watch=None, **named):
        options = yaml.safe_load(Path(command[-1]).read_text())
        Path(options["output_dir"], "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": options["seed"]}) + "\n")
        return Ended(0)

    monkeypatch.setattr(sweep, "run_child", run)
    monkeypatch.setattr(sweep, "refuse_impossible", lambda *given: None)
    monkeypatch.setattr(sweep, "storage_of", lambda sweep: None)
    assert posttrain("sweep", written(folder, over={"seed": [3, 1, 2]}, trials=4)) == 0
    assert "there were 3 different trials, not 4" in capsys.readouterr().out
