"""Killed and resumed, a run goes on as if nothing had happened; what is damaged is never resumed from."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.load.saved_model import find_saved
from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import Child
from tests.trainer import resumable_run
from tests.trust.runs import differences


def start(method: str, folder: Path, **options: Any) -> Child:
    return Child(lambda: resumable_run.main(method, folder, **options), folder.with_name(f"{folder.name}.log"))


def run(method: str, folder: Path, **options: Any) -> None:
    child = start(method, folder, **options)
    assert child.wait() == 0, child.output()


def assert_identical(one: Path, other: Path) -> None:
    assert not differences(one, other)


MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sft-bf16-lora", {}),
        ("dpo", MOVING),
        ("kto", {}),
        ("bco", {}),
        ("prm", {"disable_dropout": False}),
        ("online_dpo", {"beta": [0.1, 0.3]}),
        ("xpo-lora", {}),
        ("nash_md-lora", {"mixture_coef": [0.5, 0.2]}),  # inside of a generation that feeds two steps
        ("ppo-bf16-lora", {}),
        ("ppo-critic", {}),
        ("gkd", {}),  # a coin for each prompt, inside of a generation that feeds two steps, twice
        ("sdft-bf16-lora", {}),  # a second adapter that averages the first in float32
    ],
    ids=[
        "bf16-lora",
        "moving-reference",
        "kto",
        "bco",
        "token-head",
        "pairs-inside-a-window",
        "two-writers",
        "nash_md",
        "ppo-head",
        "ppo-value-model",
        "coin",
        "averaged-teacher",
    ],
)
def test_killed_at_a_step_boundary_and_resumed_is_bit_identical(method, options, tmp_path):
    """SIGKILL right after step 5 of 8; checkpoints every 2 steps, logs every 3 (out of step with them on purpose).

    tests/trust does this at random instants, for each method.
    """
    run(method, tmp_path / "whole", **options)
    child = start(method, tmp_path / "killed", callbacks=[resumable_run.KillAfter(5)], **options)
    assert child.wait() == -signal.SIGKILL, child.output()
    run(method, tmp_path / "killed", resume=True, **options)
    assert_identical(tmp_path / "whole", tmp_path / "killed")


def test_resumed_at_its_end_a_run_takes_no_further_step(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    trainer = resumable_run.main("sft", copy, resume=True)
    assert trainer.state.global_step == 8
    assert_identical(trained, copy)


def test_a_longer_run_goes_on_with_the_rates_of_its_own_schedule(trained, tmp_path):
    """At the end of 8 steps the rate was 0; step 9 of 16 has that of half of the way."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    trainer = resumable_run.main("sft", copy, resume=True, max_steps=16)
    rates = {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry}
    assert rates[9] == pytest.approx(trainer.args.learning_rate * 0.5)
    assert rates[12] == pytest.approx(trainer.args.learning_rate * 5 / 16)


def test_second_run_on_the_same_folder_is_refused(tmp_path):
    with files.locked(tmp_path), pytest.raises(RuntimeError, match=f"pid {os.getpid()}"):
        resumable_run.main("sft", tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    resumable_run.main("sft", folder)
    return folder


@pytest.mark.parametrize("kind", ["cut", "flipped", "missing"])
def test_any_damaged_file_is_noticed_and_the_one_before_is_taken(trained, tmp_path, kind):
    newest = files.checkpoints(trained)[0]
    for path in [p for p in newest.rglob("*") if p.is_file()]:
        copy = tmp_path / f"{kind}-{path.name}"
        shutil.copytree(trained, copy)
        victim = copy / path.relative_to(trained)
        content = bytearray(victim.read_bytes())
        if kind == "missing":
            victim.unlink()
        elif kind == "cut":
            victim.write_bytes(content[: len(content) // 2])
        else:
            place = random.Random(path.name).randrange(len(content))
            content[place] ^= 1 << 3
            victim.write_bytes(content)
        with pytest.raises(files.DamagedCheckpoint, match=r"manifest|checkpoint"):
            files.verify(victim.parent)
        assert files.newest_good_checkpoint(copy) == copy / files.checkpoints(trained)[1].name
        shutil.rmtree(copy)


def test_no_good_checkpoint_is_an_error_that_names_each(trained, tmp_path):
    copy = tmp_path / "all-bad"
    shutil.copytree(trained, copy)
    for path in files.checkpoints(copy):
        (path / "model.safetensors").unlink()
    with pytest.raises(files.DamagedCheckpoint) as error:
        files.newest_good_checkpoint(copy)
    assert str(error.value).count("is missing") == len(files.checkpoints(copy))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"learning_rate": 5e-4}, "learning_rate: 0.001 -> 0.0005"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size: 4 -> 2"),
        ({"rows": 30}, "dataset: 20 rows -> 30 rows"),
    ],
)
def test_resume_under_changed_options_or_data_is_refused_with_the_difference(trained, change, shown):
    with pytest.raises(ValueError, match="then -> now") as error:
        resumable_run.main("sft", trained, resume=True, **change)
    assert shown in str(error.value)


def test_a_change_that_is_named_is_allowed(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    resumable_run.main(
        "sft", copy, resume=True, max_steps=10, learning_rate=5e-4, resume_allow_changes=["learning_rate"]
    )
    assert files.checkpoints(copy)[0].name == "checkpoint-10"


def test_what_was_allowed_is_the_runs_own_from_there_on(trained, tmp_path):
    """Continuing with the allowed value needs no permission again; going back to the first one does."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    changed = {"resume": True, "learning_rate": 5e-4}
    resumable_run.main("sft", copy, max_steps=10, resume_allow_changes=["learning_rate"], **changed)
    resumable_run.main("sft", copy, max_steps=12, **changed)
    with pytest.raises(ValueError, match=r"learning_rate: 0\.0005 -> 0\.001"):
        resumable_run.main("sft", copy, max_steps=14, resume=True)
    state = json.loads((copy / "checkpoint-12" / "run_state.json").read_text())
    allowed = [{"checkpoint": "checkpoint-8", "changes": ["learning_rate: 0.001 -> 0.0005"]}]
    assert state["allowed_changes"] == allowed


# ---- runs that share a folder --------------------------------------------------------------------------------------------


def run_ids(folder: Path) -> set[str]:
    return {json.loads((path / "run_state.json").read_text())["run_id"] for path in files.checkpoints(folder)}


def test_checkpoints_of_another_run_are_set_aside_and_never_resumed(trained, tmp_path, caplog):
    """Eight steps, then a fresh run of six: the same command again ends at step 6, and does not load step 8."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (first,) = run_ids(folder)
    fresh = resumable_run.main("sft", folder, max_steps=6, learning_rate=5e-4)
    (second,) = run_ids(folder)
    assert first != second
    assert files.checkpoints(folder)[0].name == "checkpoint-6"
    aside = folder / f"earlier-run-{first}"
    assert f"moved to {aside}" in caplog.text
    assert {path.name for path in aside.iterdir()} >= {"checkpoint-8", "metrics.jsonl"}
    again = resumable_run.main("sft", folder, resume=True, max_steps=6, learning_rate=5e-4)
    assert again.state.global_step == 6
    assert all(torch.equal(a, b) for a, b in zip(fresh.model.parameters(), again.model.parameters()))
    files.verify(aside / "checkpoint-8")


def test_an_earlier_run_can_be_continued_from_where_it_was_moved_to(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (first,) = run_ids(folder)
    resumable_run.main("sft", folder, max_steps=6)
    (second,) = run_ids(folder)
    trainer = resumable_run.make("sft", folder, max_steps=10)
    trainer.train(resume_from_checkpoint=str(folder / f"earlier-run-{first}" / "checkpoint-8"))
    assert run_ids(folder) == {first}
    assert files.checkpoints(folder / f"earlier-run-{second}")[0].name == "checkpoint-6"


def test_killed_between_two_moves_the_new_run_is_still_the_folders(trained, tmp_path):
    """The id is written first: what was not moved yet is moved by the next start."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / ".posttrain.run").write_text(json.dumps({"run_id": "the new one"}))
    trainer = resumable_run.main("sft", folder, resume=True, max_steps=2)
    assert trainer.lifecycle.resumed_from is None
    assert files.checkpoints(folder)[0].name == "checkpoint-2"


def test_export_takes_the_model_of_the_latest_run(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    trainer = resumable_run.main("sft", folder, max_steps=2, rows=12)
    found = find_saved(folder).load()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), found.parameters()))


def test_no_pickle_in_a_checkpoint(trained):
    suffixes = {path.suffix for path in files.checkpoints(trained)[0].rglob("*") if path.is_file()}
    assert suffixes <= {".safetensors", ".json", ".jinja", ".md", ".txt", ".model"}


def test_old_checkpoints_go_only_after_the_new_one_verifies(tmp_path):
    resumable_run.main("sft", tmp_path, save_total_limit=1)
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-8"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / "checkpoint-2.tmp-123").mkdir()
    resumable_run.main("sft", tmp_path, max_steps=2)
    assert not list(tmp_path.glob("*.tmp-*"))
