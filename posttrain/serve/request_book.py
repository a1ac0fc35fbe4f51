"""Requests by their id: one that is sent again joins the first, or gets its stored answer; nothing runs twice."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from .errors import Conflict


@dataclass
class _Entry:
    digest: str
    task: asyncio.Task[bytes]


class RequestBook:
    """Answers of the latest requests. Used in the event loop only.

    Only successes are kept: where a request failed all of its work was ended, and sending it again is a new try.
    """

    def __init__(self, most_entries: int = 20_000, most_bytes: int = 512 << 20) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._bytes = 0
        self.joined = 0

    async def run(self, request_id: str, digest: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer of `work()`, done once for this id. The work goes on if this caller goes away."""
        entry = self._entries.get(request_id)
        if entry is None:
            entry = _Entry(digest, asyncio.ensure_future(work()))
            self._entries[request_id] = entry
            entry.task.add_done_callback(lambda task: self._finished(request_id, task))
        elif entry.digest != digest:
            raise Conflict(f"The request id {request_id} was used before with another body.")
        else:
            self.joined += 1
        return await asyncio.shield(entry.task)

    def _finished(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._entries[request_id]
            return
        self._bytes += len(task.result())
        finished = [key for key, entry in self._entries.items() if entry.task.done()] if self._is_full() else []
        for key in finished:
            if not self._is_full():
                return
            self._bytes -= len(self._entries.pop(key).task.result())

    def _is_full(self) -> bool:
        return len(self._entries) > self._most_entries or self._bytes > self._most_bytes
