"""A small run that can be killed and resumed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from posttrain.methods.table import METHODS
from tests import tiny


class KillAfter(TrainerCallback):
    """SIGKILL when `step` is done (after its save, if it had one)."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Slow(TrainerCallback):
    """Steps that take long enough to be interrupted."""

    def __init__(self, seconds: float = 0.1, asleep: Path | None = None) -> None:
        self.seconds, self.asleep = seconds, asleep

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.asleep is not None:
            self.asleep.write_text("yes")
        time.sleep(self.seconds)


def main(
    method: str,
    folder: Path,
    *,
    resume: bool = False,
    rows: int = 20,
    callbacks: list[Any] | None = None,
    **options: Any,
):
    torch.manual_seed(0)
    name, *flags = method.split("-")
    model = tiny.reward_model() if name == "reward" else tiny.causal_lm(attention_dropout=0.1)
    chosen = {
        "output_dir": str(folder),
        "max_steps": 8,
        "save_steps": 2,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "dataset_cache_dir": tempfile.mkdtemp(),
        **options,
    }
    extra = {"args": METHODS[name].config_class(**chosen)}
    if "bf16" in flags:
        model = model.to(torch.bfloat16)
    if "lora" in flags:
        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
    data = tiny.chats(rows) if name == "sft" else tiny.pairs(rows)
    trainer = METHODS[name].trainer_class(
        model=model,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:6]),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
        **extra,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer
