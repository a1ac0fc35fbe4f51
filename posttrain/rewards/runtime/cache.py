"""Remembered values of pure rewards: those that depend on nothing but the sample."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from typing import Any


class RewardCache:
    """The most recently used values, by function and arguments."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hits = 0
        self._known: OrderedDict[bytes, tuple[float | None, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: bytes | None) -> tuple[float | None, dict[str, Any]] | None:
        """(value, what it logged), or None where it is not known."""
        if key is None or key not in self._known:
            return None
        self._known.move_to_end(key)
        self.hits += 1
        return self._known[key]

    def put(self, key: bytes | None, value: float | None, extras: dict[str, Any]) -> None:
        if key is None:
            return
        self._known[key] = (value, extras)
        self._known.move_to_end(key)
        while len(self._known) > self.size:
            self._known.popitem(last=False)


def cache_key(function: int, arguments: dict[str, Any]) -> bytes | None:
    """Equal for equal arguments; None for arguments that cannot be pickled, which are not remembered.

    `fast` writes every object out in full: with pickle's memo, equal values have different bytes when they share parts.
    """
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    try:
        pickler.dump((function, arguments))
    except Exception:  # every type refuses in its own way, and not to remember is always right
        return None
    return hashlib.sha256(buffer.getbuffer()).digest()
