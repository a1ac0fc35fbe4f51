"""Scripts that people have, run with only their imports changed. Needs POSTTRAIN_VLLM_PYTHON, an interpreter with vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from safetensors.torch import load

from posttrain.rollout.engines.vllm.launcher import TOKEN_VARIABLE, ServerProcess
from tests import tiny
from tests.methods import vllm_runs
from tests.methods.test_vllm_training import TOKEN
from tests.trainer.test_hub import running_stand_in
from tests.with_vllm import ENVIRONMENT, PYTHON, SERVED, needs_vllm

pytestmark = needs_vllm
ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def materials(tmp_path_factory):
    """(folder of a model, file of problems)."""
    home = tmp_path_factory.mktemp("materials")
    vllm_runs.model().save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    rows = [{"problem": f"What is {n} + {n}?", "solution": f"$\\boxed{{{2 * n}}}$"} for n in range(64)]
    (home / "maths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return home / "model", home / "maths.jsonl"


def run_recipe(python, folder, materials, hub, **more):
    """The recipe in a process that knows no Hub but the stand-in; what trackio was told."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in (os.environ | ENVIRONMENT).items() if name not in offline}
    environment |= {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf"), "HF_TOKEN": "hf_" + "x" * 30,
        "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1",
        "RECIPE_MODEL": str(materials[0]), "RECIPE_DATA": str(materials[1]), "RECIPE_OUTPUT": str(folder / "think"),
        "RECIPE_STEPS": str(STEPS), **more,
    }  # fmt: skip
    recipe = ROOT / "tests" / "recipes" / "grpo_think_answer.py"
    command = [python, "-m", "tests.recipes.run", str(recipe), str(folder / "trackio.json")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return json.loads((folder / "trackio.json").read_text())


def check(folder, hub, told):
    """Steps were logged with both rewards, a checkpoint was kept, and what is on the Hub is what was saved."""
    assert told["given"] == {"project": "think-and-answer", "space_id": "team/think-and-answer"}
    steps = [entry for entry in told["logged"] if "train/rewards/format_reward/mean" in entry]
    assert len(steps) == STEPS
    assert all("train/rewards/accuracy_reward/mean" in entry for entry in steps)
    assert all(entry["train/sync/logp_difference/mean"] < 1e-4 for entry in steps)
    assert (folder / "think" / f"checkpoint-{STEPS - 1}").is_dir()
    saved = load((folder / "think" / "adapter_model.safetensors").read_bytes())
    pushed = load(hub.files["team/think-and-answer"]["adapter_model.safetensors"])
    assert saved.keys() == pushed.keys()
    assert all((saved[name] == pushed[name]).all() for name in saved)
    assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
    PeftModel.from_pretrained(vllm_runs.model(), folder / "think")


def test_grpo_with_a_colocated_vllm(materials, tmp_path):
    with running_stand_in() as hub:
        told = run_recipe(PYTHON, tmp_path, materials, hub, RECIPE_MODE="colocate")
    check(tmp_path, hub, told)


def test_grpo_with_a_server(materials, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    words = ("--model", str(materials[0]), *SERVED, "--adapter-folder", str(adapters))
    server = ServerProcess(words, tmp_path / "log", PYTHON, environment=ENVIRONMENT, token=TOKEN)
    try:
        server.restart()
        with running_stand_in() as hub:
            more = {"RECIPE_MODE": "server", "RECIPE_PORT": str(server.port), TOKEN_VARIABLE: TOKEN}
            told = run_recipe(sys.executable, tmp_path, materials, hub, **more)
    finally:
        server.close()
    check(tmp_path, hub, told)
