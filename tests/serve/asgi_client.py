"""Calls an ASGI application directly: no sockets, no dependency."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app, method: str, path: str, body: Any = b"", token: str | None = None, headers=(), chunks=None
) -> Reply:
    """`body`: bytes, or anything that becomes JSON. `chunks`: a body without a length, piece by piece."""
    data = body if isinstance(body, bytes | bytearray) else json.dumps(body).encode()
    sent = [(b"host", b"127.0.0.1:8000"), *headers]
    if chunks is None:
        sent.append((b"content-length", str(len(data)).encode()))
    if token is not None:
        sent.append((b"authorization", f"Bearer {token}".encode()))
    pieces = iter([data] if chunks is None else chunks)
    replied: list[dict[str, Any]] = []

    async def receive():
        piece = next(pieces, None)
        if piece is None:
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.request", "body": piece, "more_body": chunks is not None}

    async def send(message):
        replied.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": sent, "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 30)
    start = replied[0]
    shown = {name.decode(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], shown, b"".join(message.get("body", b"") for message in replied[1:]))
