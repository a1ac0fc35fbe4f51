"""Recent: what was used last, of at most so many bytes and entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """For any number of threads. An entry that is larger than all of it together is not kept."""

    def __init__(self, most_bytes: int, most_entries: int) -> None:
        self.most_bytes, self.most_entries = most_bytes, most_entries
        self.num_bytes = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """In the place of what was there; the least recently used make room."""
        with self._lock:
            self._drop(key)
            if num_bytes > self.most_bytes:
                return
            self._kept[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self.most_bytes or len(self._kept) > self.most_entries:
                self._drop(next(iter(self._kept)))

    def forget(self, keys: Iterable[K]) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def _drop(self, key: K) -> None:
        self.num_bytes -= self._kept.pop(key, (None, 0))[1]

    def __len__(self) -> int:
        return len(self._kept)
