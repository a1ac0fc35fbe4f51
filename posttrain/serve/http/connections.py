"""Connections have bounds of their own: any client can open one, and send half a request, before a token is asked for."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""From the opening of a connection, or the first byte of a further request on it, until the whole head is here."""
MAX_CONNECTIONS = 16_384
TAKEN_AT_ONCE = 32
"""By asyncio, several times before the first of them is counted: so few that they do not use up the descriptors."""
KERNEL_QUEUE = 2048
"""Connections that wait in the kernel until they are accepted. A trainer opens hundreds at once."""
SPARE_DESCRIPTORS = 256
"""For those that are accepted and not counted, and for files."""
WARNING_INTERVAL_SECONDS = 60.0


def most_connections() -> int:
    """As many as the process has descriptors for, of which it is given as many as it may have; some stay for its files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (OSError, ValueError) as error:  # forbidden here: with those that there are, then
            log.warning("The process keeps %s descriptors (%s): fewer connections are accepted.", soft, error)
    return connections_for(wanted if soft == resource.RLIM_INFINITY else soft)


def connections_for(descriptors: int) -> int:
    return min(max(descriptors - SPARE_DESCRIPTORS, descriptors // 2), MAX_CONNECTIONS)


class HeadWatch:
    """The connections that have not sent a whole head yet, the oldest first. Used in the event loop only."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._waiting: dict[Any, asyncio.TimerHandle] = {}  # protocol -> what ends it
        self._ended: set[Any] = set()  # that were closed, and are still counted as open
        self._warned_at = -WARNING_INTERVAL_SECONDS

    def waits(self, protocol: Any) -> None:
        """Its head is not complete; the time counts from the first such call."""
        if protocol not in self._waiting:
            timer = protocol.loop.call_later(self._seconds, protocol.transport.abort)
            self._waiting[protocol] = timer

    def done(self, protocol: Any) -> None:
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()

    def lost(self, protocol: Any) -> None:
        self.done(protocol)
        self._ended.discard(protocol)

    def make_room(self, is_open: int) -> None:
        """Where there are too many, the one that has kept the server waiting longest goes: a new one may be a trainer's."""
        if is_open - len(self._ended) <= self._most:
            return
        if time.monotonic() - self._warned_at >= WARNING_INTERVAL_SECONDS:
            self._warned_at = time.monotonic()
            log.warning(
                "%s connections are open, the most at once is %s: one that waits is closed.", is_open, self._most
            )
        oldest = next(iter(self._waiting))  # the new one is there itself
        self.done(oldest)
        self._ended.add(oldest)
        oldest.transport.abort()


def bounded_protocol(base: type, most: int, head_seconds: float = HEAD_SECONDS) -> type:
    """uvicorn's protocol `base` (for h11 or for httptools), which closes connections that only wait."""
    watch = HeadWatch(most, head_seconds)

    class BoundedProtocol(base):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            watch.waits(self)
            watch.make_room(len(self.connections))

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                watch.waits(self)
            else:
                watch.done(self)

        def connection_lost(self, exc: Exception | None) -> None:
            watch.lost(self)
            super().connection_lost(exc)

    return BoundedProtocol
