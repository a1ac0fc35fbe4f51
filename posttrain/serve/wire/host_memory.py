"""Host memory that is used again from version to version: the first touch of fresh pages costs several times the copy itself.

No code hands memory back, so none can do it too early: it comes back by itself when the last view of it is gone. What serves,
what is kept to go back to, and what a late thread still writes to are held by their users, and so are not given out again.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict

import numpy as np

SMALL_BYTES = 1 << 20
"""Below this the allocator of the process is as good."""


class HostMemory:
    """Blocks of exact sizes: one version of a model is laid out as the next. Any thread may take."""

    def __init__(self, keeps: bool = True) -> None:
        self._keeps = keeps  # False: what comes back is given to the system
        self._lock = threading.RLock()  # entered again where a collection of garbage inside of it hands a block back
        self._idle: dict[int, list[np.ndarray]] = defaultdict(list)
        self._idle_before: dict[int, list[np.ndarray]] = {}  # since before the last `renew`

    def renew(self) -> None:
        """A version begins. What the last one did not use is freed, so that no more is held than two versions need."""
        with self._lock:
            self._idle, self._idle_before = defaultdict(list), self._idle

    def take(self, nbytes: int) -> memoryview:
        """Bytes that are not held elsewhere; their content is undefined."""
        if nbytes < SMALL_BYTES:
            return memoryview(np.empty(nbytes, np.uint8))
        with self._lock:
            idle = self._idle_before.get(nbytes) or self._idle.get(nbytes)
            block = idle.pop() if idle else np.empty(nbytes, np.uint8)
        held = block.view()  # all views that are given out hold this object, and it holds the block
        weakref.finalize(held, self._give_back, block).atexit = False
        return memoryview(held)

    def _give_back(self, block: np.ndarray) -> None:
        if self._keeps:
            with self._lock:
                self._idle[block.nbytes].append(block)

    @property
    def idle_bytes(self) -> int:
        """How much is held for the next version."""
        with self._lock:
            blocks = [block for table in (self._idle, self._idle_before) for same in table.values() for block in same]
        return sum(block.nbytes for block in blocks)


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """As `target[:] = source`, without the lock of the interpreter, so that several threads copy at once."""
    if len(source) != len(target):
        raise ValueError(f"{len(source)} bytes were to be copied to a place of {len(target)}.")
    if len(target):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
