"""Real server processes with the scripted engine, and sockets that misbehave, for the tests of server mode."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import math
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.core.transport import ServerRefused
from posttrain.rollout.engines.protocol import Prompt
from posttrain.rollout.engines.vllm.client import ServerCompletion, ServerInfo
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.weight_stream import VersionStream
from tests.forked import ForkedProgram
from tests.serve import echo_server

PYTHON = sys.executable if importlib.util.find_spec("uvicorn") else os.environ.get("POSTTRAIN_VLLM_PYTHON")
needs_uvicorn = pytest.mark.skipif(
    not PYTHON, reason="no server process: uvicorn is not installed and POSTTRAIN_VLLM_PYTHON is not set"
)
NAMES = ("a", "b", "c", "d")
QUICK = Deadlines(connect=2, health=3, control=10, completion=60, part=10, commit=20, start=60, back=60)
SOON = Deadlines(connect=1, health=1, control=1, completion=0.5, part=1, commit=1, start=2, back=2)


INTERRUPTIONS = [pytest.param(14, id="short"), pytest.param(50, id="long", marks=pytest.mark.trust)]
"""How often an update is cut at a random place."""


class EchoProcess(ServerProcess):
    PROGRAM = Path(__file__).parents[1] / "serve" / "echo_server.py"


class ForkedEchoProcess(EchoProcess):
    """The same server without seconds of imports."""

    def _spawned(self, command: Sequence[str], environment: Mapping[str, str]) -> Any:
        if self.python != sys.executable:
            return super()._spawned(command, environment)
        parent = command.index("--parent")  # a fork server is: ForkedProgram sees to its end
        arguments = [*command[1 + len(self.program) : parent], *command[parent + 2 :]]
        serve = self._serve
        return ForkedProgram(lambda: sys.exit(serve(arguments)), self.log_file, environment)

    @staticmethod
    def _serve(arguments: Sequence[str]) -> int:
        from posttrain.serve import launch

        return echo_server.serve(launch, arguments)


class ForkedNativeProcess(ForkedEchoProcess):
    """Our own engine behind the server."""

    @staticmethod
    def _serve(arguments: Sequence[str]) -> int:
        from posttrain.rollout.engines.native.serving import main

        return main(arguments)


def echo_process(
    folder: Path, *arguments: str, name: str = "echo", deadlines: Deadlines = QUICK, token: str | None = None
) -> ServerProcess:
    """A server whose token number i is the first number of tensor i, taken in turn."""
    log = folder / f"{name}.log"
    return ForkedEchoProcess(["--model", "echo", *arguments], log, PYTHON, deadlines=deadlines, token=token)


def numbered(number: int, size: int = 4) -> list[tuple[str, torch.Tensor]]:
    """Weights under which every token is `number`; a mixture of two versions would show."""
    return [(name, torch.full((size,), float(number))) for name in NAMES]


def says(process: Any) -> dict[str, Any]:
    """A completion of twelve tokens, as the server answers it."""
    body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 12}}
    return process.client._post("/generate", body, 10)["completions"][0][0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def streamed(
    client: Any, version: int, weights: list[tuple[str, torch.Tensor]], in_flight: str = "drain"
) -> VersionStream:
    """A version sent straight into one server's engine, to its end or its error."""
    device = weights[0][1].device
    assert client.can_stream(device)
    stream = VersionStream([client], device, version, in_flight)
    for _ in stream.through(weights):
        pass
    stream.commit()
    return stream


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
                self.passed[way] += room  # before they arrive: whoever has an answer finds its bytes counted
                target.sendall(data[:room])
                if room < len(data):
                    break
        except OSError:
            pass  # either side has gone
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class FakeClient:
    """A server in this process: holds versions, writes its number, fails as `fail` says."""

    def __init__(self, name: str) -> None:
        self.name, self.deadlines = name, SOON
        self.served: tuple[int | None, str | None] = (0, None)
        self.number, self.staged, self.commits = 0, {}, []
        self.fail: dict[str, list[Exception]] = {}
        self.written = self.closed = 0
        self.about: dict[str, Any] = {}  # fields of its ServerInfo that are otherwise

    def _maybe_fail(self, what: str) -> None:
        if self.fail.get(what):
            raise self.fail[what].pop(0)

    def health(self) -> None:
        self._maybe_fail("health")

    def info(self) -> ServerInfo:
        self._maybe_fail("info")
        can = {"weights": True}
        info = ServerInfo(self.name, "fake", 100, 1000, "processed_logprobs", *self.served, capabilities=can)
        return dataclasses.replace(info, **self.about)

    def generate(self, request) -> ServerCompletion:
        self._maybe_fail("generate")
        if request.version != self.served[0]:
            raise ServerRefused(f"Version {self.served[0]} serves.", 409)
        self.written += 1
        return ServerCompletion([self.number] * 2, [-1.0] * 2, "length", self.served[0], "processed_logprobs")

    def score(self, sequences, version) -> list[list[float]]:
        self._maybe_fail("score")
        return [[-1.0] * (len(ids) - 1) for ids in sequences]

    def stage(self, kept, version, bucket_bytes) -> None:
        self._maybe_fail("stage")
        self.staged[version] = kept

    def commit(self, kept, version, in_flight) -> None:
        self._maybe_fail("commit")
        self.commits.append((version, in_flight))
        self.served = (version, kept.fingerprint)
        self.number = int(torch.frombuffer(bytearray(self.staged.pop(version).data["a"]), dtype=torch.float32)[0])

    def abort(self, version) -> None:
        self.staged.pop(version, None)

    def refuse_if_not_offered(self, kept, info) -> None: ...

    def cancel_calls(self, why) -> None: ...

    def close(self) -> None:
        self.closed += 1
