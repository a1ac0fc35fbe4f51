"""Weights go to servers once, from process 0, and every process then asks for that version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from posttrain.rollout.vllm_engine.launcher import free_port
from tests.rollout.served import echo_process, needs_uvicorn

ROOT = Path(__file__).parents[2]


@needs_uvicorn
def test_two_processes_ask_the_servers_that_the_first_one_feeds(tmp_path):
    server = echo_process(tmp_path)
    server.start()
    try:
        server.wait_until_healthy()
        said = _both(f"http://127.0.0.1:{server.port}", server._token)
    finally:
        server.close()
    for rank, one in enumerate(said):
        assert one["found"] == [[version, [100 + version] * 4] for version in (1, 2, 3)]
        assert one["refused"], f"process {rank} went on with weights that nobody has"
    assert "Process 0 could not send version 4" in said[1]["refused"]


def _both(url: str, token: str) -> list[dict]:
    started = []
    port = free_port()
    for rank in range(2):
        world = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in world.items()}
        command = [sys.executable, "-m", "tests.rollout.followed_servers", url, token]
        started.append(
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = []
    for process in started:
        out, err = process.communicate(timeout=120)
        lines = [line for line in out.splitlines() if line.startswith("FOUND")]
        assert lines, err[-3000:]
        said.append(json.loads(lines[0].removeprefix("FOUND")))
    return sorted(said, key=lambda one: one["rank"])
