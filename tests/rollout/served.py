"""Real server processes with the scripted engine, and sockets that misbehave, for the tests of server mode."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posttrain.rollout.engine import Prompt
from posttrain.rollout.vllm_engine.launcher import ServerProcess
from posttrain.rollout.vllm_engine.transport import Deadlines

PYTHON = sys.executable if importlib.util.find_spec("uvicorn") else os.environ.get("POSTTRAIN_VLLM_PYTHON")
needs_uvicorn = pytest.mark.skipif(
    not PYTHON, reason="no server process: uvicorn is not installed and POSTTRAIN_VLLM_PYTHON is not set"
)
NAMES = ("a", "b", "c", "d")
QUICK = Deadlines(connect=2, health=3, control=10, completion=60, part=10, commit=20, start=60, back=60)


def echo_process(folder: Path, *arguments: str, name: str = "echo", deadlines: Deadlines = QUICK) -> ServerProcess:
    """A server whose token number i is the first number of tensor i, taken in turn."""
    return ServerProcess(["--model", "echo", *arguments], folder / f"{name}.log", PYTHON, deadlines=deadlines)


def numbered(number: int, size: int = 4) -> list[tuple[str, torch.Tensor]]:
    """Weights under which every token is `number`; a mixture of two versions would show."""
    return [(name, torch.full((size,), float(number))) for name in NAMES]


def prompts(count: int, rng: random.Random, most: int = 40) -> list[Prompt]:
    return [
        Prompt([rng.randrange(1000) for _ in range(rng.randint(1, 9))], key=i, max_tokens=rng.randint(1, most))
        for i in range(count)
    ]


class SocketServer:
    """Accepts connections and hands each, with its number, to `behave` in a thread of its own."""

    def __init__(self, behave: Callable[[socket.socket, int], None]) -> None:
        self._behave, self._closed = behave, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._run, args=(connection, self.connections), daemon=True).start()

    def _run(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):  # the client has gone, which is what many of these tests want
            self._behave(connection, number)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # or `accept` would hold it open
        self._listener.close()
        for connection in self._open:
            connection.close()


def read_request(connection: socket.socket) -> tuple[bytes, bytes]:
    """(head, body) of one HTTP request."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            raise OSError("closed")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head, body


def http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class CuttingProxy(SocketServer):
    """Between a trainer and a server: passes bytes on until `allowed` of them (to the server, to the trainer) have gone
    through, and cuts the connection then."""

    def __init__(self, port: int) -> None:
        self.target_port = port
        self.allowed = [math.inf, math.inf]
        self.passed = [0, 0]
        super().__init__(self._pass_on)

    def _pass_on(self, connection: socket.socket, number: int) -> None:
        with socket.create_connection(("127.0.0.1", self.target_port)) as server:
            back = threading.Thread(target=self._one_way, args=(server, connection, 1), daemon=True)
            back.start()
            self._one_way(connection, server, 0)
            back.join()

    def _one_way(self, source: socket.socket, target: socket.socket, way: int) -> None:
        try:
            while data := source.recv(4096):
                room = max(int(min(self.allowed[way] - self.passed[way], len(data))), 0)
                target.sendall(data[:room])
                self.passed[way] += room
                if room < len(data):
                    break
        except OSError:
            pass  # either side has gone
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
