"""Online methods and distillation on a GPU: in float32 the first step of the CPU, in bfloat16 finite steps."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain.methods.table import METHODS
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS_HERE = ("ppo", "online_dpo", "xpo", "nash_md", "a2po", "gkd", "distillation", "ssd")
TAUGHT = ("gkd", "distillation")


def half(completion_ids, **columns):
    """1 where the sum of the ids is even: of 0 and 1, as A2PO wants it."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def steps(method, folder, adapter=False, **options):
    shared = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4, "max_completion_length": 8}
    shared |= {
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "optim": "adamw_torch",
    }
    given = (
        {"teacher_model": tiny.causal_lm(1), "teacher_processing_class": tiny.tokenizer()} if method in TAUGHT else {}
    )
    if method == "ssd":
        shared["filter_empty"] = False
    elif method not in TAUGHT:
        given, shared["reward_workers"] = {"reward_funcs": half}, 0
    trainer = METHODS[method].trainer_class(
        model=tiny.causal_lm(),
        args=METHODS[method].config_class(output_dir=str(folder), **shared, **options),
        train_dataset=Dataset.from_list([{"prompt": f"Say {i}", "completion": f" {i}, {i + 1}"} for i in range(16)]),
        processing_class=tiny.tokenizer(),
        **given,
        **({"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if adapter else {}),
    )
    trainer.train()
    assert trainer.model.device.type == ("cpu" if options.get("use_cpu") else "cuda")
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("method", METHODS_HERE)
def test_the_first_step_is_that_of_the_cpu(method, tmp_path):
    found = steps(method, tmp_path / "gpu", bf16=False)[0]
    expected = steps(method, tmp_path / "cpu", use_cpu=True)[0]
    names = {
        "loss",
        "grad_norm",
        "reward",
        "on_policy_loss",
        "off_policy_loss",
        "completions/mean_length",
    } & found.keys()
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=5e-3, abs=5e-4)


@pytest.mark.parametrize("method", METHODS_HERE)
def test_bfloat16_trains_an_adapter(method, tmp_path):
    found = steps(method, tmp_path, adapter=True)
    assert torch.isfinite(torch.tensor([line[name] for line in found for name in ("loss", "grad_norm")])).all()
