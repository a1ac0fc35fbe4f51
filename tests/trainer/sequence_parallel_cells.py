"""Runs in which processes share the tokens of each row. Each leaves the gradient of every step, its log and its final weights.

In float64: whatever is not rounding is seen.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from posttrain.methods.table import METHODS
from posttrain.models.attention import sequence_parallel
from posttrain.models.sharding import whole
from tests import tiny
from tests.forked import Child, start_group
from tests.trainer import fsdp_on_cpu
from tests.trainer.fsdp_cells import DATA, LORA, ONLINE, checksum

STEPS, SAVED = 3, 2
ROWS = 11  # the last step is uneven, and a process that reads for itself may be left without a row
ONLINE = {key: value for key, value in ONLINE.items() if key != "steps_per_generation"} | {"epsilon": 2e-3}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
SINKS = {
    "family": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 8,
    "experts_implementation": "eager",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    resumes: bool = False
    fsdp: bool = False  # where there are several processes


CELLS = {
    "sft": Cell("sft", {"eval_strategy": "steps", "max_grad_norm": 0.5}, resumes=True),
    "dpo": Cell("dpo", {"eval_strategy": "steps"}),
    "grpo": Cell("grpo", ONLINE | {"eval_strategy": "steps"}, resumes=True),
    "sft-dft": Cell("sft", {"loss_type": "dft", "chunk_tokens": 7}),
    "sft-passes": Cell("sft", {"max_tokens_per_pass": 40}),
    "sft-packed": Cell("sft", {"packing": True, "max_length": 70}),
    "sft-recomputed": Cell("sft", {"gradient_checkpointing": True}),
    "sft-one-key-head": Cell("sft", model={"num_key_value_heads": 1}),
    "sft-sliding": Cell("sft", model=SLIDING),
    "sft-lora": Cell("sft", lora=True, resumes=True),
    "sft-experts": Cell("sft", {"router_aux_loss_coef": 0.0}, {"family": "qwen3_moe"}),
    "sft-fsdp": Cell("sft", fsdp=True, resumes=True),
    "dpo-ragged": Cell("dpo", {"share_prompts": False}),
    "dpo-coupled": Cell("dpo", {"loss_type": ["aot", "sft"], "loss_weights": [1.0, 0.5]}),
    "dpo-precomputed": Cell("dpo", {"precompute_ref_log_probs": True}),
    "dpo-lora": Cell("dpo", lora=True),
    "dpo-fsdp": Cell("dpo", {"max_tokens_per_pass": 60}, fsdp=True),
    "cpo": Cell("cpo", {"loss_type": "simpo"}),
    "orpo": Cell("orpo"),
    "tpo": Cell("tpo"),
    "grpo-sequences": Cell("grpo", ONLINE | {"importance_sampling_level": "sequence"}),
    # The quantile is that of a micro-batch over all processes, whose samples depend on the accumulation.
    "grpo-quantile": Cell("grpo", ONLINE | {"top_entropy_quantile": 0.6, "gradient_accumulation_steps": 1}),
    "grpo-entropy": Cell("grpo", ONLINE | {"entropy_coef": 0.01, "max_tokens_per_pass": 30}),
    "grpo-windows": Cell("grpo", ONLINE | {"steps_per_generation": 4, "shuffle_dataset": True}, resumes=True),
    "grpo-fsdp": Cell("grpo", ONLINE, fsdp=True),
    "rloo": Cell("rloo", {key: value for key, value in ONLINE.items() if key != "epsilon"}),
    "sft-sinks": Cell("sft", {"router_aux_loss_coef": 0.0}, SINKS),
}


class KeptGradients(TrainerCallback):
    """Of every step, as it will be taken; and whether processes have exchanged anything, which no comparison would notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        found = {
            name.removeprefix("module."): whole(p.grad).clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        if args.process_index == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(found, self.folder / f"gradient-{state.global_step}.safetensors")
        assert bool(sequence_parallel._groups) == (args.world_size > 1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def kept_bytes(model: torch.nn.Module, found: list[int]) -> Iterator[None]:
    """Adds to `found` what autograd keeps for a backward, weights left out, each memory counted once."""
    weights = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
    found.append(sum(kept.values()))


def trainer(cell: Cell, folder: Path, size: int) -> Any:
    """`size`: processes that share a row."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    readers = world // size
    args = METHODS[cell.method].config_class(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "save_steps": SAVED,
            "eval_steps": SAVED,
            "logging_steps": 1,
            "per_device_train_batch_size": 4 // readers,
            "gradient_accumulation_steps": 2,
            "per_device_eval_batch_size": 4,
            "learning_rate": 1e-3,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "dataset_cache_dir": str(folder.parent / "cache"),
            "sequence_parallel_size": size,
            **({"fsdp": True} if cell.fsdp and world > 1 else {}),
            **cell.options,
        }
    )
    data = DATA.get(cell.method, tiny.pairs)(ROWS)
    more: dict[str, Any] = {"reward_funcs": checksum} if cell.method in ("grpo", "rloo") else {}
    if cell.lora:
        more["peft_config"] = peft.LoraConfig(**LORA)
    model = tiny.with_exact_norms(tiny.causal_lm(dtype=torch.float64, **cell.model))
    if cell.model.get("family") == "qwen3_moe":
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    return METHODS[cell.method].trainer_class(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:5]),
        processing_class=tiny.tokenizer(),
        callbacks=[KeptGradients(folder / "gradients")],
        **more,
    )


def run(cell: Cell, folder: Path, size: int) -> None:
    made = trainer(cell, folder, size)
    kept, compute = [], made.compute_loss

    def measured(model: Any, *given: Any, **named: Any) -> Any:
        with kept_bytes(model, kept):
            return compute(model, *given, **named)

    made.compute_loss = measured
    made.train()
    if made.is_world_process_zero():
        (folder / "kept_bytes.json").write_text(json.dumps(kept))
    made.save_model(str(folder / "final"))
    if not cell.resumes or size == 1:
        return
    resumed = folder.with_name(folder.name + "-resumed")
    if made.is_world_process_zero():
        shutil.copytree(folder / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
    made.accelerator.wait_for_everyone()
    again = trainer(cell, resumed, size)
    again.train(resume_from_checkpoint=True)
    again.save_model(str(resumed / "final"))


def main(home: Path, names: list[str], size: int) -> None:
    before = dict(os.environ)
    for name in names:
        try:
            with fsdp_on_cpu.allowed() if CELLS[name].fsdp else nullcontext():
                run(CELLS[name], home / name, size)
        except Exception:
            (home / f"{name}-{os.environ.get('RANK', '0')}.error").write_text(traceback.format_exc())
            raise
        finally:
            os.environ.clear()
            os.environ.update(before)  # accelerate leaves some behind
    if dist.is_initialized():
        dist.destroy_process_group()


def start(processes: int, size: int, home: Path, names: list[str]) -> list[Child]:
    home.mkdir(parents=True)
    return start_group(processes, lambda rank: main(home, names, size), home / "rank")
