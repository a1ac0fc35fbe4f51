"""The application that is served: the routes, behind the gate."""

from __future__ import annotations

from typing import Any

from .asgi import Application, error_answer, send_answer
from .auth import Gate
from .errors import ServeError
from .routes import ROUTES
from .server import RolloutServer


def build_app(server: RolloutServer, token: str) -> Gate:
    """One ASGI application, for callers with the token."""
    return Gate(Application(server, ROUTES), token, _refuse)


async def _refuse(send: Any, refusal: ServeError) -> None:
    await send_answer(send, error_answer(refusal))
