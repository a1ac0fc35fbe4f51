"""Rollout workers as real processes that are forked with everything imported: they begin in a tenth of a second."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, reduction
from typing import Any

import pytest

from posttrain.core import faults
from posttrain.rollout.feed import child as program
from posttrain.rollout.feed.processes import WorkerProcesses, _Handle
from posttrain.rollout.feed.remote import OTHERS, packed
from tests.forked import ForkedProgram, _end_with_the_parent, _set_environment, _start, context, freeze


class Descriptors:
    """They are the same files in a process that is handed them, under other numbers."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in self.numbers]

    def __setstate__(self, passed: list[Any]) -> None:
        self.numbers = [one.detach() for one in passed]


LAUNCHED: list[ForkedWorker] = []
"""By the tests of this process."""


class ForkedWorker(ForkedProgram):
    def __init__(self, descriptors: Sequence[int], plan: bytes, environment: Mapping[str, str]) -> None:
        self._process = context.Process(
            target=_work, args=(Descriptors(descriptors), plan, dict(environment)), daemon=True
        )
        self._asking = threading.Lock()
        if forkserver._forkserver._forkserver_address is None:
            _start(self._process)
        else:
            self._process.start()
        self.pid = self._process.pid
        LAUNCHED.append(self)

    def poll(self) -> int | None:
        with self._asking:  # two threads may ask, and the news can be read once
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.005)
        return code


def _work(descriptors: Descriptors, plan: bytes, environment: Mapping[str, str]) -> None:
    freeze()
    os.setsid()
    multiprocessing.process.current_process()._config.pop("daemon", None)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _set_environment(environment)
    faults.arm(environment.get(faults.VARIABLE))
    number, fixed, *places = descriptors.numbers
    try:
        program.work(program.FeedOverSocket(number), lambda: (*pickle.loads(plan), fixed, places))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def launch(workers: WorkerProcesses, child: Any, plan: Any) -> None:
    """In the place of `WorkerProcesses._launch`."""
    ours, its = socket.socketpair()
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
    descriptors = [its.fileno(), workers.fixed.descriptor, *(arena.descriptor for arena in workers.arenas)]
    with its:
        child.handle = _Handle(ForkedWorker(descriptors, packed(plan), environment), ours)


def use() -> None:
    """In this process, which may itself be one that was forked: it asks the fork server that it comes from."""
    if multiprocessing.parent_process() is not None:
        forkserver._forkserver.ensure_running = lambda: None
    WorkerProcesses._launch = launch


@pytest.fixture(scope="module")
def forked_workers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkerProcesses, "_launch", launch)
        yield
