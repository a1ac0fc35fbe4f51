"""PPO on a GPU, with both critics: finite losses, a first ratio of 1, a critic that is trained and saved apart."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from posttrain.methods.ppo import PPOConfig, PPOTrainer
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FILES = {
    "head": ("value_head.safetensors", "weight"),
    "model": ("value_model/model.safetensors", "score.weight"),
}


def checksum(completion_ids, **kwargs):
    return [float(sum(ids) % 13) for ids in completion_ids]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("critic", ["head", "model"])
def test_ppo_steps_on_a_gpu(critic, bf16, tmp_path):
    args = PPOConfig(
        output_dir=str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=8, num_mini_batches=2,
        num_ppo_epochs=1, response_length=6, learning_rate=1e-3, save_strategy="no", report_to="none", reward_workers=0,
        bf16=bf16, optim="adamw_torch", adap_kl_ctrl=True,
    )  # fmt: skip
    dtype = torch.bfloat16 if bf16 else torch.float32
    made = PPOTrainer(
        args,
        tiny.tokenizer(),
        tiny.causal_lm(dtype=dtype),
        reward_funcs=checksum,
        value_model=tiny.reward_model(3, dtype) if critic == "model" else None,
        train_dataset=Dataset.from_list([{"prompt": f"Say {number}"} for number in range(32)]),
    )
    made.train()
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    assert all(torch.isfinite(torch.tensor([entry["loss"], entry["grad_norm"]])).all() for entry in entries)
    assert entries[0]["val/ratio"] == pytest.approx(1, abs=0.05 if bf16 else 1e-3)
    made.save_model(str(tmp_path / "saved"))
    assert not [name for name in load_file(tmp_path / "saved" / "model.safetensors") if "critic" in name]
    file, weight = FILES[critic]
    trained = made.critic.state_dict()[weight]
    assert trained.device.type == "cuda"
    assert trained.abs().sum() > 0
    assert torch.equal(load_file(tmp_path / "saved" / file)[weight], trained.cpu())
