"""Processes of a server: what is left when it dies, and who may speak to the next one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posttrain.core.transport import ServerRefused
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from tests.rollout.served import QUICK, echo_process, needs_uvicorn
from tests.waiting import eventually


def is_alive(pid: int) -> bool:
    """Killed processes of a dead parent may wait to be reaped by whoever is the first process here."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def dying(tmp_path):
    """A server with a worker; the server kills itself, the worker stays."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/worker\nkill -9 $$\n")
    script.chmod(0o755)
    process = ServerProcess(["--model", "x"], tmp_path / "log", str(script), deadlines=QUICK)
    yield process
    process.close()


def worker_of(process: ServerProcess) -> int:
    eventually(lambda: not process.is_running)
    return int((process.log_file.parent / "worker").read_text())


@pytest.mark.parametrize("end", [ServerProcess.kill, ServerProcess.close, ServerProcess.start])
def test_workers_of_a_dead_server_are_killed(dying, end):
    dying.start()
    worker = worker_of(dying)
    assert is_alive(worker)
    assert "not running" in repr(dying)  # looked at, it is still there to be killed with its group
    end(dying)
    eventually(lambda: not is_alive(worker))


def test_the_status_of_a_dead_server_is_said(dying):
    dying.start()
    worker_of(dying)
    with pytest.raises(Exception, match=r"ended at its start \(status -9\)"):
        dying.wait_until_healthy()
    dying.kill()
    assert dying._process.returncode == -9
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOHANG)  # nothing is left to be reaped


@needs_uvicorn
def test_each_start_has_a_token_of_its_own(tmp_path):
    server = echo_process(tmp_path)
    try:
        server.restart()
        first, address = server._token, server.client.name
        server.client.info()
        server.restart()
        assert server._token != first
        assert server.client.info().model
        with pytest.raises(ServerRefused, match="401"):
            ServerClient(address, first, QUICK).info()
    finally:
        server.close()


def test_a_token_that_was_given_stays(dying, tmp_path):
    process = ServerProcess(["--model", "x"], tmp_path / "log", dying.python, token="mine-for-ever", deadlines=QUICK)
    for _ in range(2):
        process.start()
        worker_of(process)
        assert process._token == "mine-for-ever"
    process.close()
