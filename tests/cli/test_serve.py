"""`posttrain vllm-serve` as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

from posttrain.rollout.vllm_engine.launcher import free_port
from tests.rollout.served import needs_uvicorn

COMMAND = [sys.executable, "-m", "posttrain.cli.main", "vllm-serve"]


def run(*words, **environment):
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )


def test_help_lists_the_servers_options_and_our_own():
    said = run("--help").stdout
    assert "--token-file" in said
    assert "--python PYTHON" in said


def test_an_interpreter_that_cannot_serve_is_named():
    missing = run("--model", "x", "--python", "/no/such/python")
    assert (missing.returncode, "/no/such/python" in missing.stderr) == (2, True)
    without = run("--model", "x", POSTTRAIN_VLLM_PYTHON=sys.executable)
    assert without.returncode == 2
    assert "has no vLLM" in without.stderr


@needs_uvicorn
def test_a_public_address_without_a_token_is_refused():
    done = run("--model", "echo", "--host", "0.0.0.0", "--port", "0", POSTTRAIN_SERVE_TOKEN="")
    assert done.returncode == 2
    assert "lets other machines in" in done.stderr


@needs_uvicorn
def test_it_serves_and_a_signal_ends_it():
    port = free_port()
    server = subprocess.Popen([*COMMAND, "--model", "echo", "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        assert _status(f"http://127.0.0.1:{port}/health") == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) in (0, -signal.SIGTERM)
    finally:
        server.kill()


def _status(url):
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
