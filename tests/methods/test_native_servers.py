"""Online methods with completions by our own engine in server processes: nothing of vLLM is installed or asked for."""

from __future__ import annotations

import json
import logging

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from posttrain.rollout.engines.vllm.launcher import TOKEN_VARIABLE
from posttrain.trainer.online.vllm_setup import SERVERS_FILE
from tests import tiny
from tests.methods import vllm_runs
from tests.rollout.served import ForkedNativeProcess, needs_uvicorn
from tests.waiting import eventually

pytestmark = needs_uvicorn
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    vllm_runs.model().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the servers' logs are."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def urls(folder, home):
    """Two servers, with one token."""
    made = [
        ForkedNativeProcess(["--model", str(folder), "--dtype", "float32"], home / f"{number}.log", token=TOKEN)
        for number in range(2)
    ]
    for one in made:
        one.start()
    try:
        for one in made:
            one.wait_until_healthy()
        yield [f"http://127.0.0.1:{one.port}" for one in made]
    finally:
        for one in made:
            one.close()


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def trained(output, **options):
    """(rollouts by place, trained weights)."""
    made = vllm_runs.trainer("grpo", output, vllm_importance_sampling_correction=False, **options)
    made.args.max_completion_length = 24
    try:
        made.train()
    finally:
        made.close()
    rows = [row for file in sorted(output.glob("rollouts/step=*/*.parquet")) for row in pq.read_table(file).to_pylist()]
    rows.sort(key=lambda row: (row["group"], row["sample"]))
    return rows, dict(made.model.named_parameters())


@pytest.mark.parametrize(
    ("method", "transport"), [("grpo", "shared_memory"), ("grpo", "http"), ("rloo", "collective"), ("grpo", "auto")]
)
def test_two_servers(method, transport, urls, tmp_path):
    made = vllm_runs.trainer(
        method, tmp_path, vllm_mode="server", vllm_server_base_url=urls, vllm_weight_transport=transport
    )
    try:
        vllm_runs.check_run(made, tmp_path)
    finally:
        made.close()


@pytest.mark.parametrize(
    "update", ["continue", *(pytest.param(update, marks=pytest.mark.slow) for update in ("finish", "restart"))]
)
def test_servers_write_beside_the_training(update, urls, tmp_path, monkeypatch):
    vllm_runs.check_tokens_beside_training(update, urls, tmp_path, monkeypatch, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (max(line.get("async/reissued", 0) for line in lines) > 0) == (update == "restart")


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.8, "temperature": 0.7, "repetition_penalty": 1.2}, {"async_rollouts": True, "async_lead": 0}],
    ids=["plain", "truncated", "async"],
)
def test_servers_write_what_the_engine_writes_in_the_trainers_process(options, urls, tmp_path):
    """Noise is a function of seed, prompt and sample: whoever writes, the tokens are the same, and so is what is trained."""
    synchronous = {name: value for name, value in options.items() if not name.startswith("async")}
    here, weights = trained(tmp_path / "here", use_vllm=False, **synchronous)
    there, others = trained(tmp_path / "there", vllm_mode="server", vllm_server_base_url=urls, **options)
    assert [row["completion_ids"] for row in there] == [row["completion_ids"] for row in here]
    for one, other in zip(there, here):
        np.testing.assert_allclose(one["sampling_logps"], other["sampling_logps"], atol=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-5)


def test_a_server_joins_a_run_by_a_line_in_its_folder(urls, tmp_path):
    made = vllm_runs.trainer("grpo", tmp_path, vllm_mode="server", vllm_server_base_url=urls[:1])
    fleet, seen = made.engine.fleet, []

    class Adds(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                (tmp_path / SERVERS_FILE).write_text(f"{urls[1]}\n")
                eventually(lambda: len(fleet.up()) == 2, 60)

    made.add_callback(Adds())
    for_all = fleet.take
    fleet.take = lambda *asked: (found := for_all(*asked)) and (seen.append(found[0].name) or found)
    try:
        vllm_runs.check_run(made, tmp_path)
    finally:
        made.close()
    assert set(seen) == set(urls)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_after_update": "keep"}, "compute keys and values"),
        ({"async_order": "in_order"}, "servers have the newest alone"),
    ],
)
def test_what_servers_cannot_do_beside_training_is_refused(options, said, urls, tmp_path):
    with pytest.raises(ValueError, match=said):
        vllm_runs.trainer(
            "grpo",
            tmp_path,
            vllm_mode="server",
            vllm_server_base_url=urls,
            async_rollouts=True,
            async_lead=1,
            **options,
        )


def test_the_secret_is_in_nothing_that_a_run_leaves_behind(urls, home, tmp_path, caplog):
    """Logs of both sides, options, checkpoints, journal, rollouts."""
    named = {"vllm_mode": "server", "vllm_server_base_url": urls, "async_rollouts": True, "keep_journal": True}
    with caplog.at_level(logging.DEBUG):
        made = vllm_runs.trainer("grpo", tmp_path, **named)
        made.args.save_strategy, made.args.save_steps = SaveStrategy.STEPS, 1
        try:
            made.train()
        finally:
            made.close()
    files = [path for folder in (tmp_path, home) for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".seg", ".parquet", ".safetensors", ".log", ".json", ".jsonl"}
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in caplog.text
