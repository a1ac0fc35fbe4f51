"""A small run that can be killed and resumed."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import TrainerCallback

import posttrain.rollout.engines.native.engine  # noqa: F401 - children of tests/forked.py should find everything imported
from posttrain.methods.table import METHODS
from posttrain.trainer.checkpoints.step_file import StepFile
from tests import tiny

CACHE = tempfile.mkdtemp(prefix="posttrain-tokens-")


ONLINE = ("grpo", "rloo", "online_dpo", "xpo", "nash_md", "a2po", "sdpo")
ONLINE_OPTIONS = {
    "num_generations": 4,
    "max_completion_length": 5,
    "steps_per_generation": 4,  # two optimizer steps
    "num_iterations": 2,
    "beta": 0.1,
    "reward_workers": 0,
}
NOT_TAKEN = {
    "online_dpo": ("num_generations",),
    "xpo": ("num_generations",),
    "nash_md": ("num_generations", "num_iterations"),
    "a2po": ("beta",),
}
"""Of those, options that a method has no choice about."""


PPO_OPTIONS = {
    "max_completion_length": 5,
    "gradient_accumulation_steps": 4,  # a generation: two optimizer steps, three times
    "num_mini_batches": 2,
    "num_ppo_epochs": 3,
    "adap_kl_ctrl": True,
    "kl_coef": 0.2,
    "target": 0.01,
    "horizon": 100.0,
    "reward_workers": 0,
}


WINDOW = {"max_completion_length": 5, "steps_per_generation": 4, "num_iterations": 2}
TAUGHT_OPTIONS = {
    "gkd": {**WINDOW, "lmbda": 0.5},
    "sdft": {**WINDOW, "num_generations": 2, "teacher_model_kind": "ema", "teacher_update_rate": 0.3},
    "sdpo": {"distillation_weight": 0.5, "success_reward_threshold": 8.0, "teacher_update_rate": 0.3},
}


def checksum(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that any other completion would change."""
    return [float(sum(ids) % 13) for ids in completion_ids]


def rated(rows: int) -> list[dict[str, Any]]:
    """Answers with a label that has something to do with the prompt, as a density ratio needs it."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": i % 3 > 0}
        for i, row in enumerate(tiny.pairs(rows))
    ]


def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    return torch.stack([attention_mask.sum(1), (input_ids * attention_mask).sum(1) % 7], 1).float()


def prompts(rows: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {number}"} for number in range(rows)]


DATA = {
    "sft": tiny.chats,
    "baseline": tiny.chats,
    "gkd": lambda rows: [{"prompt": f"Say {i}", "completion": f" {i}, {i + 1}"} for i in range(rows)],
    "sdft": lambda rows: [{"prompt": f"Say {i}", "privileged_context": f"{i}, {i + 1}"} for i in range(rows)],
    **dict.fromkeys((*ONLINE, "ppo"), prompts),
    "prm": tiny.steps,
}  # the others read pairs


def as_stream(rows: list[dict[str, Any]]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


class KillAfter(TrainerCallback):
    """SIGKILL when `step` is done (after its save, if it had one)."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class RowOrder(TrainerCallback):
    """Which rows each step was made of, in `row_order.jsonl`."""

    trainer: Any = None

    def __init__(self, folder: Path) -> None:
        self.file = StepFile(folder / "row_order.jsonl")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.file.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.file.append(state.global_step, {"rows": self.trainer.guard.rows})


class Hold(TrainerCallback):
    """Step `step` ends when a file appears, or after five minutes."""

    def __init__(self, step: int, until: Path) -> None:
        self.step, self.until = step, until

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + 300
        while state.global_step == self.step and not self.until.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


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
    tokenizer: Any = None,
    **options: Any,
):
    """Make a trainer of `method` ("sft", "dpo-lora", "reward-bf16", "bco-udm", ...) and train it in `folder`."""
    trainer = make(method, folder, rows=rows, callbacks=callbacks, tokenizer=tokenizer, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def make(
    method: str,
    folder: Path,
    *,
    rows: int = 20,
    callbacks: list[Any] | None = None,
    tokenizer: Any = None,
    **options: Any,
):
    torch.manual_seed(0)
    name, *flags = method.split("-")
    heads = {"reward": tiny.reward_model, "prm": tiny.process_reward_model}
    model = heads[name]() if name in heads else tiny.causal_lm(attention_dropout=0.1)
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
        "dataset_cache_dir": CACHE,
        **options,
    }
    if name in ONLINE:
        own = {option: value for option, value in ONLINE_OPTIONS.items() if option not in NOT_TAKEN.get(name, ())}
        chosen = {**own, **chosen}
    if name == "ppo":
        chosen = {**chosen, **PPO_OPTIONS, **options}
    chosen = {**TAUGHT_OPTIONS.get(name, {}), **chosen}
    extra: dict[str, Any] = {"args": METHODS[name].config_class(**chosen)}
    if name in (*ONLINE, "ppo"):
        extra["reward_funcs"] = checksum
    if name == "gkd":
        extra |= {"teacher_model": tiny.causal_lm(1), "teacher_processing_class": tiny.tokenizer()}
    if "critic" in flags:
        extra["value_model"] = tiny.reward_model(3)
    if "bf16" in flags:
        model = model.to(torch.bfloat16)
    if "lora" in flags:
        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
    if "udm" in flags:
        extra |= {"embedding_func": embed, "embedding_tokenizer": tiny.tokenizer()}
    data = rated(rows) if "udm" in flags else DATA.get(name, tiny.pairs)(rows)
    order = RowOrder(Path(folder))
    trainer = METHODS[name].trainer_class(
        model=model,
        train_dataset=as_stream(data) if "stream" in flags else Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:6]),
        processing_class=tokenizer or tiny.tokenizer(),
        callbacks=[order, *(callbacks or [])],
        **extra,
    )
    order.trainer = trainer
    return trainer
