"""Online methods with completions by a real vLLM. Needs POSTTRAIN_VLLM_PYTHON: the python of an environment with vLLM."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from transformers import TrainerCallback

from posttrain.models.load.weight_export import exported_weights
from posttrain.rollout.engines.vllm.launcher import TOKEN_VARIABLE, ServerProcess
from posttrain.rollout.engines.vllm.server_engine import ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from tests import tiny
from tests.methods import vllm_runs
from tests.with_vllm import ENVIRONMENT, PYTHON, SERVED, needs_vllm, run_on_two_ranks, run_pytest

pytestmark = needs_vllm
TOKEN = "a-token-of-this-test"


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


@pytest.mark.parametrize("update", ["continue", "finish"])
def test_servers_write_beside_the_training_and_every_token_is_of_the_version_that_it_names(
    update, servers, tmp_path, monkeypatch
):
    """Scored under the weights of every step: under those that a token names, and where they differ under no others."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    vllm_runs.check_tokens_beside_training(update, addresses(servers), tmp_path, monkeypatch)


def test_one_server_that_is_sent_adapters(folder, tmp_path):
    token_file = tmp_path / "token"
    (tmp_path / "adapters").mkdir()
    words = ("--model", str(folder), *SERVED, "--adapter-folder", str(tmp_path / "adapters"))
    deadlines = Deadlines(start=240)
    server = ServerProcess(words, tmp_path / "log", PYTHON, None, ENVIRONMENT, deadlines, TOKEN)
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
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


@pytest.mark.trust
def test_a_server_of_the_trainers_own_is_killed_after_every_step(folder, tmp_path):
    """It is restarted, fed the weights of that step, and the run ends as if nothing had been. Nobody asks it after the last one."""

    class Kills(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step < vllm_runs.STEPS:
                os.kill(server.pid, signal.SIGKILL)

    words = ("--model", str(folder), *SERVED)
    server = ServerProcess(words, tmp_path / "log", PYTHON, environment=ENVIRONMENT, deadlines=Deadlines(start=240))
    with ServedVLLM([server], export=lambda: exported_weights(made.model)) as engine:
        made = vllm_runs.trainer("grpo", tmp_path / "run", engine=engine)
        made.add_callback(Kills())
        vllm_runs.check_run(made, tmp_path / "run")
        assert server.starts == vllm_runs.STEPS


def test_colocated():
    run_pytest(Path(__file__).with_name("colocated_training.py"), 600)


@pytest.mark.parametrize("tensor_parallel", [pytest.param("1", marks=pytest.mark.trust), "2"])
def test_two_processes_with_a_vllm_each_or_one_together(tensor_parallel, tmp_path):
    run_on_two_ranks("tests.methods.colocated_two_ranks", str(tmp_path), tensor_parallel)
