"""Online methods with completions by a real vLLM. Needs POSTTRAIN_VLLM_PYTHON: the python of an environment with vLLM."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from posttrain.rollout.vllm_engine.launcher import TOKEN_VARIABLE, ServerProcess, free_port
from posttrain.rollout.vllm_engine.transport import Deadlines
from tests import tiny
from tests.methods import vllm_runs

PYTHON = os.environ.get("POSTTRAIN_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="POSTTRAIN_VLLM_PYTHON does not name a python with vLLM: not run"),
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
TOKEN = "a-token-of-this-test"
SERVED = ("--dtype", "float32", "--context-length", "384", "--engine-args", '{"max_num_seqs": 16}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    vllm_runs.model().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    """Two servers of whole weights, with one token."""
    home = tmp_path_factory.mktemp("servers")
    made = [
        ServerProcess(
            ("--model", str(folder), *SERVED), home / f"{number}.log", PYTHON, environment=ENVIRONMENT, token=TOKEN
        )
        for number in range(2)
    ]
    yield from _running(made)


def _running(made):
    for one in made:
        one.start()
    try:
        for one in made:
            one.wait_until_healthy()
        yield made
    finally:
        for one in made:
            one.close()


def addresses(servers):
    return [f"http://127.0.0.1:{server.port}" for server in servers]


@pytest.mark.parametrize("method", vllm_runs.METHODS)
def test_two_servers(method, servers, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    made = vllm_runs.trainer(method, tmp_path, vllm_mode="server", vllm_server_base_url=addresses(servers))
    try:
        vllm_runs.check_run(made, tmp_path)
    finally:
        made.engine.close()


def test_one_server_that_is_sent_adapters(folder, tmp_path):
    token_file = tmp_path / "token"
    (tmp_path / "adapters").mkdir()
    words = ("--model", str(folder), *SERVED, "--adapter-folder", str(tmp_path / "adapters"))
    deadlines = Deadlines(start=240)
    server = ServerProcess(words, tmp_path / "log", PYTHON, None, ENVIRONMENT, deadlines, TOKEN)
    token_file.write_text(TOKEN + "\n")
    for _ in _running([server]):
        made = vllm_runs.trainer(
            "grpo",
            tmp_path / "run",
            vllm_runs.lora(),
            vllm_mode="server",
            vllm_server_port=server.port,
            vllm_server_token_file=str(token_file),
            vllm_sync="adapter",
        )
        try:
            vllm_runs.check_run(made, tmp_path / "run")
            assert any((tmp_path / "adapters").iterdir())
        finally:
            made.engine.close()


def test_colocated():
    """In a process and an environment that has vLLM."""
    file = Path(__file__).with_name("colocated_training.py")
    command = [PYTHON, "-m", "pytest", str(file), "-q", "--show-capture=no"]
    done = subprocess.run(command, cwd=file.parents[2], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_processes_with_a_vllm_each_or_one_together(tensor_parallel, tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command += ["-m", "tests.methods.colocated_two_ranks", str(tmp_path), str(tensor_parallel)]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.stdout.count("is content") == 2, done.stdout[-3000:] + done.stderr[-6000:]
