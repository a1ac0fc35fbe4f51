"""GRPO and RLOO under DeepSpeed with a server, as under FSDP2: all processes gather, the first one sends, an error stops all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.engines.vllm.launcher import TOKEN_VARIABLE, free_port
from tests import tiny
from tests.forked import Child
from tests.methods import model_server, vllm_runs
from tests.methods.test_fsdp_vllm import TOKEN, check_errors_of_one_stop_all, check_same_training
from tests.methods.zero_vllm_run import KINDS
from tests.rollout.served import needs_uvicorn
from tests.with_deepspeed import needs_deepspeed, start_ranks, wait_for_ranks

pytestmark = [*needs_deepspeed, needs_uvicorn]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder of the runs on one process, folder of those on two)."""
    home = tmp_path_factory.mktemp("zero_vllm")
    vllm_runs.model().save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    started = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TOKEN_VARIABLE, TOKEN)
        for world in (1, 2):
            folder, port = home / str(world), free_port()
            (folder / "adapters").mkdir(parents=True)
            words = ("--model", str(home / "model"), "--port", str(port), "--adapter-folder", str(folder / "adapters"))
            server = Child(lambda words=words: model_server.main(words), folder / "server.log")
            ranks = start_ranks(
                folder, world, "tests.methods.zero_vllm_run", f"http://127.0.0.1:{port}", str(home / "model")
            )
            started.append((folder, server, ranks))
    for folder, server, ranks in started:
        wait_for_ranks(ranks, folder)
        server.end()
    return [folder for folder, _, _ in started]


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_one_process_does_and_every_version_arrives(kind, runs):
    check_same_training(*(folder / kind for folder in runs))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_process_stops_all(kind, runs):
    check_errors_of_one_stop_all(runs[1] / kind)


def test_resumes_where_it_was(runs):
    whole, resumed = (load_file(runs[1] / name / "final" / "model.safetensors") for name in ("weights", "resumed"))
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)
