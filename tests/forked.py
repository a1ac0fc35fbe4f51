"""Run a function in a real child process that starts with everything imported already.

Children are forked from multiprocessing's fork server: a fresh process with one thread that holds nothing but imports, started with
the first child. The pytest worker itself is never forked: it has threads (progress bars, servers, pools), and a fork copies their
locks and their half-done work without them. The function and what it closes over travel by value; what a test patches in its own
process is not patched in a child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle

from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
PRELOADED = ("torch", "datasets", "peft", "pytest", "tests.forked", "tests.trainer.resumable_run", "tests.trust.runs")
ENVIRONMENT = {
    **os.environ,
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),  # no pools of threads
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}
RUNNING: set[Child] = set()
DEADLINE_S = 300.0  # of a child that takes a few seconds on an idle machine

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(list(PRELOADED))


def end_all() -> None:
    """Kill the children that a failed test left behind."""
    while RUNNING:
        RUNNING.pop().end()


class Child:
    """A process of its own. `wait` gives its return code; a negative one is the signal that ended it."""

    def __init__(self, function: Callable[[], object], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self.process = context.Process(target=_run, args=(cloudpickle.dumps(function), str(log), dict(os.environ)))
        with _environment_of_the_server():
            self.process.start()
        RUNNING.add(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, seconds: float = DEADLINE_S, end: bool = True) -> int:
        """Until it has ended. After `seconds` it is killed, unless `end` is False, and TimeoutError is raised."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            if end:
                end_all()
            raise TimeoutError(f"the child ran longer than {seconds} s:\n{self.output()}")
        RUNNING.discard(self)
        return code

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = DEADLINE_S) -> None:
        """Until `condition` holds. An error if the child ends before it does, or after `seconds`."""
        eventually(lambda: condition() or self.process.exitcode is not None, seconds)
        if not condition():
            raise AssertionError(f"the child ended with {self.process.exitcode} before {what}:\n{self.output()}")

    def signal(self, number: int) -> None:
        """Nothing happens to a child that has ended."""
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()
        RUNNING.discard(self)

    def output(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def _environment_of_the_server() -> Iterator[None]:
    """It is started with the first child, whatever the test of that child has made of its environment."""
    before = dict(os.environ)
    _set_environment(ENVIRONMENT)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(wanted: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(wanted)


def _run(function: bytes, log: str, environment: dict[str, str]) -> None:
    """In the child."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "a", buffering=1)
    _set_environment(environment)
    code = _exit_code(function)
    sys.stdout.flush()
    os._exit(code)


def _exit_code(function: bytes) -> int:
    import torch

    try:
        if sys.platform == "linux" and (threads := len(os.listdir(f"/proc/{os.getppid()}/task"))) != 1:
            raise RuntimeError(f"the fork server has {threads} threads, and must have one: an import has started them.")
        torch.set_num_threads(1)
        cloudpickle.loads(function)()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
