"""A disk without a byte left, from some step on or from the start: nothing but the documented error, and nothing half written."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from transformers import TrainerCallback

from posttrain.rollout.store import RolloutStore, read_rollouts
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import EXIT_CODE, CheckpointNotSaved
from posttrain.trainer.checkpoints.step_file import StepFile
from tests.cli.runs import folder_with_inputs, options_of
from tests.forked import run_command
from tests.trainer import resumable_run
from tests.trust.test_disk import small_disk

ROOT = Path(__file__).parents[2]
SIZE = 2**22


def fill(disk: Path) -> None:
    """To the last byte."""
    with open(disk / "ballast", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


class Filled(TrainerCallback):
    """The disk is full after one step, and has room again after another."""

    def __init__(self, disk: Path, after: int, until: int | None = None) -> None:
        self.disk, self.after, self.until = disk, after, until

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.until:
            (self.disk / "ballast").unlink()
        if state.global_step == self.after:
            fill(self.disk)


def trainer_on(disk: Path, method: str, *callbacks: TrainerCallback, **options):
    options = {"rows": 12, "eval_strategy": "no", "max_steps": 6, "logging_steps": 1, **options}
    if method == "grpo":  # a collection for every step
        options |= {"num_iterations": 1, "steps_per_generation": 2}
    return resumable_run.make(method, disk / "run", callbacks=list(callbacks), **options)


def empty_files(folder: Path) -> list[str]:
    """Names of files that hold nothing; logs of lines may."""
    found = [path for path in folder.rglob("*") if path.is_file() and not path.stat().st_size]
    return [path.name for path in found if path.name != files.LOCK and path.suffix != ".jsonl"]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_run_ends_with_its_good_checkpoint_and_the_documented_error(tmp_path, method, caplog):
    with small_disk(tmp_path / "small", SIZE) as disk:
        trainer = trainer_on(disk, method, Filled(disk, after=3))
        with pytest.raises(CheckpointNotSaved) as ended:
            trainer.train()
        assert ended.value.code == EXIT_CODE
        assert "The checkpoint of step 6 was not saved" in str(ended.value)
        assert trainer.state.global_step == 6
        assert [path.name for path in files.checkpoints(disk / "run")] == ["checkpoint-2"]
        files.verify(disk / "run" / "checkpoint-2")
        assert empty_files(disk / "run") == []
        if method == "grpo":
            assert "rollouts of step 4 could not be written" in caplog.text


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_what_could_not_be_written_is_written_when_there_is_room(tmp_path, method):
    with small_disk(tmp_path / "small", SIZE) as disk:
        trainer_on(disk, method, Filled(disk, after=1, until=4)).train()
        run = disk / "run"
        assert [path.name for path in files.checkpoints(run)] == ["checkpoint-6", "checkpoint-4"]
        logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2, 3, 4, 5, 6]
        assert (run / "README.md").stat().st_size > 500
        if method == "grpo":
            assert sorted(set(read_rollouts(run)["step"].to_pylist())) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_disk_that_is_full_from_the_start(tmp_path, method):
    with small_disk(tmp_path / "small", SIZE) as disk:
        trainer = trainer_on(disk, method, Filled(disk, after=0, until=1))
        fill(disk)
        trainer.train()
        assert [path.name for path in files.checkpoints(disk / "run")] == [
            "checkpoint-6",
            "checkpoint-4",
            "checkpoint-2",
        ]


def test_rollouts_are_kept_in_memory_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.rollout.store.MAX_KEPT", 3)
    with small_disk(tmp_path / "small", 2**20) as disk:
        fill(disk)
        store = RolloutStore(disk)
        for step in range(1, 5):
            store.write(step, [{"prompt": "a", "completion": "b"}])
        with pytest.raises(OSError, match="rollouts of 4 collections, the first is of step 1, could not be written"):
            store.flush()
        (disk / "ballast").unlink()
        store.close()
        assert read_rollouts(disk)["step"].to_pylist() == [1, 2, 3, 4]


def test_a_history_is_cut_back_without_room_for_another(tmp_path):
    with small_disk(tmp_path / "small", 2**20) as disk:
        file = StepFile(disk / "metrics.jsonl")
        for step in range(1, 5):
            file.append(step, {"loss": 1.0})
        fill(disk)
        file.begin(2)
        assert [json.loads(line)["step"] for line in file.lines()] == [1, 2]


def test_the_command_says_that_the_model_was_not_written(tmp_path):
    """The reward fills the disk in the last step: there is no checkpoint to save, and no room for the model."""
    folder = folder_with_inputs(tmp_path / "inputs")
    with small_disk(tmp_path / "small", SIZE) as disk:
        (folder / "rewards_of_test.py").write_text(
            "import pathlib\n\ndef length(completions, **columns):\n"
            f"    with open({str(disk / 'ballast')!r}, 'ab', buffering=0) as file:\n"
            "        try:\n            while True:\n                file.write(b'x' * 512)\n"
            "        except OSError:\n            pass\n    return [float(len(text)) for text in completions]\n"
        )
        (folder / "run.yaml").write_text(yaml.safe_dump({**options_of("grpo"), "output_dir": str(disk / "run")}))
        done = run_command("grpo", "run.yaml", cwd=folder)
        assert done.returncode == EXIT_CODE, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert "could not be written" in done.stderr
        assert empty_files(disk / "run") == []
