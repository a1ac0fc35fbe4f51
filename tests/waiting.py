"""Waiting in tests: always with a deadline, which is there for what never happens and not for what happens late."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 120.0


def eventually(holds: Callable[[], object], seconds: float = DEADLINE_S) -> None:
    """Until `holds()` is true; an error after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not come about within {seconds:g} s"
        time.sleep(0.01)
