"""A disk that is full, cannot be written to, or is used by somebody else: real small filesystems and real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import TrainerCallback

from posttrain import SFTTrainer
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.sources.named import load_source
from posttrain.data.store.prepare import prepare_dataset
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import EXIT_CODE
from tests import tiny
from tests.forked import Child
from tests.trainer import resumable_run
from tests.trust import runs


@contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A filesystem of so many bytes. Needs the right to mount."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(scope="module")
def checkpoint_bytes(tmp_path_factory) -> int:
    """What one checkpoint of the runs here takes on a disk."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    runs.finish("sft", folder, max_steps=2, **WIDE)
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in (folder / "checkpoint-2").iterdir())


WIDE = {"rows": 12, "eval_strategy": "no"}
ROOM = 2**17  # for the other files of a run


def test_a_disk_that_fills_up_loses_nothing_that_was_saved(tmp_path, checkpoint_bytes, figure):
    """Room for two checkpoints of four, with the check of the free space and without it (so that writing itself fails)."""
    for checked in (True, False):
        spare = 0 if checked else -(10**12)
        with small_disk(tmp_path / f"small-{checked}", 2 * checkpoint_bytes + ROOM) as disk:
            log = tmp_path / f"{checked}.log"
            child = runs.start("sft", disk / "run", room_to_spare=spare, log=log, **WIDE)
            assert child.wait() == EXIT_CODE, child.output()
            said = [line for line in child.output().splitlines() if "was not saved" in line]
            assert len(said) == 3  # steps 6 and 8, and once more that the last one is missing
            assert re.search(
                r"step 6 was not saved: .*[\d,]+ bytes needed, [\d,]+ bytes free for .*checkpoint-6", said[0]
            )
            assert [path.name for path in files.checkpoints(disk / "run")] == ["checkpoint-4", "checkpoint-2"]
            for path in files.checkpoints(disk / "run"):
                files.verify(path)
            assert not list((disk / "run").glob("*.tmp-*"))
            steps = [json.loads(line)["step"] for line in (disk / "run" / "row_order.jsonl").read_text().splitlines()]
            assert steps[: len(range(1, 5))] == [1, 2, 3, 4]
    figure("disk full during saves", 4, "training went on, earlier checkpoints intact, status 74", "the same")


def test_a_disk_too_small_for_the_tokens_is_an_error_that_names_the_rows(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in tiny.chats(2000)))
    with small_disk(tmp_path / "small", 2**15) as disk, pytest.raises(OSError) as error:
        prepare_dataset(
            load_source(str(data)), SFTTrainer.formats, Renderer(tiny.tokenizer()), PrepareOptions(cache_dir=str(disk))
        )
    assert f"the tokens of 2,000 rows of {data} could not be written (No space left on device; " in str(error.value)
    assert "another folder with `dataset_cache_dir`" in str(error.value)


class Ballast(TrainerCallback):
    """Something large on the disk, which goes away after a step."""

    def __init__(self, path: Path, size: int, until: int) -> None:
        self.path, self.size, self.until = path, size, until

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.path.write_bytes(b"x" * self.size)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.until:
            self.path.unlink()


def test_when_there_is_room_again_the_next_save_succeeds(tmp_path, checkpoint_bytes, figure):
    with small_disk(tmp_path / "small", 4 * checkpoint_bytes + ROOM) as disk:
        ballast = Ballast(disk / "ballast", int(3.5 * checkpoint_bytes), until=5)
        log = tmp_path / "log"
        child = runs.start("sft", disk / "run", room_to_spare=0, callbacks=[ballast], log=log, **WIDE)
        assert child.wait() == 0, child.output()
        assert [path.name for path in files.checkpoints(disk / "run")] == ["checkpoint-8", "checkpoint-6"]
        shutil.copytree(disk / "run", tmp_path / "run")
    runs.finish("sft", tmp_path / "quiet", **WIDE)
    assert not runs.differences(tmp_path / "quiet", tmp_path / "run")
    figure("disk full for a while", 2, "the next save succeeded, run bit-identical", "the same")


def test_room_is_made_only_if_a_good_checkpoint_stays(tmp_path, checkpoint_bytes):
    """Room for two: with a limit of 2 the older of two is deleted first; with a limit of 1 the only one is not."""
    for limit, expected, code in ((2, ["checkpoint-8", "checkpoint-6"], 0), (1, ["checkpoint-2"], EXIT_CODE)):
        room = 2 if limit == 2 else 1
        with small_disk(tmp_path / f"small-{limit}", room * checkpoint_bytes + ROOM) as disk:
            options = WIDE | {"save_total_limit": limit, "room_to_spare": 0}
            child = runs.start("sft", disk / "run", log=tmp_path / f"{limit}.log", **options)
            assert child.wait() == code, child.output()
            assert [path.name for path in files.checkpoints(disk / "run")] == expected
            for path in files.checkpoints(disk / "run"):
                files.verify(path)


def test_a_read_only_filesystem_is_refused_before_training(tmp_path, figure):
    with small_disk(tmp_path / "small", 2**20) as disk:
        (disk / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        child = runs.start("sft", disk / "run", log=tmp_path / "log", **WIDE)
        assert child.wait() == 1
        assert "`output_dir` cannot be written to (Read-only file system)" in child.output()
        assert not list((disk / "run").iterdir())
    figure("read-only directory", 1, "refused before the first step", "the same")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_without_permission_is_refused_before_training(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    for parent in [tmp_path, *tmp_path.parents][:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    (tmp_path / "tokens").mkdir(mode=0o777)
    (tmp_path / "tokens").chmod(0o777)

    def as_nobody() -> None:
        os.setuid(65534)
        resumable_run.main("sft", folder, dataset_cache_dir=str(tmp_path / "tokens"), **WIDE)

    child = Child(as_nobody, tmp_path / "log")
    assert child.wait() == 1
    assert "`output_dir` cannot be written to (Permission denied)" in child.output()


def test_a_second_process_on_the_folder_is_refused_at_once(tmp_path, figure):
    """While the first one is still in its first step, which lasts longer than anybody here waits for the second."""
    folder = tmp_path / "run"
    asleep, refused = tmp_path / "asleep", tmp_path / "refused"
    first = runs.start("sft", folder, callbacks=[resumable_run.Slow(600, asleep)])
    first.wait_until(asleep.exists, "it had made a step")

    def second() -> None:
        trainer = resumable_run.make("sft", folder)
        began = time.monotonic()
        try:
            trainer.train()
        except RuntimeError as error:
            refused.write_text(json.dumps([time.monotonic() - began, str(error)]))

    child = Child(second, tmp_path / "second.log")
    assert child.wait() == 0, child.output()
    seconds, said = json.loads(refused.read_text())
    assert f"pid {first.pid}" in said
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.output()
    runs.finish("sft", folder)  # a killed run leaves no lock behind
    figure("two processes, one directory", 1, f"second refused after {seconds * 1000:.0f} ms", "at once")
