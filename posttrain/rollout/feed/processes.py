"""WorkerProcesses: rollout workers as child processes of this machine, which map the memory that weights are published in."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain import core
from posttrain.rewards.runtime.frames import frame, read_frame, write_all
from posttrain.rollout.feed.child import Blueprint
from posttrain.rollout.feed.remote import LARGEST_MESSAGE, OTHERS, Child, RemoteWorkers, packed


@dataclass
class _Handle:
    popen: subprocess.Popen
    socket: socket.socket


class WorkerProcesses(RemoteWorkers):
    def _launch(self, child: Child, plan: Blueprint) -> None:
        ours, its = socket.socketpair()
        package = str(Path(core.__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        places = [arena.descriptor for arena in self.arenas]
        given = packed(plan, self.fixed.descriptor, places)
        with its:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.rollout.feed.child", str(its.fileno()), str(os.getpid())],
                pass_fds=(its.fileno(), self.fixed.descriptor, *places),
                env=environment,
                start_new_session=True,
            )
        child.handle = _Handle(popen, ours)
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the reader of its socket sees that
            write_all(ours.fileno(), frame(pickle.dumps(sys.path)) + frame(given))

    def _receive(self, child: Child) -> bytes | None:
        return read_frame(child.handle.socket.fileno(), LARGEST_MESSAGE)

    def _reply(self, child: Child, answer: bytes) -> None:
        write_all(child.handle.socket.fileno(), frame(answer))

    def _kill(self, child: Child) -> None:
        self._signal(child)
        child.ended_with = child.handle.popen.wait()

    def _forget(self, child: Child) -> None:
        child.handle.socket.close()

    def _look_after(self, child: Child) -> None:
        """Kill one that shows no sign of life: the reader of its socket then sees its end."""
        if time.monotonic() - child.last_seen > child.patience and child.handle.popen.poll() is None:
            self._signal(child)

    def _signal(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):  # it and all that it started are gone already
            os.killpg(child.handle.popen.pid, signal.SIGKILL)
