"""`posttrain vllm-serve` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.launcher import free_port
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.trainer.online.vllm_setup import client_of
from tests import tiny
from tests.forked import ROOT, run_command, run_function
from tests.rollout.served import EchoProcess, needs_uvicorn

ECHO_SERVER = EchoProcess.PROGRAM
COMMAND = [sys.executable, "-m", "posttrain.cli.main", "vllm-serve"]


def run(*words, **environment):
    return run_command("vllm-serve", *words, cwd=ROOT, environment=os.environ | environment)


def test_help_lists_the_servers_options_and_our_own():
    said = run("--help").stdout
    assert "--token-file" in said
    assert "--python PYTHON" in said
    assert "--engine native" in said


def test_an_interpreter_that_cannot_serve_is_named():
    missing = run("--model", "x", "--python", "/no/such/python")
    assert (missing.returncode, "/no/such/python" in missing.stderr) == (2, True)
    without = run("--model", "x", POSTTRAIN_VLLM_PYTHON=sys.executable)
    assert without.returncode == 2
    assert "has no vLLM" in without.stderr


@needs_uvicorn
def test_it_serves_its_user_alone_and_a_signal_ends_it(tmp_path):
    """`/shutdown` from another user, who cannot read the token, is refused; a trainer of the same user finds the token itself."""
    port = free_port()
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("POSTTRAIN_SERVE_TOKEN", None)
    # An interpreter that says that it has vLLM, and runs the server around the tests' engine.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nshift\nexec {sys.executable} {ECHO_SERVER} "$@"\n')
    python.chmod(0o700)
    server = subprocess.Popen(
        [*COMMAND, "--python", str(python), "--model", "echo", "--port", str(port)],
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert status(server, f"http://127.0.0.1:{port}/health") == 401
        assert status(server, f"http://127.0.0.1:{port}/shutdown", "POST") == 401
        (left,) = (tmp_path / ".cache/posttrain/serve").iterdir()
        assert left.stat().st_mode & 0o777 == 0o600

        def trainer():
            print(type(client_of(f"http://localhost:{port}", None, Deadlines(start=30.0), None, "raw")).__name__)

        asked = run_function(trainer, cwd=tmp_path, environment=environment)
        assert asked.stdout.strip() == "ServerClient", asked.stderr
        left.chmod(0o644)
        asked = run_function(trainer, cwd=tmp_path, environment=environment)
        assert "can be read by other users (mode 0644)" in asked.stderr
        left.unlink()
        asked = run_function(trainer, cwd=tmp_path, environment=environment)
        assert f"would have left it in {left}" in asked.stderr
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) in (0, -signal.SIGTERM)
    finally:
        server.kill()
        server.wait()


@needs_uvicorn
def test_our_own_engine_serves_without_vllm_and_its_token_is_nowhere_to_be_read(tmp_path):
    token, port, log = "only-in-the-environment-31", free_port(), tmp_path / "log"
    tiny.causal_lm(0).save_pretrained(tmp_path / "model")
    words = ["--engine", "native", "--model", str(tmp_path / "model"), "--port", str(port), "--log-level", "debug"]
    with log.open("wb") as file:
        server = subprocess.Popen(
            [*COMMAND, *words], stdout=file, stderr=file, env={**os.environ, "POSTTRAIN_SERVE_TOKEN": token}
        )
    try:
        assert status(server, f"http://127.0.0.1:{port}/health") == 401
        client = ServerClient(f"http://127.0.0.1:{port}", token, Deadlines())
        assert client.info().engine.startswith("posttrain")
        assert len(client.score([[1, 2, 3]])[0]) == 2
        assert token.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
        assert token not in log.read_text()
    finally:
        server.kill()
        server.wait()


def test_another_engine_is_named():
    unknown = run("--engine", "sglang", "--model", "x")
    assert (unknown.returncode, "there are vllm and native" in unknown.stderr) == (2, True)


def status(server, url, method="GET"):
    """Of the first answer; an error if the server ends first."""
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            if time.monotonic() > end or server.poll() is not None:
                raise
            time.sleep(0.2)
