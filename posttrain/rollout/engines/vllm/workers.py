"""Threads for calls that wait for servers: as many as there are calls, kept for the next ones, gone with the process."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

log = logging.getLogger(__name__)

Job = Callable[[], None]
T = TypeVar("T")

IDLE_SECONDS = 10.0


class Workers:
    """`submit` never waits. The threads are daemons: a call that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads that wait for a job, less the jobs that wait for them

    def submit(self, job: Job) -> None:
        with self._lock:
            hire = self._free == 0
            self._free -= not hire
        if hire:
            threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True).start()
        else:
            self._jobs.put(job)

    def _work(self, job: Job) -> None:
        while True:
            try:
                job()
            except Exception:  # jobs hand their errors over themselves; this one is a fault of ours
                log.exception("A job of %s failed.", self._name)
            with self._lock:
                self._free += 1
            next_job = self._next()
            if next_job is None:
                return
            job = next_job

    def _next(self) -> Job | None:
        while True:
            try:
                return self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._free:  # nobody counts on this thread
                        self._free -= 1
                        return None


def at_once(functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """What each function returns or raises, all run at the same time; each must have a deadline of its own."""
    found: list[T | Exception] = [RuntimeError("not run")] * len(functions)

    def run(place: int) -> None:
        try:
            found[place] = functions[place]()
        except Exception as error:  # handed to the caller
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(1, len(functions))]
    for thread in threads:
        thread.start()
    if functions:
        run(0)
    for thread in threads:
        thread.join()
    return found


def side_by_side(count: int, act: Callable[[int], None], at_once: int) -> None:
    """`act(0)` to `act(count - 1)`, begun in this order, at most `at_once` at the same time. Each must have a deadline of its own.

    After the first error nothing more is begun; it is raised when what runs has ended, so that nobody works on behind the
    caller's back.
    """
    numbers, lock = iter(range(count)), threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                act(number)
            except BaseException as error:  # raised by the caller's thread
                errors.append(error)

    threads = [threading.Thread(target=work, name="parts", daemon=True) for _ in range(min(at_once, count) - 1)]
    for thread in threads:
        thread.start()
    try:
        work()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt of the caller itself
        errors.insert(0, error)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
