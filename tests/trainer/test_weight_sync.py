"""Weights go to servers once, from process 0, and every process then asks for that version."""

from __future__ import annotations

import json
from pathlib import Path

from tests.forked import start_group, wait_for_group
from tests.rollout import followed_servers
from tests.rollout.served import echo_process, needs_uvicorn


@needs_uvicorn
def test_two_processes_ask_the_servers_that_the_first_one_feeds(tmp_path):
    server = echo_process(tmp_path)
    server.start()
    try:
        server.wait_until_healthy()
        said = _both(f"http://127.0.0.1:{server.port}", server._token, tmp_path / "rank")
    finally:
        server.close()
    for rank, one in enumerate(said):
        assert one["found"] == [[version, [100 + version] * 4] for version in (1, 2, 3)]
        assert one["refused"], f"process {rank} went on with weights that nobody has"
    assert "Process 0 could not send version 4" in said[1]["refused"]


def _both(url: str, token: str, log: Path) -> list[dict]:
    group = start_group(2, lambda rank: followed_servers.main(url, token), log)
    wait_for_group(group)
    said = []
    for child in group:
        lines = [line for line in child.output().splitlines() if line.startswith("FOUND")]
        assert lines, child.output()[-3000:]
        said.append(json.loads(lines[0].removeprefix("FOUND")))
    return sorted(said, key=lambda one: one["rank"])
