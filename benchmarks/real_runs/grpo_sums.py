"""GRPO on a real 135M model, on a CPU, in minutes: it learns to answer sums with the number.

    python -m benchmarks.real_runs.grpo_sums MODEL [--steps 40]

Held-out sums are answered before and after; the reward of each is shown with its standard error.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from typing import Any

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer

HELD_OUT, ANSWERS = 32, 4


def answers_with_the_sum(completions: list[Any], answer: list[int], **kwargs: Any) -> list[float]:
    """0.2 for an answer that begins with a number, and up to 0.8 more the nearer it is to the sum."""
    found = []
    for completion, wanted in zip(completions, answer):
        number = re.match(r"\s*(\d+)", completion[0]["content"])
        found.append(0.0 if number is None else 0.2 + 0.8 * max(0.0, 1 - abs(int(number[1]) - wanted) / 10))
    return found


def rows(pairs: list[tuple[int, int]]) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {a} + {b}? Reply with the number."}], "answer": a + b}
            for a, b in pairs
        ]
    )


def evaluate(trainer: GRPOTrainer, name: str) -> tuple[float, float]:
    """Mean reward over the held-out sums, several answers each, and its standard error."""
    found, answers = trainer.evaluate(), trainer.args.num_generations_eval
    mean, deviation = found["eval_reward"], found["eval_rewards/answers_with_the_sum/std"]
    error = deviation / math.sqrt(HELD_OUT * answers)
    print(f"{name}: reward {mean:.3f} +- {error:.3f} on {HELD_OUT} held-out sums, {answers} answers each", flush=True)
    return mean, error


def sums_trainer(model: str, **options: Any) -> GRPOTrainer:
    pairs = sorted(
        ((a, b) for a in range(2, 20) for b in range(2, 20)), key=lambda pair: hash((pair[0] * 7919, pair[1]))
    )
    common: dict[str, Any] = {
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "num_generations_eval": ANSWERS,
        "per_device_eval_batch_size": 32,
        "max_completion_length": 10,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "log_completions": False,
    }
    data = {"train_dataset": rows(pairs[HELD_OUT:]), "eval_dataset": rows(pairs[:HELD_OUT])}
    return GRPOTrainer(model, answers_with_the_sum, GRPOConfig(**common | options), **data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/grpo-sums")
    words = parser.parse_args()
    trainer = sums_trainer(words.model, output_dir=words.output, max_steps=words.steps)
    before = evaluate(trainer, "before")
    began = time.monotonic()
    trainer.train()
    took = time.monotonic() - began
    after = evaluate(trainer, "after")
    errors = (after[0] - before[0]) / math.hypot(before[1], after[1])
    print(
        f"{words.steps} steps in {took / 60:.1f} min: {before[0]:.3f} -> {after[0]:.3f}, {errors:.1f} standard errors",
        flush=True,
    )


if __name__ == "__main__":
    main()
