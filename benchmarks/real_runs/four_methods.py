"""SFT, DPO, a reward model and GRPO of a real model, a few steps each: does every method train on this machine at all?

    python -m benchmarks.real_runs.four_methods MODEL [--steps 20] [--output runs/four]

Data are made here (sums, right and wrong answers to them). Each run must end with finite numbers, with weights that moved, and,
but for GRPO (20 steps are too few for a verdict), with a loss below that of its first step.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from pathlib import Path
from typing import Any

from datasets import Dataset

from posttrain import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

ROWS = 320


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def sums() -> list[tuple[str, int]]:
    dice = random.Random(0)
    pairs = [(dice.randint(2, 60), dice.randint(2, 60)) for _ in range(ROWS)]
    return [(f"What is {a} + {b}? Answer with the number only.", a + b) for a, b in pairs]


def pairs() -> Dataset:
    rows = [{"prompt": user(q), "chosen": assistant(f"{a}"), "rejected": assistant(f"{a + 7}")} for q, a in sums()]
    return Dataset.from_list(rows)


def closeness(completions: list[Any], solution: list[int], **_: Any) -> list[float]:
    """1 for the right number, less for others, 0 for none: a reward that nearly every group disagrees on."""
    answers = [re.findall(r"\d{1,6}", completion[0]["content"]) for completion in completions]
    return [1 / (1 + abs(int(found[0]) - right) / 10) if found else 0.0 for found, right in zip(answers, solution)]


def trainers(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Method -> a function that makes its trainer."""
    conversations = [{"messages": user(q) + assistant(f"{a}")} for q, a in sums()]
    prompts = [{"prompt": user(q), "solution": a} for q, a in sums()]
    online = {"num_generations": 8, "max_completion_length": 16, "learning_rate": 1e-5}
    return {
        "sft": lambda: SFTTrainer(model, args=SFTConfig(**options), train_dataset=Dataset.from_list(conversations)),
        "dpo": lambda: DPOTrainer(model, args=DPOConfig(**options), train_dataset=pairs()),
        "reward": lambda: RewardTrainer(model, args=RewardConfig(**options), train_dataset=pairs()),
        "grpo": lambda: GRPOTrainer(
            model, reward_funcs=closeness, args=GRPOConfig(**options | online), train_dataset=Dataset.from_list(prompts)
        ),
    }


def run(method: str, make: Any) -> str:
    began = time.perf_counter()
    trainer = make()
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    moved = sum(not weight.detach().equal(before[name]) for name, weight in trainer.model.named_parameters())
    assert trainer.state.global_step == trainer.args.max_steps
    assert all(map(math.isfinite, losses)), losses
    assert moved > len(before) // 2, f"{moved} of {len(before)} tensors moved"
    assert method == "grpo" or losses[-1] < losses[0], losses
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    shown = f", reward {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""
    return (
        f"{method}: {trainer.state.global_step} steps in {time.perf_counter() - began:.1f} s on {trainer.args.device}, loss "
        f"{losses[0]:.4f} -> {losses[-1]:.4f}{shown}, {moved} of {len(before)} tensors moved"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/four"))
    asked = parser.parse_args()
    shared = {"max_steps": asked.steps, "logging_steps": 1, "per_device_train_batch_size": 16, "report_to": "none"}
    results = []
    for method in ("sft", "dpo", "reward", "grpo"):
        options = {"output_dir": str(asked.output / method), "save_strategy": "no", "learning_rate": 2e-5, **shared}
        results.append(run(method, trainers(asked.model, options)[method]))
        print(results[-1], flush=True)
    print(*results, sep="\n")


if __name__ == "__main__":
    main()
