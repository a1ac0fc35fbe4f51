"""Children of tests: what they say, how they end, and that no wait for one goes on after its death."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.forked import Child


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (lambda: None, 0),
        (lambda: exit(5), 5),
        (lambda: exit("a reason"), 1),
        (lambda: 1 / 0, 1),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
)
def test_a_child_says_how_it_ended_and_what_it_wrote(tmp_path, monkeypatch, ending, code):
    monkeypatch.setenv("OF_THIS_TEST", "it is here")

    def run():
        print(os.environ["OF_THIS_TEST"], flush=True)
        os.write(2, b"an error\n")
        ending()

    child = Child(run, tmp_path / "log")
    assert child.wait() == code
    assert child.output().startswith("it is here\nan error\n")
    assert ("ZeroDivisionError" in child.output()) == (child.output() != "it is here\nan error\n")


def test_a_child_is_not_forked_from_the_worker_and_its_thread_is_alone(tmp_path):
    stop, answer = threading.Event(), tmp_path / "answer"
    threading.Thread(target=stop.wait, daemon=True).start()

    def run():
        answer.write_text(f"{os.getppid()} {threading.active_count()}")

    assert Child(run, tmp_path / "log").wait() == 0
    stop.set()
    server, threads = answer.read_text().split()
    assert int(server) != os.getpid()
    assert threads == "1"


def test_a_wait_notices_a_child_that_has_died(tmp_path):
    child = Child(lambda: os.kill(os.getpid(), signal.SIGSEGV), tmp_path / "log")
    with pytest.raises(AssertionError, match="the child ended with -11 before it was ready"):
        child.wait_until(lambda: False, "it was ready")


def test_a_wait_has_a_deadline_and_ends_the_child(tmp_path):
    child = Child(lambda: time.sleep(600), tmp_path / "log")
    with pytest.raises(AssertionError, match=r"within 0\.1 s"):
        child.wait_until(lambda: False, "it was ready", 0.1)
    with pytest.raises(TimeoutError, match=r"longer than 0\.1 s"):
        child.wait(0.1)
    assert child.wait() == -signal.SIGKILL
