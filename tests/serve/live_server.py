"""A server as a process of its own, and what a trainer sends it, with the standard library only."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from posttrain.serve.wire.payload import encode_manifest
from tests.forked import ForkedProgram, read_environment_again
from tests.serve.serving import update_of

FOLDER = Path(__file__).resolve().parents[2] / "posttrain" / "serve"
ECHO = Path(__file__).with_name("echo_server.py")
TOKEN = "a-token-of-the-tests-7c1"


class LiveServer:
    def __init__(self, python: str, log: Path, *arguments: str) -> None:
        self.log = log
        env = os.environ | {
            "POSTTRAIN_SERVE_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        self.process = self._started(python, ["--port", "0", *arguments], env)
        self.port = 0

    def _started(self, python: str, arguments: list[str], env: dict[str, str]) -> Any:
        program = str(ECHO if "echo" in arguments else FOLDER)
        with self.log.open("wb") as file:
            return subprocess.Popen([python, program, *arguments], stdout=file, stderr=subprocess.STDOUT, env=env)

    def wait_until_ready(self, seconds: float, path: str = "/ready") -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"The server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
                )
            for line in self.log.read_text(errors="replace").splitlines():
                if "posttrain_serve: Serving version" in line:
                    self.port = int(line.split(" port ")[1].split(",")[0])
            try:
                if self.port and self.get(path)[0] == 200:
                    return
            except OSError:
                pass  # bound, and not listening yet
            time.sleep(0.05)
        raise AssertionError(f"Not ready within {seconds} s:\n{self.log.read_text()[-4000:]}")

    def ask(
        self, method: str, path: str, body: Any = b"", token: str | None = TOKEN, seconds: float = 120
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        data = body if isinstance(body, bytes | bytearray) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        return reply.status, json.loads(text) if text[:1] in b"{[" else text

    def get(self, path: str) -> tuple[int, Any]:
        return self.ask("GET", path, seconds=10)

    def post(self, path: str, body: Any = b"") -> Any:
        status, answer = self.ask("POST", path, body)
        assert status in (200, 202), (path, status, answer)
        return answer

    def push(
        self, version: int, weights: dict, bucket: int = 40_000, stop_after: int | None = None, **begin: Any
    ) -> Any:
        """A whole update, or its first `stop_after` parts without a commit."""
        manifest, payloads = update_of(version, weights, bucket)
        self.post("/weights/begin", {"manifest": encode_manifest(manifest), "replace": True, **begin})
        for payload in payloads[:stop_after]:
            self.post("/weights/part", payload)
        if stop_after is not None:
            return len(payloads)
        return self.post("/weights/commit", {"version": version})

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


class NativeLiveServer(LiveServer):
    """With our own engine, and without seconds of imports."""

    def _started(self, python: str | None, arguments: list[str], env: dict[str, str]) -> Any:
        self.log.touch()
        return ForkedProgram(lambda: sys.exit(_serve_native(arguments)), self.log, env)


def _serve_native(arguments: list[str]) -> int:
    from posttrain.rollout.engines.native.serving import main

    read_environment_again()
    return main(arguments)
