"""A chat endpoint on localhost that answers, refuses, lies, hangs or hangs up, as a function of the request says."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG, DROP = object(), object()
"""What a behaviour may return besides a reply: no answer as long as the server lives; the connection closed without one."""
PARTS = re.compile(
    r"# Instruction\n(.*)\n\n# Answer of assistant 0\n(.*)\n\n# Answer of assistant 1\n(.*)\n\n# Decision", re.S
)


class Asked:
    """One request: its body, the headers, and what a judge is asked in it."""

    def __init__(self, body: dict[str, Any], headers: dict[str, str], number: int) -> None:
        self.body, self.headers, self.number = body, headers, number
        self.prompt, *shown = PARTS.search(body["messages"][0]["content"]).groups()
        self.shown = tuple(shown)


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content}, **more}]}


def longer(asked: Asked) -> dict[str, Any]:
    """An honest judge that likes the longer answer."""
    return said(str(int(len(asked.shown[1]) > len(asked.shown[0]))))


class ChatServer:
    """`behave(asked)` gives the JSON of the reply, (status, JSON), bytes to send as they are, HANG or DROP."""

    def __init__(self, behave: Callable[[Asked], Any]) -> None:
        self.asked: list[Asked] = []
        self.at_once = self.most_at_once = 0
        self._ended, self._lock = threading.Event(), threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    asked = Asked(body, dict(self.headers), len(server.asked))
                    server.asked.append(asked)
                    server.at_once += 1
                    server.most_at_once = max(server.most_at_once, server.at_once)
                try:
                    self._send(behave(asked))
                finally:
                    with server._lock:
                        server.at_once -= 1

            def _send(self, reply: Any) -> None:
                if reply is HANG:
                    server._ended.wait(120)
                if reply in (HANG, DROP):
                    self.close_connection = True
                    return
                if isinstance(reply, bytes):
                    self.wfile.write(reply)
                    self.close_connection = True
                    return
                status, value = reply if isinstance(reply, tuple) else (200, reply)
                data = value if isinstance(value, str) else json.dumps(value)
                self.send_response(status)
                self.send_header("Content-Length", str(len(data.encode())))
                self.end_headers()
                self.wfile.write(data.encode())

            def log_message(self, *_: Any) -> None:
                """Not on standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


def late(seconds: float, behave: Callable[[Asked], Any] = longer) -> Callable[[Asked], Any]:
    def wait(asked: Asked) -> Any:
        time.sleep(seconds)
        return behave(asked)

    return wait
