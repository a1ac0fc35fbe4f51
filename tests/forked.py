"""Run a function in a real child process that starts with everything imported already."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

RUNNING: set[int] = set()


def end_all() -> None:
    """Kill the children that a failed test left behind."""
    while RUNNING:
        pid = RUNNING.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Child:
    """A forked process. `wait` gives its return code; a negative one is the signal that ended it."""

    def __init__(self, function: Callable[[], object], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(function, log))
        RUNNING.add(self.pid)

    def wait(self, seconds: float = 120, end: bool = True) -> int:
        """Until it has ended. After `seconds` it is killed, unless `end` is False, and TimeoutError is raised."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                RUNNING.discard(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        if end:
            end_all()
        raise TimeoutError(f"the child ran longer than {seconds} s:\n{self.log.read_text()}")

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def _run(function: Callable[[], object], log: Path) -> int:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "a", buffering=1)  # pytest's capture belongs to the parent
    try:
        function()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
