"""`posttrain sweep` and `posttrain launch`."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import pytest
import yaml

from posttrain.cli import sweep
from tests.cli.runs import folder_with_inputs, options_of, posttrain


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


def test_a_grid_is_every_combination_and_draws_depend_on_the_seed_alone(folder, capsys):
    assert posttrain("sweep", written(folder), "--dry-run") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    over = {"learning_rate": {"min": 1e-5, "max": 1e-2, "scale": "log"}, "lora_r": {"min": 2, "max": 9, "int": True}}
    path = written(folder, over=over, trials=20)
    one, other = ([t.values for t in sweep.trials_of(sweep.read_sweep(path))] for _ in range(2))
    assert one == other
    assert len({values["learning_rate"] for values in one}) == 20
    assert all(1e-5 <= values["learning_rate"] <= 1e-2 and values["lora_r"] in range(2, 10) for values in one)
    below = sum(values["learning_rate"] < 3e-4 for values in one)
    assert 4 <= below <= 16  # half of a log scale


def test_trials_are_run_once_and_the_best_comes_first(folder, monkeypatch, capsys):
    """The runs are played by a stand-in that leaves behind what a run leaves; test_a_real_sweep has real ones."""
    calls = []

    def run(command, **named):
        options = yaml.safe_load(Path(command[-1]).read_text())
        calls.append(options)
        if options["learning_rate"] == 1e-2 and options["seed"] == 2 and len(calls) < 5:
            return subprocess.CompletedProcess(command, 1)
        loss = abs(options["learning_rate"] - 1e-2) + options["seed"] / 100
        with open(f"{options['output_dir']}/metrics.jsonl", "w") as file:
            file.write(json.dumps({"loss": 9.0}) + "\n" + json.dumps({"loss": loss}) + "\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sweep.subprocess, "run", run)
    path = written(folder)
    assert posttrain("sweep", path) == 0
    assert "1 of 4 trials gave no number" in capsys.readouterr().out
    assert posttrain("sweep", path) == 0  # the one that failed is run again, and no other
    assert len(calls) == 5
    rows = list(csv.DictReader(Path("sweep/sweep.csv").read_text().splitlines()))
    assert sorted(float(row["loss"]) for row in rows)[0] == pytest.approx(0.01)
    assert "Best: sweep/002" in capsys.readouterr().out
    assert (folder / "sweep" / "sweep.svg").read_text().count("<circle") == 8


@pytest.mark.slow
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
        ({"options": {"max_steps": "many"}}, ["max_steps", "many"]),
    ],
)
def test_what_cannot_be_swept_is_said(folder, capsys, changes, wanted):
    assert posttrain("sweep", written(folder, **changes)) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in wanted), shown


# ---- launch -------------------------------------------------------------------------------------------------------------------

RUN = ["sft", "--model_name_or_path", "my model", "--dataset_name", "rows.jsonl"]


@pytest.mark.parametrize("scheduler", ["slurm", "skypilot", "kubernetes"])
def test_a_job_is_written_and_not_submitted(folder, capsys, scheduler):
    words = ["--to", scheduler, "--nodes", "4", "--gpus", "8", "--profile", "hsdp", "--name", "mine"]
    assert posttrain("launch", *words, *RUN) == 0
    shown = capsys.readouterr().out
    text = next(folder.glob("mine.*")).read_text()
    assert text in shown
    assert "nothing was submitted" in shown
    for part in (
        "--num_processes 32",
        "--num_machines 4",
        "--accelerate_config hsdp",
        "$RANK_OF_MACHINE",
        "rows.jsonl",
    ):
        assert part in text
    if scheduler == "slurm":
        subprocess.run(["bash", "-n", str(folder / "mine.sbatch")], check=True)
        assert "--signal=TERM@120" in text
    else:
        parts = list(yaml.safe_load_all(text))
        assert parts[0]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--to", "slurm", *RUN, "--lerning_rate", "1"], ["lerning_rate"]),
        (["--to", "slurm", *RUN, "--num_processes", "4"], ["num_processes", "--gpus"]),
        (["--to", "slurm", "--profile", "hsdp", *RUN], ["hsdp", "fsdp2"]),
        (["--to", "slurm", "--name", "A job", *RUN], ["A job"]),
        (["--to", "slurm", "stf"], ["stf"]),
        (["--to", "skypilot", "--submit", *RUN], ["sky"]),
    ],
)
def test_what_cannot_be_launched_is_said(folder, capsys, words, wanted):
    assert posttrain("launch", *words) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in wanted), shown
