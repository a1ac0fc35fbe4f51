"""Adapters on 4-bit bases on a CUDA device: SFT, DPO with the base as its reference, GRPO on the native engine, and the merge."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from posttrain import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.cli.main import main
from posttrain.rollout.engines.native.engine import NativeEngine
from tests import tiny

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = {"hidden_size": 64, "intermediate_size": 128}
PACKED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
QUIET = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "bf16": True, "verbosity": "quiet"}


def pairs():
    chats = tiny.chats(24)
    return [
        {
            "prompt": row["messages"][:1],
            "chosen": row["messages"][1:2],
            "rejected": [{"role": "assistant", "content": "No."}],
        }
        for row in chats
    ]


@pytest.fixture
def base(tmp_path):
    tiny.causal_lm(**SHAPE).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def trained(trainer):
    """Runs; the packed bytes must stay as they are."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(parameter.dtype == torch.uint8 and parameter.is_cuda for parameter in before.values())
    trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters() if name in before)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_sft_learns_and_its_merge_is_the_trained_model(base, tmp_path):
    args = SFTConfig(
        output_dir=str(tmp_path / "run"), max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, **QUIET
    )
    rows = Dataset.from_list(tiny.chats(24))
    made = SFTTrainer(base, args, train_dataset=rows, quantization_config=PACKED, peft_config=LoraConfig(r=8))
    losses = trained(made)
    assert losses[-1] < 0.7 * losses[0]
    made.save_model()
    assert main(["export", str(tmp_path / "run"), "--to", "merged", "--dtype", "bfloat16"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run-merged", dtype=torch.bfloat16).cuda()
    ids = torch.arange(40, 90, device="cuda")[None]
    with torch.no_grad():
        ours, theirs = (one.eval()(input_ids=ids).logits.float().log_softmax(-1) for one in (made.model, merged))
    assert (ours - theirs).abs().mean() < 0.05


def test_dpo_has_the_quantised_base_as_its_reference(base, tmp_path):
    args = DPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=10, per_device_train_batch_size=8, learning_rate=1e-2, **QUIET
    )
    rows = Dataset.from_list(pairs())
    made = DPOTrainer(base, args=args, train_dataset=rows, quantization_config=PACKED, peft_config=LoraConfig(r=8))
    losses = trained(made)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses[-1] < 0.8 * losses[0]


def test_grpo_writes_with_the_quantised_base(base, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), max_steps=4, per_device_train_batch_size=16, num_generations=8, max_completion_length=16,
        reward_workers=0, learning_rate=1e-3, **QUIET,
    )  # fmt: skip

    def share_of_letters(completions, completion_ids, **kwargs):
        return [sum(33 <= token < 97 for token in ids) / len(ids) for ids in completion_ids]

    rows = Dataset.from_dict({"prompt": [f"Say the number {i} in words" for i in range(24)]})
    given = {"quantization_config": copy.deepcopy(PACKED), "peft_config": LoraConfig(r=8)}
    made = GRPOTrainer(base, share_of_letters, args, rows, **given)
    trained(made)
    assert isinstance(made.engine, NativeEngine)
    apart = [line["sampling/sampling_logp_difference/max"] for line in made.state.log_history if "reward" in line]
    assert max(apart) < 0.3
