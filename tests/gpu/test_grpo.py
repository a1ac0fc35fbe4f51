"""GRPO on a CUDA device: the engine, the update and the memory between them. Skipped elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.engines.native.engine import NativeEngine
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # heads of 16


def share_of_letters(completions, completion_ids, **kwargs):
    return [sum(33 <= token < 97 for token in ids) / len(ids) for ids in completion_ids]


def trained(folder, dtype=torch.bfloat16, peft_config=None, **options):
    args = GRPOConfig(
        **{
            "output_dir": str(folder), "max_steps": 20, "per_device_train_batch_size": 32, "num_generations": 8,
            "max_completion_length": 24, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "reward_workers": 0,
            "dataset_cache_dir": str(Path(folder) / "cache"), "learning_rate": 1e-3, "bf16": dtype == torch.bfloat16,
            **options,
        }
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": [f"Say the number {i} in words" for i in range(24)]})
    torch.manual_seed(0)
    made = GRPOTrainer(
        tiny.causal_lm(dtype=dtype, **WIDE), share_of_letters, args, data, processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )  # fmt: skip
    made.train()
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return made, [line for line in lines if "reward" in line]


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "compiled", "lora", "beta", "off-policy"])
def test_a_run_learns_on_the_native_engine(tmp_path, kind, caplog):
    options = {
        "compiled": {"compile_layers": True},
        "beta": {"beta": 0.04},
        "off-policy": {"num_iterations": 2, "max_steps": 40},
        "lora": {"peft_config": LoraConfig(r=8, target_modules="all-linear"), "learning_rate": 1e-2},
    }.get(kind, {})
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    made, logs = trained(tmp_path, dtype, **options)
    assert isinstance(made.engine, NativeEngine)
    assert made.loaded.layout == "shared"
    assert "without CUDA graphs" not in caplog.text
    apart = max(line["sampling/sampling_logp_difference/max"] for line in logs)
    assert apart < (1e-3 if dtype == torch.float32 else 0.3), apart
    rewards = [line["reward"] for line in logs]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2
    assert made.engine._made[0].store.pages == 0  # keys and values are there during generation only


def test_the_same_seed_twice_is_the_same_run(tmp_path):
    found = []
    for number in range(2):
        made, logs = trained(tmp_path / str(number), full_determinism=True)
        numbers = [(line["loss"], line["grad_norm"], line["reward"]) for line in logs]
        found.append((numbers, [parameter.detach().cpu() for parameter in made.model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1]))
