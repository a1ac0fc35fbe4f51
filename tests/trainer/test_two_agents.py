"""Two agents of torchrun, as on two machines, with two processes each: they train as one launch of four does, and end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from posttrain.trainer.checkpoints import checkpoint as files
from tests.forked import ENVIRONMENT, start_group, wait_for_group
from tests.trainer import resumable_run
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # each of eight processes imports everything

OPTIONS = {"rows": 11, "per_device_train_batch_size": 1, "logging_steps": 1, "eval_strategy": "no"}
SCRIPT = """
import sys
from tests.trainer.resumable_run import Slow, main

main("sft", sys.argv[1], callbacks=[Slow({pause})], max_steps={steps}, save_steps={steps}, **{options!r})
"""


def train(folder: Path) -> None:
    resumable_run.main("sft", folder, max_steps=4, save_steps=4, **OPTIONS)
    dist.destroy_process_group()


@pytest.fixture
def agents(tmp_path):
    """Starts both; whatever they leave behind is ended with the test."""
    started: list[subprocess.Popen] = []

    def start(steps: int, pause: float = 0.0) -> list[subprocess.Popen]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(steps=steps, pause=pause, options=OPTIONS))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", tmp_path.name]
        meeting += ["--rdzv-conf", "is_host=false"]  # the store is the test's: neither agent holds it
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *meeting]
        for number in range(2):
            with (tmp_path / f"agent-{number}.log").open("w") as log:
                agent = subprocess.Popen(
                    [*command, "--log-dir", str(tmp_path / f"workers-{number}"), str(script), str(tmp_path / "run")],
                    env={**ENVIRONMENT, "ACCELERATE_USE_CPU": "true"}, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            agent.store = store
            started.append(agent)
        return started

    yield start
    for agent in started:
        end_node(agent)


def end_node(agent: subprocess.Popen) -> None:
    """An agent and its processes at once, as a machine that loses power."""
    for process in [agent.pid, *children_of(agent.pid)]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    agent.wait()


def children_of(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in listed.read_text().split()] if listed.exists() else []


def test_they_train_as_one_launch_does(tmp_path, agents):
    assert wait_for_group(start_group(4, lambda rank: train(tmp_path / "one-launch"), tmp_path / "rank")) == [0] * 4
    both = agents(steps=4)
    codes = [agent.wait(300) for agent in both]
    assert codes == [0, 0], (tmp_path / "agent-0.log").read_text()[-3000:]
    one, two = (
        load_file(files.checkpoints(tmp_path / name)[0] / "model.safetensors") for name in ("one-launch", "run")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(two[key], tensor) for key, tensor in one.items())


def test_where_one_is_lost_the_other_ends_with_the_cause(tmp_path, agents):
    first, second = agents(steps=1000, pause=0.05)
    metrics = tmp_path / "run" / "metrics.jsonl"
    eventually(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 240)
    workers = children_of(first.pid)
    end_node(second)
    lost = time.monotonic()
    assert first.wait(120) != 0
    assert time.monotonic() - lost < 60
    log = (tmp_path / "agent-0.log").read_text()
    assert "Connection closed by peer" in log or "Connection reset by peer" in log
    assert "ChildFailedError" in log
    eventually(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 30)
