"""Calls of vLLM servers: how long each may take, and several at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from posttrain.serve.wire.collective import in_background

One, T = TypeVar("One"), TypeVar("T")


@dataclass(frozen=True)
class Deadlines:
    """Seconds. No wait of the trainer for a server is longer than these say."""

    connect: float = 5.0
    health: float = 5.0  # for one question; two unanswered ones and the server counts as down
    control: float = 60.0  # info, cache reset, sleep, wake, the beginning of an update
    completion: float = 1800.0  # one completion, from when it was sent until it is here
    part: float = 120.0  # one bucket of weights
    commit: float = 600.0  # until running requests ended and the weights are loaded
    start: float = 1800.0  # a server process, until it answers
    back: float = 1800.0  # how long a run waits while no server is up

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1e6:
                raise ValueError(f"Deadlines: `{name}` is {value!r}; it must be a number of seconds above 0.")


# Calls of several servers, each on a daemon thread of its own: one that hangs does not keep the process alive.


def in_parallel(function: Callable[[One], T], items: Iterable[One]) -> list[T | BaseException]:
    """What `function(item)` returns or raises, for all items at the same time; it must have a deadline of its own."""
    running = [in_background(partial(function, item), "calls") for item in items]
    return [one.exception() or one.result() for one in running]


def parallel_calls(count: int, act: Callable[[int], None], limit: int) -> None:
    """`act(0)` to `act(count - 1)`, begun in this order, at most `limit` at the same time. Each must have a deadline of its own.

    After the first error nothing more is begun; it is raised when what runs has ended, so that nothing works on behind the
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

    others = [in_background(work, "parts") for _ in range(min(limit, count) - 1)]
    try:
        work()
        wait(others)
    except BaseException as error:  # an interrupt of the caller itself
        errors.insert(0, error)
    wait(others)
    if errors:
        raise errors[0]
