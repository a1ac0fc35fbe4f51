"""Prompts with images in front of a real vLLM, in the trainer's process and behind a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.rollout.engines.protocol import SamplingParams, generate
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from tests.methods import vllm_image_runs as runs
from tests.with_vllm import ENVIRONMENT, PYTHON, SERVED, needs_vllm, run_on_two_ranks, run_pytest

pytestmark = needs_vllm
TOKEN = "a-token-of-this-test"


@pytest.mark.parametrize("marks", ["not trust", pytest.param("trust", marks=pytest.mark.trust)])
def test_in_the_trainers_process(marks):
    run_pytest(Path(__file__).with_name("colocated_vllm_images.py"), 900, marks, **ENVIRONMENT)


@pytest.mark.trust
def test_in_two_processes_that_hold_one_vllm_together(tmp_path):
    run_on_two_ranks("tests.methods.colocated_vllm_image_ranks", str(tmp_path))


@pytest.fixture
def served(tmp_path, monkeypatch):
    """(model, a function that starts a server of it and gives the options of a run that asks it)."""
    tiny = runs.model("qwen2_5_vl")
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.processor.save_pretrained(tmp_path / "model")
    started = []

    def start(*arguments):
        command = ("--model", str(tmp_path / "model"), *SERVED, *arguments)
        started.append(ServerProcess(command, tmp_path / "log", PYTHON, environment=ENVIRONMENT, token=TOKEN))
        started[0].start()
        started[0].wait_until_healthy()
        return {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{started[0].port}"}

    monkeypatch.setenv("POSTTRAIN_SERVE_TOKEN", TOKEN)
    yield tiny, start
    for process in started:
        process.close()


def test_behind_a_server(served, tmp_path):
    """Also after its tower has changed; no image travels twice."""
    tiny, start = served
    run = runs.trainer(tiny, tmp_path, **start("--images", "2"))
    greedy = SamplingParams(max_tokens=8, temperature=0)
    run.weight_sync.ready(0)
    written = generate(run.engine, runs.asked(run), greedy)
    assert runs.largest_gap(run, written) < 1e-3
    client = run.engine.fleet.members[0].client
    sent = len(client._sent_images)
    assert sent == 4  # one of them is that of the probe; of the four in the rows one is there twice
    run.train()
    assert run.state.global_step == 2
    assert all("completions/placeholder_ratio" in entry for entry in run.state.log_history[:2])
    run.weight_sync.ready(3)
    assert runs.largest_gap(run, generate(run.engine, runs.asked(run), greedy)) < 1e-3
    assert len(client._sent_images) == sent
    run.engine.close()


@pytest.mark.trust
def test_a_server_that_was_started_without_images_is_refused(served, tmp_path):
    tiny, start = served
    with pytest.raises(ValueError, match=r"was started without --images\. Start it with .* --images 2"):
        runs.trainer(tiny, tmp_path, **start())
