"""Bodies are read to a bound, within a deadline, and no further; and all of them together have a bound, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .errors import Busy, FieldError, ServeError, TooLarge, TooSlow

Receive = Callable[[], Awaitable[dict[str, Any]]]
Hold = Callable[[int], None]

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take the fixed seconds and this rate on top, by its announced or allowed size."""


class Disconnected(ServeError):
    """The caller went away in the middle of its request; nobody reads the answer."""


class BodyMemory:
    """The bytes of all bodies that are held at the same time. Used in the event loop only."""

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0

    @contextmanager
    def share(self) -> Iterator[Hold]:
        """For one request: a function to call with the size of its body, which may grow. Busy where there is no room."""
        mine = 0

        def hold(nbytes: int) -> None:
            nonlocal mine
            more = max(nbytes - mine, 0)
            if self.held + more > self._most:
                raise Busy(
                    f"The bodies of requests that are under way have {self.held} bytes, and this one {nbytes}; this server "
                    f"holds {self._most} at once. Try again later."
                )
            self.held += more
            mine += more

        try:
            yield hold
        finally:
            self.held -= mine


async def read_body(
    headers: Iterable[tuple[bytes, bytes]],
    receive: Receive,
    limit: int,
    seconds: float = 30.0,
    hold: Hold = lambda nbytes: None,
) -> bytearray:
    """The whole body: TooLarge as soon as it is known to pass `limit`, TooSlow where it does not arrive in time.

    `hold` is called with the size as soon as that is known, and may refuse it.
    """
    announced = _announced(headers)
    if announced is not None and announced > limit:
        raise TooLarge(f"The body is announced with {announced} bytes; this route takes at most {limit}.")
    hold(announced or 0)
    body = bytearray()
    allowed = seconds + (limit if announced is None else announced) / SLOWEST_BYTES_PER_SECOND
    try:
        async with asyncio.timeout(allowed):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Disconnected("The caller went away before its body had arrived.")
                if len(body) + len(message.get("body", b"")) > limit:
                    raise TooLarge(f"The body has more than {limit} bytes, the most that this route takes.")
                body += message.get("body", b"")
                hold(len(body))
                if not message.get("more_body", False):
                    return body
    except TimeoutError as error:
        raise TooSlow(f"The body did not arrive within {allowed:.0f} s ({len(body)} bytes did).") from error


def _announced(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    values = [value for name, value in headers if name.lower() == b"content-length"]
    if not values:
        return None
    if len(values) > 1 or not values[0].isdigit() or len(values[0]) > 18:
        raise FieldError("The Content-Length header is not one whole number.")
    return int(values[0])
