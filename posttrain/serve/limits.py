"""Bodies are read to a bound, within a deadline, and no further."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .errors import FieldError, ServeError, TooLarge, TooSlow

Receive = Callable[[], Awaitable[dict[str, Any]]]

SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take the fixed seconds and this rate on top, by its announced or allowed size."""


class Disconnected(ServeError):
    """The caller went away in the middle of its request; nobody reads the answer."""


async def read_body(
    headers: Iterable[tuple[bytes, bytes]], receive: Receive, limit: int, seconds: float = 30.0
) -> bytearray:
    """The whole body: TooLarge as soon as it is known to pass `limit`, TooSlow where it does not arrive in time."""
    announced = _announced(headers)
    if announced is not None and announced > limit:
        raise TooLarge(f"The body is announced with {announced} bytes; this route takes at most {limit}.")
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
