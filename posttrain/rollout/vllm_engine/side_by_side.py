"""The same thing done for many numbers by a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
