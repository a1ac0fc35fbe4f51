"""A command that is run to its end: signals are forwarded once, a second one kills the whole tree, and no process outlives it."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

FORWARDED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
WATCH_SECONDS = 1.0
KILL_WAIT_SECONDS = 10.0


@dataclass
class Ended:
    """How it ended. `signal`: the one that this process received meanwhile. `stopped`: `watch` ended it."""

    child_code: int
    signal: int | None = None
    stopped: bool = False

    @property
    def code(self) -> int:
        """As a shell counts: 128 and the signal's number, 130 after Control-C."""
        if self.signal is not None:
            return 128 + self.signal
        return self.child_code if self.child_code >= 0 else 128 - self.child_code


def run_child(command: list[str], watch: Callable[[], bool] | None = None, **popen: Any) -> Ended:
    """Run `command` and wait until it has ended by itself, however long it takes to save after a signal.

    `watch` is called every second; once it is true the child gets SIGTERM, with which a run saves and exits.

    `subprocess.run` gives a child a quarter of a second after Control-C and then kills it, which no checkpoint survives and
    which leaves torchrun's workers with nothing to end them. The child is in a session of its own: what is typed at the
    terminal reaches this process alone, so that it arrives below exactly once (a second signal makes a run leave unsaved).
    """
    child = _Child()
    with child.forwarding_signals():
        child.start(command, popen)
        try:
            code = child.wait(watch)
            child.wait_for_orphans(code)
        finally:
            child.terminate_remaining()
    return Ended(code, child.signal, child.stopped)


@dataclass
class _Child:
    process: subprocess.Popen | None = None
    signal: int | None = None
    stopped: bool = False
    family: set[psutil.Process] = field(default_factory=set)
    """All that were seen below: an orphan has no parent by which it could be found later."""
    below: list[psutil.Process] = field(default_factory=list)
    """Those that the child itself had started when a signal arrived."""

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are delivered to the main thread only
            return
        numbers = [getattr(signal, name) for name in FORWARDED_SIGNALS if hasattr(signal, name)]
        # what is ignored stays ignored: nohup, and a shell's background job
        before = {number: signal.getsignal(number) for number in numbers}
        handled = [number for number in numbers if before[number] is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self.on_signal)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def start(self, command: list[str], popen: dict[str, Any]) -> None:
        self.process = subprocess.Popen(command, start_new_session=True, **popen)
        if self.signal is not None:  # received while it was being started
            self.forward_signal()

    def wait(self, watch: Callable[[], bool] | None) -> int:
        while True:
            try:
                return self.process.wait(None if watch is None or self.stopped else WATCH_SECONDS)
            except subprocess.TimeoutExpired:
                if self.signal is None and watch():
                    self.record_descendants()
                    self.stopped = True
                    self.process.terminate()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.record_descendants()
        if self.signal is not None:
            self.kill()
            return
        self.signal = number
        name = signal.Signals(number).name
        print(f"{name}: waiting for the run to save and to end; once more kills it.", file=sys.stderr, flush=True)
        self.forward_signal()

    def forward_signal(self) -> None:
        if self.process is not None and not self.stopped:  # a second signal would make it leave unsaved
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                self.process.send_signal(self.signal)

    def record_descendants(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            self.below = own.children() or self.below
            self.family |= {own, *own.children(recursive=True)}

    def wait_for_orphans(self, code: int) -> None:
        """A child that died of the signal has not forwarded it (accelerate's launcher of one process): those below get it here."""
        sent = signal.SIGTERM if self.stopped else self.signal
        if sent is None or code != -sent:
            return
        for process in self.below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sent)
        _wait_until_ended(self.below)

    def kill(self) -> None:
        """psutil looks at start times: never a stranger that has got the number of one of them."""
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def terminate_remaining(self) -> None:
        """After the child: workers that outlived it. Before it, where an error ended the wait: all."""
        if self.process.poll() is None:
            self.record_descendants()
        self.kill()
        _wait_until_ended(self.family, KILL_WAIT_SECONDS)


def _wait_until_ended(processes: Iterable[psutil.Process], seconds: float = math.inf) -> None:
    """A zombie has ended: where orphans are not reaped (a container without an init process), it stays a zombie."""
    deadline = time.monotonic() + seconds
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
