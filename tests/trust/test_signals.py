"""SIGTERM and SIGINT: finish the step, save, leave; once more: leave at once. What was saved is where the run goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from posttrain.core import faults
from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import Child
from tests.trainer import resumable_run
from tests.trust import runs

SLOW_FILE_S = 600


def wait_for(path: Path, child: Child, lines: int) -> None:
    child.wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) >= lines, f"{path.name} had {lines} lines"
    )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(files.PREFIX))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "slow_save", [pytest.param(False, id="idle", marks=pytest.mark.trust), pytest.param(True, id="while-saving")]
)
def test_one_signal_saves_and_leaves_and_the_run_goes_on_bit_identically(tmp_path, number, slow_save, figure):
    folder = tmp_path / "run"
    fault = runs.SLOW_SAVE if slow_save else ""
    signalled = tmp_path / "signalled"
    step = 3 if slow_save else 4  # with slow files, the save of step 2 is in flight
    child = runs.start("sft", folder, fault=fault, callbacks=[resumable_run.Hold(step, signalled)])
    wait_for(folder / "row_order.jsonl", child, step)
    began = time.monotonic()
    child.signal(number)
    signalled.touch()
    code = child.wait()
    seconds = time.monotonic() - began
    assert code == (128 + number if number == signal.SIGTERM else 1), child.output()
    assert number == signal.SIGTERM or "KeyboardInterrupt" in child.output()
    assert not list(folder.glob("*.tmp-*"))  # the save in flight was finished
    last = step_of(files.checkpoints(folder)[0])
    trained = len((folder / "row_order.jsonl").read_text().splitlines())
    assert last == trained  # no step was lost
    assert last < 8
    runs.finish("sft", folder)
    runs.finish("sft", tmp_path / "quiet")
    assert not runs.differences(tmp_path / "quiet", folder)
    when = "while saving" if slow_save else "between saves"
    figure(
        f"{signal.Signals(number).name} {when}", 1, f"0 steps lost, left after {seconds:.2f} s", "one step + one save"
    )


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.trust), signal.SIGINT])
def test_a_second_signal_leaves_at_once_even_while_saving(tmp_path, number, figure):
    """Every file of a save takes longer here than the child is waited for. Also where SIGINT was ignored, as under nohup."""
    folder = tmp_path / "run"
    child = Child(lambda: slow_saves(folder), tmp_path / "log")
    child.wait_until(lambda: list(folder.glob("checkpoint-8.tmp-*")), "the last save had begun")
    child.signal(number)
    child.wait_until(lambda: "once more to leave at once" in child.output(), "it had noticed the first signal")
    began = time.monotonic()
    child.signal(number)
    code = child.wait(SLOW_FILE_S / 2)
    seconds = time.monotonic() - began
    assert code == (-number if number == signal.SIGTERM else 1), child.output()
    for path in files.checkpoints(folder):
        files.verify(path)
    runs.finish("sft", folder)
    assert not list(folder.glob("*.tmp-*"))
    runs.finish("sft", tmp_path / "quiet")
    assert not runs.differences(tmp_path / "quiet", folder)
    figure(f"{signal.Signals(number).name} twice", 1, f"left after {seconds:.2f} s", "at once")


def slow_saves(folder: Path) -> None:
    faults.SLOW_SECONDS = SLOW_FILE_S
    faults.arm("slow:save.file:*")
    resumable_run.main("sft", folder, save_steps=8)
