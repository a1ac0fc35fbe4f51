"""AsyncGRPO of TRL 1.16 and ours on the same scripted rollouts, on the CPU: one worker and one transfer, unmodified, for both.

    python -m benchmarks.parity.async_grpo trl FILE                 what TRL logs, by the Python of its environment
    python -m benchmarks.parity.async_grpo posttrain FILE           the same of ours, against FILE; exit code 1 on a difference

benchmarks/parity/run.sh runs both. TRL's attention is a kernel for GPUs; in its place stands one of a few lines here, which looks
back along the same paths.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from tests import tiny
from tests.methods.scripted_worker import RecordingTransfer, ScriptedWorker

OPTIONS = {
    "max_steps": 4, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "learning_rate": 0.5,
    "optim": "sgd", "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "gradient_checkpointing": False,
    "disable_tqdm": True,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two bounds": {"epsilon": 0.1, "epsilon_high": 0.4},
    "every other step": {"weight_sync_steps": 2},
}


def played(trainer: Any, config: Any, variant: str, **more: Any) -> dict[str, Any]:
    """Losses of the steps, and the norm of every tensor at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.causal_lm(vocab_size=320).save_pretrained(f"{folder}/model")  # a word for each of the tokenizer's
        tiny.tokenizer().save_pretrained(f"{folder}/model")
        options = {**OPTIONS, **VARIANTS[variant], **more}
        worker = ScriptedWorker(groups=2 * options.get("weight_sync_steps", 1), ahead=2)  # TRL reads one batch ahead
        made = trainer(
            f"{folder}/model",
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=config(output_dir=f"{folder}/run", **options),
            train_dataset=Dataset.from_list([{"prompt": f"Say {i}"} for i in range(12)]),
            rollout_worker=worker,
            weight_transfer=(transfer := RecordingTransfer()),
        )
        made.train()
    losses = [line["loss"] for line in made.state.log_history if "loss" in line]
    norms = {name: tensor.norm().item() for name, tensor in made.model.state_dict().items()}
    return {"losses": losses, "norms": norms, "calls": [*transfer.calls, *map(str, worker.calls)]}


def on_a_cpu() -> Any:
    """What TRL asks of its kernel: each segment of queries after the keys of its own path, causally from the end."""

    def attend(query, key, value, cu_q, cu_k, max_q, max_k, softmax_scale=None, causal=True, **others):
        found, copies = torch.zeros_like(query), query.shape[1] // key.shape[1]
        for q, k in zip(pairwise(cu_q), pairwise(cu_k)):
            asked = query[slice(*q)].transpose(0, 1)
            keys, values = (x[slice(*k)].transpose(0, 1).repeat_interleave(copies, 0) for x in (key, value))
            weights = asked @ keys.transpose(1, 2) * softmax_scale
            rows, columns = weights.shape[1:]
            hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
            found[slice(*q)] = (weights.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        return found

    return SimpleNamespace(flash_attn_varlen_func=attend)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Of a variant: losses to 1e-6, norms to 1e-5, and how worker and transfer were called."""
    steps = {f"loss of step {i}": pair for i, pair in enumerate(zip(ours["losses"], theirs["losses"], strict=True), 1)}
    norms = {name: (ours["norms"].get(name, math.nan), norm) for name, norm in theirs["norms"].items()}
    found = [
        f"{name}: {one} here, {other} in TRL"
        for bound, pairs in ((1e-6, steps), (1e-5, norms))
        for name, (one, other) in pairs.items()
        if not abs(one - other) <= bound
    ]
    return found + (
        [] if ours["calls"] == theirs["calls"] else [f"calls: {ours['calls']} here, {theirs['calls']} in TRL"]
    )


def record(file: Path) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = on_a_cpu
    async_grpo_trainer.get_peak_flops_per_device = lambda *given: None  # of a GPU
    found = {name: played(AsyncGRPOTrainer, AsyncGRPOConfig, name, token_budget=0) for name in VARIANTS}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    file.write_text("{" + lines + "}\n", encoding="utf-8")


def compare(file: Path) -> int:
    from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer

    theirs, status = json.loads(file.read_text(encoding="utf-8")), 0
    for name in VARIANTS:
        apart = differences(played(AsyncGRPOTrainer, AsyncGRPOConfig, name), theirs[name])
        print(f"async-grpo, {name}: {'; '.join(apart) or 'equal'}")
        status |= bool(apart)
    return status


if __name__ == "__main__":
    side, file = sys.argv[1], Path(sys.argv[2])
    sys.exit(record(file) if side == "trl" else compare(file))
