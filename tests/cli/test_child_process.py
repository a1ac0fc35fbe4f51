"""Control-C: real processes get real signals, save, and leave nobody behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cli.runs import flags, options_of, posttrain
from tests.forked import Child

ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import os, signal, subprocess, sys, time

stubborn = sys.argv[1] == "stubborn"
heard = []
signal.signal(signal.SIGINT, lambda *given: heard.append("INT"))
signal.signal(signal.SIGTERM, lambda *given: heard.append("TERM"))
below = subprocess.Popen(  # as torchrun starts its workers
    [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"],
    start_new_session=True,
)
open("pids", "w").write(f"{os.getpid()} {below.pid}")
os.rename("pids", "started")
end = time.monotonic() + 60  # where the test has failed
while (stubborn or not heard) and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.5)  # twice what subprocess.run would wait
open("saved", "w").write(" ".join(heard))
sys.exit(7)
"""


_started: list[subprocess.Popen] = []


def started(folder, *command, **popen):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    _started.append(subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **popen))
    return _started[-1]


@pytest.fixture(autouse=True)
def _nobody_outlives_a_failed_test():
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
            process.wait()


def until(condition, process=None, seconds=120.0):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, "the process ended before it happened"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


def with_a_child(folder, kind):
    (folder / "child.py").write_text(CHILD)
    run = f"run([sys.executable, 'child.py', {kind!r}], {{}})"
    code = f"import sys; from posttrain.cli.running.processes import run; sys.exit({run})"
    process = started(folder, sys.executable, "-c", code, stderr=subprocess.PIPE, text=True)
    until((folder / "started").exists, process)
    return process, [int(pid) for pid in (folder / "started").read_text().split()]


def is_there(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("to", ["the group, as a terminal does", "the process alone"])
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM")])
def test_a_child_may_save_hears_a_signal_once_and_leaves_no_orphan(tmp_path, number, name, to):
    process, pids = with_a_child(tmp_path, "patient")
    (os.kill if to == "the process alone" else os.killpg)(process.pid, number)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number, told
    assert (tmp_path / "saved").read_text() == name
    assert "once more kills it" in told
    assert "Traceback" not in told
    assert not any(map(is_there, pids))


LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "child.py", "patient"]).wait()  # as accelerate starts one process: no handler of its own
"""


CONTAINER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become its children, and it does not wait for them
command = subprocess.Popen([sys.executable, "command.py"])
open("pid", "w").write(str(command.pid))
sys.exit(command.wait())
"""
"""Process 1 of a container without an init process."""


@pytest.mark.parametrize("outer", ["command.py", "container.py"])
def test_below_a_launcher_that_dies_of_the_signal_the_run_saves(tmp_path, outer):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    code = "import sys; from posttrain.cli.running import processes; sys.exit(processes.run([sys.executable, 'launcher.py'], {}))"
    (tmp_path / "command.py").write_text(code)
    (tmp_path / "container.py").write_text(CONTAINER)
    process = started(tmp_path, sys.executable, outer, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "started").exists, process)
    inner = int((tmp_path / "pid").read_text()) if outer == "container.py" else process.pid
    os.kill(inner, signal.SIGTERM)
    told = process.communicate(timeout=120)[1]
    assert (tmp_path / "saved").exists(), told
    assert (tmp_path / "saved").read_text() == "TERM"
    assert process.returncode == 143
    assert not any(is_there(int(pid)) for pid in (tmp_path / "started").read_text().split())


def test_a_second_control_c_kills_the_whole_tree(tmp_path):
    process, pids = with_a_child(tmp_path, "stubborn")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.7)
    assert all(map(is_there, pids))
    os.killpg(process.pid, signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert not any(map(is_there, pids))


def test_exit_codes_of_children_are_handed_on(tmp_path):
    code = "import sys; from posttrain.cli.running import processes; sys.exit(processes.run([sys.executable, '-c', {!r}], {{}}))"
    for script, wanted in (("exit(0)", 0), ("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert started(tmp_path, sys.executable, "-c", code.format(script)).wait(timeout=60) == wanted


def logged_steps(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines]


def long_run(**changes):
    endless = {"max_steps": 100_000, "save_strategy": "steps", "save_steps": 100_000, "logging_steps": 1}
    return {**options_of("sft"), **endless, **changes}


def test_control_c_in_one_process_saves_and_prints_no_traceback(folder):
    def command():
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(posttrain("sft", *flags(long_run())))

    process = Child(command, folder / "log")
    process.wait_until(lambda: len(logged_steps(folder / "out-sft")) > 2, "it had logged three steps")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130, process.output()
    assert "Traceback" not in process.output()
    assert list((folder / "out-sft").glob("checkpoint-*"))


@pytest.mark.slow
def test_two_processes_without_a_gpu_are_one_run_and_control_c_saves_it(folder):
    """Started by the command with torchrun, without --use_cpu: each process must still know of the other."""
    options = long_run(num_processes=2)
    del options["use_cpu"]
    process = started(
        folder, sys.executable, "-m", "posttrain.cli.main", "sft", *flags(options),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    until(lambda: len(logged_steps(folder / "out-sft")) > 2, process)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3  # torchrun and two workers
    os.killpg(process.pid, signal.SIGINT)
    told = process.communicate(timeout=120)[0]
    assert process.returncode == 130, told[-3000:]
    assert "x 2 processes" in told
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below)
    (checkpoint,) = (folder / "out-sft").glob("checkpoint-*")
    assert len(list(checkpoint.glob("rng*.json"))) == 2, sorted(file.name for file in checkpoint.iterdir())


@pytest.mark.slow
def test_control_c_in_a_sweep_lets_the_trial_save_and_the_same_command_goes_on(folder):
    options = long_run()
    del options["output_dir"]
    given = {"method": "sft", "options": options, "over": {"seed": [1, 2]}, "output_dir": "sweep"}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))

    def command():
        os.setsid()  # Control-C reaches a group
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(posttrain("sweep", "sweep.yaml"))

    process = Child(command, folder / "log")  # its trials are real commands
    logged = lambda: any(len(logged_steps(trial)) > 2 for trial in (folder / "sweep").glob("*"))  # noqa: E731
    process.wait_until(logged, "a trial had logged three steps")
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    code, told = process.wait(), process.output()
    assert code == 130, told
    assert "Traceback" not in told
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in below)
    trials = [trial for trial in (folder / "sweep").iterdir() if trial.is_dir()]
    assert len(trials) == 1  # the second was not begun
    assert list(trials[0].glob("checkpoint-*"))
    assert "the same command continues it" in told
