"""`posttrain sweep`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from posttrain.cli.commands import sweep
from posttrain.cli.running.child_process import Ended
from tests.cli.runs import folder_with_inputs, options_of, posttrain, refuse_here


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, **changes):
    given = {
        "method": "sft", "options": {**options_of("sft")}, "over": {"learning_rate": [1e-4, 1e-2], "seed": [1, 2]},
        "metric": "loss", "output_dir": "sweep",
    }  # fmt: skip
    del given["options"]["output_dir"]
    (folder / "sweep.yaml").write_text(yaml.safe_dump({**given, **changes}))
    return "sweep.yaml"


def planned(path):
    read = sweep.read_sweep(path)
    return [sweep.trial_of(read, 0, values) for values in sweep.planned_values(read)[1]]


def play(monkeypatch, fails=lambda options, count: False):
    """The runs are played by a stand-in that leaves behind what a run leaves."""
    calls = []

    def run(command, watch=None, **named):
        options = yaml.safe_load(Path(command[-1]).read_text())
        calls.append(options)
        if fails(options, len(calls)):
            return Ended(1)
        loss = abs(options["learning_rate"] - 1e-2) + options["seed"] / 100
        lines = [{"loss": 9.0, "grad_norm": 1.0}, {"loss": loss, "grad_norm": 10.0 * options["seed"]}]
        Path(options["output_dir"], "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return Ended(0)

    monkeypatch.setattr(sweep, "run_child", run)
    monkeypatch.setattr(sweep, "refuse_impossible", refuse_here)
    return calls


def test_a_grid_is_every_combination_and_draws_depend_on_the_seed_alone(folder, monkeypatch, capsys):
    play(monkeypatch)
    assert posttrain("sweep", written(folder), "--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    over = {"learning_rate": {"min": 1e-5, "max": 1e-2, "scale": "log"}, "lora_r": {"min": 2, "max": 9, "int": True}}
    path = written(folder, over=over, trials=20)
    one, other = ([t.values for t in planned(path)] for _ in range(2))
    assert one == other
    assert len({values["learning_rate"] for values in one}) == 20
    assert all(1e-5 <= values["learning_rate"] <= 1e-2 and values["lora_r"] in range(2, 10) for values in one)
    below = sum(values["learning_rate"] < 3e-4 for values in one)
    assert 4 <= below <= 16  # half of a log scale


def test_trials_are_run_once_and_the_best_comes_first(folder, monkeypatch, capsys):
    """test_a_real_sweep has real runs."""
    calls = play(
        monkeypatch, fails=lambda options, count: (options["learning_rate"], options["seed"]) == (1e-2, 2) and count < 5
    )
    path = written(folder)
    assert posttrain("sweep", path) == 1  # one has failed
    assert "1 of 4 trials gave no number" in capsys.readouterr().out
    assert posttrain("sweep", path) == 0  # the one that failed is run again, and no other
    assert len(calls) == 5
    rows = list(csv.DictReader(Path("sweep/sweep.csv").read_text().splitlines()))
    assert sorted(float(row["loss"]) for row in rows)[0] == pytest.approx(0.01)
    assert "Best: sweep/learning_rate=0.01,seed=1-" in capsys.readouterr().out
    assert (folder / "sweep" / "sweep.svg").read_text().count("<circle") == 8


def test_another_metric_goal_or_take_is_read_from_the_log(folder, monkeypatch, capsys):
    calls = play(monkeypatch)
    assert posttrain("sweep", written(folder, over={"seed": [1, 2]})) == 0

    def numbers(**changes):
        assert posttrain("sweep", written(folder, over={"seed": [1, 2]}, **changes)) == 0
        rows = list(csv.DictReader(Path("sweep/sweep.csv").read_text().splitlines()))
        return [float(row[changes["metric"]]) for row in rows]

    assert numbers(metric="loss", take="best", goal="maximize") == [9.0, 9.0]
    assert numbers(metric="grad_norm", goal="maximize") == [10.0, 20.0]
    assert "Best: sweep/seed=2-" in capsys.readouterr().out
    assert len(calls) == 2


def test_folders_are_named_by_values_so_that_a_value_put_in_front_runs_alone(folder, monkeypatch, capsys):
    calls = play(monkeypatch)
    assert posttrain("sweep", written(folder, over={"seed": [1, 2]})) == 0
    assert posttrain("sweep", written(folder, over={"seed": [3, 1, 2, 1]})) == 0
    assert [options["seed"] for options in calls] == [1, 2, 3]
    path = written(folder, over={"lr_scheduler_kwargs": [{"a": "x" * 80}], "seed": [1]})
    (long,) = [trial.folder.name for trial in planned(path)]
    assert long.startswith("trial-")
    other = written(folder, over={"seed": [1]}, options={"model_name_or_path": "another"})
    assert not any(trial.has_ended for trial in planned(other))


def test_draws_do_not_repeat_and_there_are_no_more_than_there_can_be(folder):
    path = written(folder, over={"seed": {"min": 1, "max": 4, "int": True}}, trials=4)
    assert sorted(t.values["seed"] for t in planned(path)) == [1, 2, 3, 4]
    path = written(folder, over={"seed": [1, 2]}, trials=9)
    assert sorted(t.values["seed"] for t in planned(path)) == [1, 2]


def test_a_damaged_result_is_no_result(folder, monkeypatch, capsys):
    calls = play(monkeypatch)
    assert posttrain("sweep", written(folder, over={"seed": [1]})) == 0
    (file,) = Path("sweep").glob("*/trial.json")
    file.write_text(file.read_text()[:20])
    assert posttrain("sweep", written(folder, over={"seed": [1]})) == 0
    assert len(calls) == 2
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"over": {"lora_r": [4, 8]}}, ["lora_r=4", "--use_peft"]),
        ({"over": {"seed": [1]}, "options": {"logging_strategy": "no"}}, ["logging_strategy", "steps"]),
        ({"metric": "eval_loss"}, ["eval_loss", "eval_strategy"]),
        ({"over": {"model_name_or_path": ["model", "./nowhere"]}}, ["./nowhere", "no folder"]),
        ({"over": {"num_processes": [1, 0]}}, ["num_processes", "1 or more"]),
    ],
)
def test_every_trial_is_checked_before_the_first_is_begun(folder, monkeypatch, capsys, changes, wanted):
    calls = play(monkeypatch)
    options = {**options_of("sft"), **changes.get("options", {})}
    del options["output_dir"]
    assert posttrain("sweep", "--dry-run", written(folder, **{**changes, "options": options})) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in wanted), shown
    assert posttrain("sweep", "sweep.yaml") == 2
    assert calls == []


@pytest.mark.trust
def test_the_check_in_a_process_of_its_own(folder, capsys):
    assert posttrain("sweep", "--dry-run", written(folder, over={"lora_r": [4, 8]})) == 2
    assert "lora_r=4" in capsys.readouterr().err


@pytest.mark.trust
def test_a_real_sweep(folder, capsys):
    folder_with_inputs(folder)
    path = written(folder, over={"learning_rate": [1e-4, 1e-2]})
    assert posttrain("sweep", path) == 0
    losses = [float(row["loss"]) for row in csv.DictReader(Path("sweep/sweep.csv").read_text().splitlines())]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"methd": "sft"}, ["methd", "method"]),
        ({"method": "stf"}, ["stf", "sft"]),
        ({"over": {}}, ["over"]),
        ({"over": {"lerning_rate": [1]}}, ["lerning_rate", "learning_rate"]),
        ({"over": {"learning_rate": ["fast"]}}, ["learning_rate", "fast"]),
        ({"over": {"learning_rate": {"min": 0, "max": 1, "scale": "log"}}, "trials": 3}, ["learning_rate", "min"]),
        ({"over": {"learning_rate": {"min": 0.1, "max": 1}}}, ["learning_rate", "trials"]),
        ({"goal": "smaller"}, ["goal", "smaller", "minimize"]),
        ({"trials": 0}, ["trials", "0"]),
        ({"sampler": "bayes"}, ["sampler", "bayes", "grid, random, tpe"]),
        ({"pruner": "asha"}, ["pruner", "asha", "none, median, hyperband"]),
        ({"sampler": "tpe"}, ["`sampler` is tpe and `trials` is None; set `trials`"]),
        ({"sampler": "grid", "trials": 3}, ["`sampler` is grid and `trials` is 3; leave `trials` out"]),
        ({"options": {"max_steps": "many"}}, ["max_steps", "many"]),
        ({"options": [1, 2]}, ["options", "[1, 2]"]),
        ({"output_dir": 3}, ["output_dir", "3"]),
        ({"seed": "x"}, ["seed", "'x'"]),
        ({"over": {"learning_rate": {"min": "a", "max": 1}}, "trials": 3}, ["learning_rate.min", "'a'"]),
        ({"over": {"seed": {"min": 0.2, "max": 0.4, "int": True}}, "trials": 3}, ["seed", "whole numbers"]),
        ({"over": {"packing": {"min": 0.2, "max": 0.4}}, "trials": 3}, ["packing"]),
        ({"options": {"output_dir": "x"}}, ["output_dir", "own"]),
        ({"over": {"output-dir": ["x", "y"]}}, ["output_dir", "own"]),
    ],
)
def test_what_cannot_be_swept_is_said(folder, capsys, changes, wanted):
    assert posttrain("sweep", written(folder, **changes)) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in wanted), shown


def test_a_trial_reads_its_secrets_and_leaves_none(folder, monkeypatch, capsys):
    calls = play(monkeypatch)
    options = {name: value for name, value in options_of("sft").items() if name != "output_dir"}
    path = written(folder, options={**options, "hub_token": "planted-token"})
    assert posttrain("sweep", path) == 0
    assert {call["hub_token"] for call in calls} == {"planted-token"}
    files = list((folder / "sweep").glob("*/sweep.yaml"))
    assert len(files) == 4
    assert {(file.stat().st_mode & 0o777, yaml.safe_load(file.read_text())["hub_token"]) for file in files} == {
        (0o600, "(hidden)")
    }
