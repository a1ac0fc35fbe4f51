"""Whatever happens to a file of a checkpoint is noticed, named, and the checkpoint before it is taken."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from transformers import TrainerCallback

from posttrain.trainer.checkpoints import checkpoint as files
from tests.trainer import resumable_run
from tests.trust import runs

EXTRA = (
    "model-00001-of-00002.safetensors", "pytorch_model.bin", "adapter_config.json", "adapter_model.safetensors", "scaler.pt",
    "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "training_args.bin", "generation_config.json", "vocab.json",
    "special_tokens_map.json", "added_tokens.json", "modeling_evil.py", "rollouts_0.json", "bema_state.safetensors",
    "moved_reference.json", "rng_state_7.json", "notes.txt",
)  # fmt: skip
REASONS = {
    "bit flip": r"does not have the checksum|cannot be read|was changed|has the format",
    "truncation": r"bytes instead of|cannot be read",
    "no bytes": r"0 bytes instead of|cannot be read",
    "missing": r"is missing|has no manifest",
    "extra file": r"is not in the manifest",
    "swapped": r"bytes instead of|does not have the checksum|cannot be read",
}


def flip(victim, rng):
    content = bytearray(victim.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    victim.write_bytes(content)
    return victim.name


def truncate(victim, rng):
    os.truncate(victim, rng.randrange(victim.stat().st_size))
    return victim.name


def empty(victim, rng):
    os.truncate(victim, 0)
    return victim.name


def remove(victim, rng):
    victim.unlink()
    return victim.name


def add(victim, rng):
    name = rng.choice([name for name in EXTRA if not (victim.parent / name).exists()])
    (victim.parent / name).write_bytes(rng.randbytes(100))
    return name


def swap(victim, rng):
    """The file of another checkpoint in its place, as a copy that went wrong would leave it."""
    others = [p for p in victim.parent.iterdir() if p.is_file() and p.read_bytes() != victim.read_bytes()]
    victim.write_bytes(rng.choice(others).read_bytes())
    return victim.name


DAMAGES = {
    "bit flip": flip,
    "truncation": truncate,
    "no bytes": empty,
    "missing": remove,
    "extra file": add,
    "swapped": swap,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    runs.finish("sft", folder)
    return folder


@pytest.mark.parametrize("count", [pytest.param(60, id="short"), pytest.param(500, id="long", marks=pytest.mark.trust)])
def test_every_damage_is_noticed_and_named(finished, count, tmp_path, caplog, figure):
    rng = random.Random(count)
    newest, before = files.checkpoints(finished)[:2]
    shutil.copytree(before, tmp_path / before.name)
    hit = tmp_path / newest.name
    noticed = Counter()
    for number in range(count):
        shutil.rmtree(hit, ignore_errors=True)
        shutil.copytree(newest, hit)
        kind = rng.choice(list(DAMAGES))
        victim = rng.choice(sorted(path for path in hit.iterdir() if path.is_file()))
        name = DAMAGES[kind](victim, rng)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert files.newest_good_checkpoint(tmp_path) == tmp_path / before.name, (number, kind, name)
        (said,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
        assert name in said, (kind, name, said)
        assert re.search(REASONS[kind], said), (kind, name, said)
        noticed[kind] += 1
    assert sum(noticed.values()) == count
    kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(noticed.items()))
    figure(f"damaged checkpoint ({kinds})", count, f"{count} of {count} noticed and named", f"{count} of {count}")


@pytest.mark.parametrize("count", [pytest.param(1, id="short"), pytest.param(10, id="long", marks=pytest.mark.trust)])
def test_a_run_goes_on_from_the_checkpoint_before_and_ends_the_same(finished, count, tmp_path, figure):
    for number in range(count):
        rng = random.Random(number)
        folder = tmp_path / str(number)
        # In step 7; the newest checkpoint is that of step 6
        runs.killed_at("sft", folder, runs.Instant("kill:forward:14"))
        newest = files.checkpoints(folder)[0]
        kind = rng.choice(list(DAMAGES))
        DAMAGES[kind](rng.choice(sorted(path for path in newest.iterdir() if path.is_file())), rng)
        runs.finish("sft", folder)
        assert not runs.differences(finished, folder), kind
        assert "Checkpoint passed over" in (tmp_path / f"{number}.log").read_text()
        files.verify(newest)  # the damaged one was replaced when its step came again
    figure("damaged checkpoint, resumed", count, f"{count} of {count} bit-identical", f"{count} of {count}")


@pytest.mark.parametrize("name", EXTRA)
def test_every_added_file_is_noticed(finished, name, tmp_path):
    shutil.copytree(files.checkpoints(finished)[0], tmp_path / "checkpoint-8")
    if (tmp_path / "checkpoint-8" / name).exists():
        pytest.skip("this checkpoint has such a file of its own")
    (tmp_path / "checkpoint-8" / name).write_bytes(b"x")
    with pytest.raises(files.DamagedCheckpoint, match=f"{re.escape(name)} is not in the manifest"):
        files.verify(tmp_path / "checkpoint-8")


def test_a_hidden_file_of_a_filesystem_or_a_download_harms_nobody(finished, tmp_path):
    shutil.copytree(files.checkpoints(finished)[0], tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8" / ".nfs0001").write_bytes(b"x")
    (tmp_path / "checkpoint-8" / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / "checkpoint-8" / ".cache" / "huggingface" / "model.safetensors.lock").write_bytes(b"")
    files.verify(tmp_path / "checkpoint-8")


class Notes(TrainerCallback):
    """Puts a file of its own into every checkpoint, as callbacks of users do."""

    def on_save(self, args, state, control, **kwargs) -> None:
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / "notes.txt").write_text("mine")


@pytest.mark.parametrize("late", [False, True], ids=["given to the trainer", "added later"])
def test_files_of_callbacks_belong_to_the_checkpoint(tmp_path, late):
    trainer = resumable_run.make("sft", tmp_path / "run", max_steps=4, callbacks=[] if late else [Notes()])
    if late:
        trainer.add_callback(Notes())
    trainer.train()
    for path in files.checkpoints(tmp_path / "run"):
        files.verify(path)
        (path / "notes.txt").write_text("changed")
        with pytest.raises(files.DamagedCheckpoint, match=r"notes\.txt"):
            files.verify(path)
