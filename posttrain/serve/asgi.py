"""Requests, answers and the application that a table of routes is turned into. Plain ASGI: no route but those listed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import Busy, DeadlinePassed, FieldError, MethodNotAllowed, NotFound, PayloadError, ServeError
from .limits import BodyMemory, Disconnected, read_body
from .payload import read_json
from .server import RolloutServer, ServerOptions

log = logging.getLogger(__name__)

JSON, TEXT = "application/json", "text/plain; version=0.0.4; charset=utf-8"
NO_BODY = 1 << 12
"""What a route without a body may be sent, and is thrown away."""


@dataclass(frozen=True)
class Request:
    body: bytearray

    async def json(self) -> Any:
        """The body as JSON; large ones are read beside the event loop."""
        try:
            if len(self.body) < 1 << 18:
                return read_json(self.body)
            return await asyncio.to_thread(read_json, self.body)
        except PayloadError as error:
            raise FieldError(f"The body is not JSON. {error}") from error

    async def json_or_empty(self) -> Any:
        return await self.json() if self.body else {}


@dataclass(frozen=True)
class Answer:
    body: bytes
    status: int = 200
    kind: str = JSON


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(value, allow_nan=False).encode(), status)


Handler = Callable[[RolloutServer, Request], Awaitable[Answer]]


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    handler: Handler
    limit: Callable[[ServerOptions], int] = lambda options: NO_BODY
    seconds: Callable[[ServerOptions], float] = lambda options: 60.0  # for the answer, once the body is here
    at_once: int = 4096  # requests of this route, bodies that still arrive included


class Application:
    """The routes as an ASGI application. Whoever serves it puts the `Gate` around it, see `app`."""

    def __init__(self, server: RolloutServer, routes: Sequence[Route]) -> None:
        self.server = server
        self.routes = {(route.method, route.path): route for route in routes}
        if len(self.routes) != len(routes):
            raise ValueError("Two routes have the same method and path.")
        self._under_way: Counter[str] = Counter()
        self._bodies = BodyMemory(server.options.most_bodies_bytes)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        began, name = time.monotonic(), "none"
        try:
            route = self._route(scope["method"], scope["path"])
            name = route.path
            answer = await self._answer(route, scope, receive)
        except Disconnected:
            return
        except ServeError as error:
            answer = error_answer(error)
        except Exception:  # a fault of ours must not end the server, and its text is not for callers
            log.exception("A handler of %s failed.", name)
            answer = as_json({"error": "The server failed at this request; its log says how."}, 500)
        self.server.metrics.add("requests_total", route=name, status=str(answer.status))
        self.server.metrics.add("request_seconds_total", time.monotonic() - began, route=name)
        await send_answer(send, answer)

    def _route(self, method: str, path: str) -> Route:
        path = path.rstrip("/") or "/"
        if route := self.routes.get((method, path)):
            return route
        if others := [known for known, other in self.routes if other == path]:
            raise MethodNotAllowed(f"{path} is asked with {', '.join(others)}.")
        raise NotFound("There is no such route.")

    async def _answer(self, route: Route, scope: dict[str, Any], receive: Any) -> Answer:
        if self._under_way[route.path] >= route.at_once:
            raise Busy(f"{route.at_once} requests to {route.path} are under way, the most at once; try again.")
        self._under_way[route.path] += 1
        try:
            return await self._read_and_handle(route, scope, receive)
        finally:
            self._under_way[route.path] -= 1

    async def _read_and_handle(self, route: Route, scope: dict[str, Any], receive: Any) -> Answer:
        options = self.server.options
        try:
            with self._bodies.share() as hold:
                body = await read_body(scope["headers"], receive, route.limit(options), hold=hold)
                async with asyncio.timeout(route.seconds(options)):
                    return await route.handler(self.server, Request(body))
        except TimeoutError as error:
            raise DeadlinePassed(f"{route.path} took more than {route.seconds(options):g} s.") from error


def error_answer(error: ServeError) -> Answer:
    return as_json({"error": str(error), "kind": type(error).__name__}, error.status)


async def send_answer(send: Any, answer: Answer) -> None:
    headers = [(b"content-type", answer.kind.encode()), (b"content-length", str(len(answer.body)).encode())]
    if answer.status in (401, 403, 413, 408):
        headers.append((b"connection", b"close"))  # the rest of the body will not be read
    if answer.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
