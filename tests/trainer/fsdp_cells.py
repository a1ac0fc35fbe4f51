"""Runs that FSDP2 on two processes, and HSDP on four, must end as one process without it does.

`main` runs once alone and once in several processes; each run leaves its final model, its log and its checkpoints in FOLDER/CELL.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainerCallback

from posttrain.core import faults
from posttrain.methods.table import METHODS
from tests import tiny
from tests.forked import Child, start_group
from tests.trainer import fsdp_on_cpu, resumable_run

STEPS, SAVED = 4, 2
ROWS = 11  # 4 + 4 + 3: the last window is uneven over two processes, and leaves one of four without a row
FOUR, COPIES = 4, 2
"""Four processes are two copies of two shards."""
HSDP_LAUNCHED = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(COPIES),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(FOUR // COPIES),
}
LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
"""What `accelerate launch` sets for the config that `accelerate config` writes."""
ONLINE = {
    "num_generations": 4, "max_completion_length": 5, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.1,
    "reward_workers": 0,
}  # fmt: skip
PPO = {"max_completion_length": 5, "reward_workers": 0, "num_ppo_epochs": 2, "adap_kl_ctrl": True}
GKD = {"max_completion_length": 5, "lmbda": 0.5, "beta": 0.3}
SDFT = {"max_completion_length": 5, "num_generations": 2}
REWARDED = ("grpo", "ppo", "rloo", "online_dpo", "xpo", "nash_md", "a2po", "sdpo")
TAUGHT = ("gkd", "distillation", "iw_opd", "minillm", "gold")
MOVES = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
AVERAGED = {"teacher_model_kind": "ema", "teacher_update_rate": 0.3}
CONVOLUTIONS = {"family": "lfm2", "layer_types": ["conv", "full_attention"]}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


COMPARED = (
    "loss", "eval_loss", "grad_norm", "num_tokens", "entropy", "reward", "reward_std", "aux_loss", "kl", "eval_kl", "delta",
    "rewards/margins", "eval_rewards/margins", "nll_loss", "log_odds_ratio", "accuracy", "eval_accuracy",
)  # fmt: skip


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


@dataclass(frozen=True)
class Cell:
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    launched: bool = False  # by accelerate's environment variables instead of options, from a path
    fault: str = ""  # of the last process
    fsdp: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    whole: bool = False  # its reference writes, which takes whole weights


CELLS = {
    "sft": Cell("sft", {"max_grad_norm": 0.5, "load_best_model_at_end": True, "eval_strategy": "steps"}, resumes=True),
    "sft-tied": Cell("sft", {"chunk_tokens": 7}, model={"tie_word_embeddings": True}),
    "sft-padded": Cell("sft", {"padding_free": False, "loss_type": "dft", "chunk_tokens": 7}),
    "sft-passes": Cell("sft", {"max_tokens_per_pass": 90}),
    "sft-experts": Cell("sft", {"router_aux_loss_coef": 0.1}, model={"family": "qwen3_moe"}),
    "sft-convolutions": Cell("sft", {"gradient_checkpointing": True}, model=CONVOLUTIONS),
    "sft-recomputed": Cell("sft", {"gradient_checkpointing": True}),
    "sft-launched": Cell("sft", {"optim": "adamw_torch"}, launched=True, resumes=True),
    "sft-lora": Cell("sft", {"max_grad_norm": 0.5}, LORA, resumes=True),
    "sft-lora-head": Cell("sft", {"chunk_tokens": 7}, {"r": 4, "target_modules": ["q_proj", "lm_head"]}),
    "sft-nonfinite": Cell("sft", fault="nan:gradient:2"),
    "dpo": Cell("dpo", {"eval_strategy": "steps"}),
    "dpo-lora": Cell("dpo", {"precompute_ref_log_probs": False}, LORA),
    "dpo-follows": Cell("dpo", MOVES, resumes=True),
    "grpo-follows": Cell("grpo", ONLINE | MOVES | {"steps_per_generation": 2, "num_iterations": 1}, resumes=True),
    "reward": Cell("reward"),
    "reward-lora": Cell("reward", {}, LORA),
    "cpo": Cell("cpo", {"loss_type": "simpo"}),
    "orpo": Cell("orpo"),
    "orpo-lora": Cell("orpo", {"prompt_nll": False}, LORA),
    "tpo": Cell("tpo"),
    "kto": Cell("kto", {"eval_strategy": "steps"}, resumes=True),
    "kto-lora": Cell("kto", {}, LORA),
    "kto-precomputed": Cell("kto", {"precompute_ref_log_probs": True}),
    "bco": Cell("bco", {"eval_strategy": "steps"}, resumes=True),
    "bco-lora": Cell("bco", {}, LORA),
    "prm": Cell("prm", {"eval_strategy": "steps"}, resumes=True),
    "prm-lora": Cell("prm", {}, LORA),
    "grpo": Cell("grpo", ONLINE | {"eval_strategy": "steps"}, resumes=True),
    "grpo-convolutions": Cell("grpo", ONLINE, model=CONVOLUTIONS),
    "ppo": Cell("ppo", PPO, resumes=True),
    "ppo-lora": Cell("ppo", PPO, LORA, resumes=True),
    "gkd": Cell("gkd", {**GKD, "eval_strategy": "steps"}, resumes=True),
    "gkd-lora": Cell("gkd", {**GKD, "lmbda": 0.0, "chunk_tokens": 7}, LORA),
    "sdft": Cell("sdft", SDFT | {"distillation_mode": "full_logits", "teacher_model_kind": "live"}),
    "sdft-lora": Cell("sdft", SDFT | {"distillation_topk": 5, "steps_per_generation": 4}, LORA),
    "sdft-average": Cell("sdft", SDFT | AVERAGED, resumes=True),
    "sdft-average-lora": Cell("sdft", SDFT | AVERAGED, LORA, resumes=True),
    "rloo": Cell("rloo", ONLINE),
    # Of one weight the gradient is hardly more than rounding, which Adam would divide by itself.
    "online_dpo": Cell("online_dpo", without(ONLINE, "num_generations") | {"adam_epsilon": 1e-5}),
    "xpo": Cell("xpo", without(ONLINE, "num_generations"), whole=True),
    "nash_md": Cell("nash_md", without(ONLINE, "num_generations", "num_iterations"), whole=True),
    "a2po": Cell("a2po", without(ONLINE, "beta")),
    "distillation": Cell("distillation", {"max_completion_length": 5, "beta": 1.0}),
    "iw_opd": Cell("iw_opd", {"max_completion_length": 5, "lmbda": 0.5}),
    "minillm": Cell("minillm", ONLINE | {"num_iterations": 1}),
    "gold": Cell("gold", {"max_completion_length": 5, "lmbda": 0.5}),
    "sdpo": Cell(
        "sdpo", ONLINE | {"distillation_weight": 0.5, "success_reward_threshold": 8.0, "teacher_model_kind": "live"}
    ),
    "ssd": Cell("ssd", {"max_completion_length": 5}),
    "grpo-lora": Cell("grpo", ONLINE | {"max_tokens_per_pass": 40}, LORA, fsdp={"activation_checkpointing": True}),
}


def checksum(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that any other completion would change."""
    return [float(sum(ids) % 13) for ids in completion_ids]


def prompts(rows: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {number}" + " please" * (number % 3)} for number in range(rows)]


def triples(rows: int) -> list[dict[str, Any]]:
    return [{**row, "reference": row["chosen"]} for row in tiny.pairs(rows)]


DATA = {
    "sft": tiny.chats, "grpo": prompts, "ppo": prompts, "tpo": triples, "kto": resumable_run.rated, "bco": resumable_run.rated,
    "prm": tiny.steps, "sdft": resumable_run.DATA["sdft"],
    **dict.fromkeys(("rloo", "online_dpo", "xpo", "nash_md", "a2po", "minillm", "sdpo", "ssd"), prompts),
    **dict.fromkeys(("gkd", "distillation", "iw_opd", "gold"), resumable_run.DATA["gkd"]),
}  # fmt: skip
"""The others read pairs."""


def model_of(cell: Cell) -> Any:
    heads = {"reward": tiny.reward_model, "prm": tiny.process_reward_model}
    if cell.method in heads:
        return heads[cell.method](**cell.model)
    return tiny.causal_lm(**{"family": "llama", **cell.model})


def trainer(cell: Cell, folder: Path, **changes: Any) -> Any:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = METHODS[cell.method].config_class(
        **{
            "output_dir": str(folder),
            "max_steps": STEPS,
            "save_steps": SAVED,
            "eval_steps": SAVED,
            "logging_steps": 1,
            **_cut(cell.method, world),
            "learning_rate": 1e-3,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "dataset_cache_dir": str(folder.parent / "cache"),
            **({"fsdp": True, "fsdp_config": dict(cell.fsdp)} if world > 1 and not cell.launched else {}),
            **({"dp_replicate_size": COPIES} if world == FOUR and not cell.launched else {}),
            **cell.options,
            **changes,
        }
    )
    data = DATA.get(cell.method, tiny.pairs)(ROWS)
    more: dict[str, Any] = {"reward_funcs": checksum} if cell.method in REWARDED else {}
    if cell.method in TAUGHT:
        teacher = tiny.causal_lm(1, family="llama")
        more = {"teacher_model": teacher, "teacher_processing_class": tiny.tokenizer()}
    if cell.method == "bco":
        more = {"embedding_func": resumable_run.embed, "embedding_tokenizer": tiny.tokenizer()}
    if cell.lora is not None:
        more["peft_config"] = peft.LoraConfig(**cell.lora)
    return METHODS[cell.method].trainer_class(
        model=str(folder.parent / "model") if cell.launched else model_of(cell),
        args=args,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:5]),
        processing_class=tiny.tokenizer(),
        callbacks=[IsSharded()] if args.sharding is not None else None,
        **more,
    )


def _cut(method: str, world: int) -> dict[str, int]:
    """Eight rows a step; the same micro-batches on one process as on two (the routers' loss depends on them)."""
    if method in (*REWARDED, *TAUGHT, "sdft", "ssd"):  # which rollouts come together depends on the accumulation
        return {"per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 2}
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // world}


class IsSharded(TrainerCallback):
    """No comparison below would notice that nothing was sharded, or that each process had a quarter and no copy."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule), f"{type(model).__name__} is not sharded"
        shards = [p for p in model.parameters() if hasattr(p, "device_mesh")]  # others are gathered at the moment
        meshes = {tuple(shard.device_mesh.shape) for shard in shards}
        copies = args.dp_replicate_size
        assert meshes == {(copies, args.world_size // copies) if copies > 1 else (args.world_size,)}, meshes


@contextmanager
def environment(cell: Cell, world: int, rank: int) -> Any:
    """The variables of a launch, and of faults, while a cell runs. accelerate leaves some behind."""
    before = dict(os.environ)
    if cell.launched and world > 1:
        os.environ.update(LAUNCHED | (HSDP_LAUNCHED if world == FOUR else {}))
    faults.arm(cell.fault if rank == world - 1 else None)
    try:
        yield
    finally:
        faults.arm(None)
        os.environ.clear()
        os.environ.update(before)


def run(cell: Cell, folder: Path, **changes: Any) -> None:
    made = trainer(cell, folder, **changes)
    made.train()
    made.save_model(str(folder / "final"))
    if not cell.resumes:
        return
    resumed = folder.with_name(folder.name + "-resumed")
    if made.is_world_process_zero():
        shutil.copytree(folder / f"checkpoint-{SAVED}", resumed / f"checkpoint-{SAVED}")
    made.accelerator.wait_for_everyone()
    again = trainer(cell, resumed, **changes)
    again.train(resume_from_checkpoint=True)
    again.save_model(str(resumed / "final"))


def start(processes: int, home: Path, names: list[str], **changes: Any) -> list[Child]:
    """`main` in so many processes, with changed options."""
    home.mkdir()
    model_of(CELLS["sft-launched"]).save_pretrained(home / "model")
    tiny.tokenizer().save_pretrained(home / "model")
    return start_group(processes, lambda rank: main(home, names, **changes), home / "rank")


def main(home: Path, names: list[str], **changes: Any) -> None:
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if changes.get("fsdp", True):
        fsdp_on_cpu.allow()
    for name in names:
        with environment(CELLS[name], world, rank):
            try:
                run(CELLS[name], home / name, **changes)
            except Exception:
                (home / f"{name}-{rank}.error").write_text(traceback.format_exc())
                raise


# ---- what is seen of them ------------------------------------------------------------------------------------------------


def final(home: Path, name: str) -> dict[str, torch.Tensor]:
    folder = home / name / "final"
    if not folder.exists():
        errors = [path.read_text() for path in home.glob("*.error")]
        pytest.fail("\n".join(errors) or (home / "rank-0.log").read_text()[-3000:])
    return load_file(next(folder.glob("*model.safetensors")))


def logged(home: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]


def assert_ends_alike(name: str, alone: Path, together: Path) -> None:
    """Weights to 1e-5, and what was logged."""
    one, many = final(alone, name), final(together, name)
    assert one.keys() == many.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(many[key], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    seen = set()
    for line, other in zip(logged(alone, name), logged(together, name), strict=True):
        for key in {*COMPARED} & line.keys():
            seen.add(key)
            near_zero = 1e-5 if "rewards" in key else 1e-6  # a reward is a difference of two sums of about 100
            assert other[key] == pytest.approx(line[key], rel=1e-4, abs=near_zero), key
    assert {"loss", "grad_norm"} <= seen


def assert_resumed_exactly(name: str, home: Path, processes: int) -> None:
    """Weights, shards of every process and logged numbers, to the bit."""
    whole, resumed = final(home, name), final(home, f"{name}-resumed")
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    last = f"checkpoint-{STEPS}"
    states = sorted(path.name for path in (home / name / last).glob("optimizer*.safetensors"))
    assert len(states) in (1, processes)  # whole, or of each process
    for state in states:
        kept = [load_file(home / run / last / state) for run in (name, f"{name}-resumed")]
        assert kept[0].keys() == kept[1].keys()
        assert all(torch.equal(kept[1][key], tensor) for key, tensor in kept[0].items())
    lines = {run: [line for line in logged(home, run) if "loss" in line] for run in (name, f"{name}-resumed")}
    for line, other in zip(lines[name][SAVED:], lines[f"{name}-resumed"], strict=True):
        for key in COMPARED:
            assert other.get(key) == line.get(key), key
