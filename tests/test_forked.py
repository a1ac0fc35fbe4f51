"""Children of tests: what they say, how they end, and that no wait for one goes on after its death."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from tests import forked
from tests.forked import Child, ForkedProgram, run_command, run_function, start_group, wait_for_group
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        (lambda: None, 0, "an error"),
        (lambda: exit(5), 5, "an error"),
        (lambda: exit("a reason"), 1, "a reason"),
        (lambda: 1 / 0, 1, "ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "an error"),
    ],
    ids=["returns", "exits", "gives a reason", "fails", "is killed"],
)
def test_a_child_says_how_it_ended_and_what_it_wrote(tmp_path, monkeypatch, ending, code, last):
    monkeypatch.setenv("OF_THIS_TEST", "it is here")

    def run():
        print(os.environ["OF_THIS_TEST"], flush=True)
        os.write(2, b"an error\n")
        ending()

    child = Child(run, tmp_path / "log")
    assert child.wait() == code
    assert child.output().startswith("it is here\nan error\n")
    assert child.output().splitlines()[-1] == last


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


def test_a_group_meets_at_the_store_of_the_test(tmp_path):
    def run(rank):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ranks = torch.tensor([rank + 1.0])
        dist.all_reduce(ranks)
        print(f"{rank} of {dist.get_world_size()}: {ranks.item()}")
        dist.destroy_process_group()

    group = start_group(2, run, tmp_path / "group")
    assert wait_for_group(group) == [0, 0]
    assert [child.output() for child in group] == ["0 of 2: 3.0\n", "1 of 2: 3.0\n"]


def test_a_group_does_not_wait_for_those_that_do_not_notice_a_death(tmp_path, monkeypatch):
    monkeypatch.setattr(forked, "AFTER_A_DEATH_S", 0.1)
    group = start_group(2, lambda rank: exit(3) if rank else time.sleep(600), tmp_path / "group")
    assert wait_for_group(group) == [-signal.SIGKILL, 3]


def test_a_command_runs_in_its_folder_with_its_environment(tmp_path):
    done = run_command("sft", "missing.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("posttrain sft: ")
    assert "missing.yaml" in done.stderr


def test_a_library_in_a_child_has_read_the_environment_of_the_child(tmp_path):
    def ask():
        from huggingface_hub import HfApi, constants

        print(os.getcwd(), HfApi().endpoint, constants.HF_HUB_OFFLINE)

    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = run_function(ask, cwd=tmp_path, environment=environment)
    assert done.stdout.split() == [str(tmp_path), "http://127.0.0.1:9", "False"]
    assert done.stderr == ""


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_replaced(tmp_path, monkeypatch):
    assert Child(lambda: None, tmp_path / "first").wait() == 0
    os.kill(forked.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    with monkeypatch.context() as short:
        short.setattr(forked, "START_S", 0.5)
        with pytest.raises(TimeoutError, match=r"did not start a child within 0\.5 s"):
            Child(lambda: None, tmp_path / "second")
    assert Child(lambda: None, tmp_path / "third").wait() == 0


@pytest.mark.slow
def test_a_forked_program_ends_with_the_process_that_started_it(tmp_path):
    def owner():
        program = ForkedProgram(lambda: time.sleep(600), tmp_path / "program.log", os.environ)
        (tmp_path / "pid.new").write_text(str(program.pid))
        (tmp_path / "pid.new").rename(tmp_path / "pid")
        time.sleep(600)

    child = Child(owner, tmp_path / "log")
    child.wait_until((tmp_path / "pid").exists, "its program had begun")
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    child.end()
    eventually(lambda: not psutil.pid_exists(pid))
