"""The gate before every route: a bearer token, or callers of this machine only.

It stands around the whole application, so a route cannot be added outside of it.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .errors import ServeError, Unauthorised

Asgi = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
Answer = Callable[[Any, ServeError], Awaitable[None]]

TOKEN_VARIABLE = "POSTTRAIN_SERVE_TOKEN"
"""In the environment of the server, and of those who ask it."""
SHORTEST_TOKEN = 16
SAME_SITE = (b"none", b"same-origin")
"""What browsers say of an address that somebody typed, and of a page that this server itself would have sent."""


class WrongHost(ServeError):
    """Without a token, a page in a browser of this machine could reach the server under another name."""

    status = 403


class FromBrowser(ServeError):
    """Without a token, any page in a browser of this machine could use the server: browsers send such requests unasked."""

    status = 403


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: Asgi, token: str | None, answer: Answer) -> None:
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ValueError(f"The token has {len(token)} characters; give at least {SHORTEST_TOKEN}.")
        self._app, self._answer = app, answer
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check(scope["headers"])
        except ServeError as refusal:
            await self._answer(send, refusal)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self._token is None:
            _check_without_token(headers)
            return
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        right = hmac.compare_digest(token.strip(), self._token)
        if scheme.lower() != b"bearer" or not right:
            raise Unauthorised("This server wants its token: the header `Authorization: Bearer TOKEN`.")

    def __repr__(self) -> str:
        return "Gate(token not shown)"


def _check_without_token(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Programs of this machine only: under its own names, and not for a page, of which browsers name the origin."""
    for name, value in headers:
        name = name.lower()
        if name == b"host" and not is_loopback(_host_only(value)):
            raise WrongHost("Without a token this server answers under the names of the local machine only.")
        if name == b"origin" or (name == b"sec-fetch-site" and value.strip().lower() not in SAME_SITE):
            raise FromBrowser(
                "Without a token this server answers no web pages: the request has the header "
                f"{'Origin' if name == b'origin' else 'Sec-Fetch-Site'}. Start the server with a token to use it from a browser."
            )


def _host_only(value: bytes) -> str:
    text = value.decode("latin-1").strip()
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address. A name other than localhost could mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
