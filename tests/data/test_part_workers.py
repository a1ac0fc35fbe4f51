"""Parts are built by this process and by fresh ones beside it, used in order, and whatever happens to a helper is noticed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import psutil
import pytest

from posttrain.data.options import PrepareOptions
from posttrain.data.store.part_workers import build_parts
from tests.waiting import eventually

PARTS = 12


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def by_both(folder, in_helper=lambda number: None):
    """Builds a part by writing down who did. Here, the first waits until a helper has taken one; a helper waits until one was taken
    here: it starts in 0.1 s, for which this process may well stand still."""
    here = os.getpid()

    def takers():
        return {int(path.name.split("-")[2]) for path in folder.glob("taken-*")}

    def build(number):
        (folder / f"taken-{number}-{os.getpid()}").touch()
        if os.getpid() != here:
            eventually(lambda: here in takers())
            in_helper(number)
        else:
            eventually(lambda: len(takers()) > 1)

    return build


def test_parts_are_built_by_several_processes_and_used_in_order(folder):
    used = []
    build_parts(by_both(folder), used.append, PARTS, 3, folder)
    assert used == list(range(PARTS))
    taken = sorted(int(path.name.split("-")[1]) for path in folder.glob("taken-*"))
    assert taken == list(range(PARTS))  # each once
    assert len({path.name.split("-")[2] for path in folder.glob("taken-*")}) > 1


def test_nothing_is_forked(folder, monkeypatch):
    """This process has threads, whose locks a fork would inherit locked."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("this process was forked"))
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    used = []
    build_parts(by_both(folder), used.append, PARTS, 2, folder)
    stop.set()
    assert used == list(range(PARTS))


def test_a_helper_starts_without_torch(folder):
    def note(number):
        (folder / "modules").write_text(str("torch" in sys.modules))

    both, options = by_both(folder, note), PrepareOptions()  # what a preparation hands over, besides its tokenizer

    def build(number):
        assert options.packing is None
        both(number)

    build_parts(build, lambda number: None, PARTS, 2, folder)
    assert (folder / "modules").read_text() == "False"


def test_a_failing_helper_is_reported(folder):
    def fail(number):
        raise MemoryError("no room")

    with pytest.raises(RuntimeError, match=r"A worker that prepared the dataset failed: (.|\n)*no room"):
        build_parts(by_both(folder, fail), lambda number: None, PARTS, 2, folder)


def test_a_killed_helper_is_reported(folder):
    def end(number):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RuntimeError, match="it ended with code -9"):
        build_parts(by_both(folder, end), lambda number: None, PARTS, 2, folder)


def test_an_error_here_ends_the_helpers(folder):
    both, here = by_both(folder), os.getpid()

    def fail(number):
        both(number)
        if os.getpid() == here:
            raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        build_parts(fail, lambda number: None, PARTS, 2, folder)
    helpers = {int(path.name.split("-")[2]) for path in folder.glob("taken-*")} - {os.getpid()}
    assert helpers
    for pid in helpers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_work_that_cannot_be_handed_over_is_done_here_and_said(folder, caplog):
    lock, used = threading.Lock(), []

    def build(number):
        with lock:
            (folder / f"taken-{number}-{os.getpid()}").touch()

    with caplog.at_level(logging.WARNING):
        build_parts(build, used.append, PARTS, 2, folder)
    assert used == list(range(PARTS))
    assert "The dataset is prepared by one process" in caplog.text
    assert "cannot pickle '_thread.lock' object" in caplog.text


def running_children():
    """Numbers of them; a zombie has ended. A command line says less: a process that begins or ends has none."""
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


class Unreadable:
    def __reduce__(self):
        return (int, ("not a number",))


def test_a_helper_that_cannot_read_its_work_is_done_without(folder, caplog):
    thing, used, others = Unreadable(), [], running_children()

    def build(number):
        assert thing
        if number == 0:
            eventually((folder / "error-0.txt").exists)
            eventually(lambda: running_children() <= others)

    with caplog.at_level(logging.WARNING):
        build_parts(build, used.append, PARTS, 2, folder)
    assert used == list(range(PARTS))
    assert "could not begin; others do its work" in caplog.text
    assert "invalid literal for int()" in caplog.text
