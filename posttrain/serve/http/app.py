"""The application that is served: starlette's routes, in one table, behind one gate, with bodies read within bounds."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import bodies
from ..auth import SHORTEST_TOKEN
from ..bodies import Body
from ..errors import (
    Busy,
    DeadlinePassed,
    FieldError,
    MethodNotAllowed,
    NotFound,
    PayloadError,
    ServeError,
    TooLarge,
    TooSlow,
    Unauthorised,
)
from ..server import PARTS_AT_ONCE, RolloutServer, ServerOptions
from ..wire.payload import MAX_FETCH_SECONDS
from . import control, generation

log = logging.getLogger(__name__)

Asgi = Callable[[Any, Any, Any], Awaitable[None]]
Hold = Callable[[int], None]

NO_BODY = 1 << 12
"""What a route without a body may be sent, and is thrown away."""
LARGE_BODY = 1 << 18
"""From here on JSON is read beside the event loop."""
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""A body may take the fixed seconds and this rate on top, by its announced or allowed size."""


# bodies -----------------------------------------------------------------------------------------------------------------


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


async def read_body(request: Request, limit: int, hold: Hold, seconds: float = 30.0) -> bytearray:
    """The whole body: TooLarge as soon as it is known to pass `limit`, TooSlow where it does not arrive in time.

    `hold` is called with the size as soon as that is known, and may refuse it.
    """
    announced = _announced(request.headers.getlist("content-length"))
    if announced is not None and announced > limit:
        raise TooLarge(f"The body is announced with {announced} bytes; this route takes at most {limit}.")
    hold(announced or 0)
    body = bytearray()
    allowed = seconds + (limit if announced is None else announced) / SLOWEST_BYTES_PER_SECOND
    try:
        async with asyncio.timeout(allowed):
            async for piece in request.stream():
                if len(body) + len(piece) > limit:
                    raise TooLarge(f"The body has more than {limit} bytes, the most that this route takes.")
                body += piece
                hold(len(body))
    except TimeoutError as error:
        raise TooSlow(f"The body did not arrive within {allowed:.0f} s ({len(body)} bytes did).") from error
    return body


def _announced(lengths: list[str]) -> int | None:
    if not lengths:
        return None
    if len(lengths) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()) or len(lengths[0]) > 18:
        raise FieldError("The Content-Length header is not one whole number.")
    return int(lengths[0])


def _parsed(body: bytearray, model: type[Body]) -> Body:
    try:
        value = bodies.read_json(body) if body else {}
    except PayloadError as error:
        raise FieldError(f"The body is not JSON. {error}") from error
    return bodies.read(value, model)


# routes -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """One route: who answers, which body it takes, and its bounds."""

    method: str
    path: str
    handler: Callable[[RolloutServer, Any], Awaitable[Any]]  # a response, or what becomes JSON
    body: type[Body] | None = None  # None: the handler gets the bytes
    limit: int | str = NO_BODY  # bytes of the body, or the option of the server that says how many
    seconds: float | None = 60.0  # for the answer, once the body is here; None: as long as a deadline in a body may be
    concurrency: int = 4096  # requests of this route, bodies that still arrive included

    def bounds(self, options: ServerOptions) -> tuple[int, float]:
        """(bytes, seconds)."""
        limit = getattr(options, self.limit) if isinstance(self.limit, str) else self.limit
        return limit, options.most_seconds + LATER if self.seconds is None else self.seconds


LATER = 30.0
"""The handlers end earlier, by the deadline in the body."""
JSON, PART, IMAGE, SMALL = "most_json_bytes", "most_part_bytes", "most_image_bytes", 1 << 16
QUICK, LONG, FETCH = 10.0, None, MAX_FETCH_SECONDS + LATER

ENDPOINTS = (
    Endpoint("GET", "/health", control.health, seconds=QUICK),
    Endpoint("GET", "/ready", control.ready, seconds=QUICK),
    Endpoint("GET", "/info", control.info, seconds=QUICK),
    Endpoint("GET", "/metrics", control.metrics, seconds=QUICK),
    Endpoint("POST", "/generate", generation.generate, bodies.Generate, JSON, LONG),
    Endpoint("POST", "/score", generation.score, bodies.Score, JSON, LONG),
    Endpoint("PUT", "/images/{key}", control.put_image, None, IMAGE, 600.0, PARTS_AT_ONCE),
    Endpoint("POST", "/weights/begin", control.weights_begin, bodies.Begin, JSON, concurrency=4),
    Endpoint("POST", "/weights/part", control.weights_part, None, PART, 600.0, PARTS_AT_ONCE),
    Endpoint("POST", "/weights/fetch", control.weights_fetch, bodies.Fetch, JSON, FETCH, concurrency=4),
    Endpoint("POST", "/weights/stream", control.weights_stream, bodies.OpenStream, SMALL, concurrency=4),
    Endpoint(
        "POST", "/weights/stream/part", control.weights_stream_part, bodies.StreamPart, JSON, FETCH, concurrency=4
    ),
    Endpoint("POST", "/weights/collective", control.weights_collective, bodies.Rendezvous, SMALL, FETCH, concurrency=2),
    Endpoint("POST", "/weights/commit", control.weights_commit, bodies.Commit, JSON, LONG, concurrency=4),
    Endpoint("POST", "/weights/abort", control.weights_abort, bodies.Abort, SMALL),
    Endpoint("POST", "/sleep", control.sleep, bodies.Sleep, SMALL),
    Endpoint("POST", "/wake", control.wake, bodies.Wake, SMALL),
    Endpoint("POST", "/shutdown", control.shutdown, bodies.Shutdown, SMALL),
)
"""Every route there is. The application is built from this table and from nothing else."""


class _Served:
    """A route of a running server."""

    def __init__(self, server: RolloutServer, endpoint: Endpoint, memory: BodyMemory) -> None:
        self._server, self._endpoint, self._memory = server, endpoint, memory
        self._under_way = 0

    async def answer(self, request: Request) -> Response | Asgi:
        began, path = time.monotonic(), self._endpoint.path
        try:
            response = await self._counted(request)
        except ClientDisconnect:
            return _no_answer
        except ServeError as error:
            response = refusal(error)
        except Exception:  # a fault of ours must not end the server, and its text is not for callers
            log.exception("A handler of %s failed.", path)
            response = JSONResponse({"error": "The server failed at this request; its log says how."}, 500)
        self._server.metrics.count(path, response.status_code, time.monotonic() - began)
        return response

    async def _counted(self, request: Request) -> Response:
        endpoint = self._endpoint
        if self._under_way >= endpoint.concurrency:
            raise Busy(
                f"{endpoint.concurrency} requests to {endpoint.path} are under way, the most at once; try again."
            )
        self._under_way += 1
        try:
            return await self._read_and_handle(request)
        finally:
            self._under_way -= 1

    async def _read_and_handle(self, request: Request) -> Response:
        endpoint = self._endpoint
        limit, seconds = endpoint.bounds(self._server.options)
        try:
            with self._memory.share() as hold:
                body: Any = await read_body(request, limit, hold)
                async with asyncio.timeout(seconds):
                    if endpoint.body is not None and len(body) >= LARGE_BODY:
                        body = await asyncio.to_thread(_parsed, body, endpoint.body)
                    elif endpoint.body is not None:
                        body = _parsed(body, endpoint.body)
                    answer = await endpoint.handler(self._server, body, **request.path_params)
        except TimeoutError as error:
            raise DeadlinePassed(f"{endpoint.path} took more than {seconds:g} s.") from error
        return answer if isinstance(answer, Response) else JSONResponse(answer)


async def _no_answer(scope: Any, receive: Any, send: Any) -> None:
    """The client disconnected in the middle of its request; the answer is not read."""


def refusal(error: ServeError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in (401, 413, 408):
        headers["Connection"] = "close"  # the rest of the body will not be read
    return JSONResponse({"error": str(error), "kind": type(error).__name__}, error.status, headers)


# the application --------------------------------------------------------------------------------------------------------


class Gate:
    """A bearer token before every route, asked for before a byte of the body is read. It stands around the whole application,
    so a route cannot be added outside."""

    def __init__(self, app: Starlette, token: str) -> None:
        if len(token) < SHORTEST_TOKEN:
            raise ValueError(f"The token has {len(token)} characters; give at least {SHORTEST_TOKEN}.")
        self.app, self._token = app, token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and not self._opens(scope["headers"]):
            error = Unauthorised("This server requires its token: the header `Authorization: Bearer TOKEN`.")
            await refusal(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _opens(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        right = hmac.compare_digest(token.strip(), self._token)
        return right and scheme.lower() == b"bearer"

    def __repr__(self) -> str:
        return "Gate(token not shown)"


def build_app(server: RolloutServer, token: str) -> Gate:
    """One ASGI application, for callers with the token."""
    memory = BodyMemory(server.options.most_bodies_bytes)
    served = [(endpoint, _Served(server, endpoint, memory)) for endpoint in ENDPOINTS]
    routes = [Route(endpoint.path, one.answer, methods=[endpoint.method]) for endpoint, one in served]

    def not_routed(request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        methods = [method for route in routes if route.path_regex.match(path) for method in route.methods - {"HEAD"}]
        wrong_method = MethodNotAllowed(f"Use {', '.join(methods)} for {path}.")
        response = refusal(wrong_method if methods else NotFound("There is no such route."))
        server.metrics.count("none", response.status_code, 0.0)
        return response

    app = Starlette(routes=routes, exception_handlers={HTTPException: not_routed})
    app.router.redirect_slashes = False
    app.state.bodies = memory
    return Gate(app, token)
