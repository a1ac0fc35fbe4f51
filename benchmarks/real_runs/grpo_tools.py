"""GRPO with a tool and a real 135M model on one GPU: does it learn to call the tool where its own arithmetic fails?

    python -m benchmarks.real_runs.grpo_tools MODEL OUTPUT [--steps 30]

The task is to multiply a number of two digits by one of three, which a model of this size cannot do. As it comes it has never seen
a tool either, so SFT comes first, on conversations of which half call `multiply` and half state the product at once: after it the
model does either, and is right about one time in two. The reward of GRPO is 1 for the right product in the last message, nothing
else: that calling is better than guessing is for the model to find out. Writes OUTPUT/result.json: the curve, the accuracy on
held-out pairs of numbers before and after, how often the tool was called, and a rollout of each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.store import read_rollouts

HELD_OUT, DRAWN = 128, 4


def multiply(a: int, b: int) -> int:
    """
    The product of two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def right_product(completions: list[Any], product: list[int], **columns: Any) -> list[float]:
    """1 where the last number of the last message is the product."""
    said = [re.findall(r"\d+", each[-1].get("content") or "") if each else [] for each in completions]
    return [float(bool(numbers) and int(numbers[-1]) == wanted) for numbers, wanted in zip(said, product)]


def pairs(count: int, seed: int) -> list[tuple[int, int]]:
    """Different pairs of numbers; the held-out ones are the first of the shuffle."""
    every = [(a, b) for a in range(11, 100) for b in range(101, 1000, 7)]
    random.Random(seed).shuffle(every)
    return every[:count]


def question(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} times {b}?"}]


def lesson(a: int, b: int, calls: bool, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation that shows how the tool is called, or one that does without it."""
    answer = {"role": "assistant", "content": f"{a} times {b} is {a * b}."}
    called = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
    ]
    return {"prompt": question(a, b), "completion": [*(turns if calls else []), answer], "tools": schemas}


def fine_tuned(words: argparse.Namespace, numbers: list[tuple[int, int]], common: dict[str, Any]) -> str:
    """SFT on lessons of both kinds; where the model was saved."""
    schemas = Toolbox([multiply]).schemas
    data = [lesson(a, b, number % 2 == 0, schemas) for number, (a, b) in enumerate(numbers)]
    config = SFTConfig(
        output_dir=f"{words.output}/sft",
        num_train_epochs=1,
        per_device_train_batch_size=words.batch,
        learning_rate=2e-4,
        logging_steps=10,
        chat_template_path="chatml",
        **common,
    )
    trainer = SFTTrainer(words.model, config, train_dataset=Dataset.from_list(data))
    trainer.train()
    trainer.save_model(config.output_dir)
    return config.output_dir


def grpo_trainer(words: argparse.Namespace, model: str, numbers: list[tuple[int, int]], common: dict[str, Any]) -> Any:
    rows = [{"prompt": question(a, b), "product": a * b} for a, b in numbers]
    config = GRPOConfig(
        output_dir=f"{words.output}/grpo",
        max_steps=words.steps,
        per_device_train_batch_size=words.samples,
        per_device_eval_batch_size=words.samples,
        num_generations=8,
        num_generations_eval=DRAWN,
        max_completion_length=160,
        max_tool_calling_iterations=2,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        log_completions=False,
        **common,
    )
    return GRPOTrainer(
        model,
        right_product,
        config,
        train_dataset=Dataset.from_list(rows[words.held_out :]),
        eval_dataset=Dataset.from_list(rows[: words.held_out]),
        tools=[multiply],
    )


def measured(trainer: Any, questions: int, name: str) -> dict[str, float]:
    found = trainer.evaluate()
    share = found["eval_reward"]
    # Of the questions; their draws add nothing to it that we count on
    error = math.sqrt(share * (1 - share) / questions)
    kept = {"accuracy": share, "error": error, "calls": found["eval_tools/call_frequency"]}
    print(f"{name}: right {share:.3f} +- {error:.3f}, {kept['calls']:.2f} calls a question", flush=True)
    return kept


def first_rollouts(folder: str, step: int) -> list[dict[str, Any]]:
    """One that called the tool and one that did not, of a step."""
    rows = [row for row in read_rollouts(folder).to_pylist() if row["step"] == step]
    names = ("prompt", "completion", "tool_calls", "reward")
    found = [next((row for row in rows if bool(row["tool_calls"]) is called), None) for called in (True, False)]
    return [{name: row.get(name) for name in names} for row in found if row is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=256, help="completions of a step")
    parser.add_argument("--lessons", type=int, default=2048, help="conversations of SFT")
    parser.add_argument("--batch", type=int, default=32, help="of SFT")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    words = parser.parse_args()
    common = {"save_strategy": "no", "report_to": "none"}
    numbers = pairs(words.held_out + words.lessons + 4096, seed=1)
    lessons = numbers[words.held_out : words.held_out + words.lessons]
    asked = numbers[: words.held_out] + numbers[words.held_out + words.lessons :]
    trainer = grpo_trainer(words, fine_tuned(words, lessons, common), asked, common)
    before = measured(trainer, words.held_out, "before GRPO")
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    after = measured(trainer, words.held_out, "after GRPO")
    names = ("step", "reward", "tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "entropy")
    curve = [{name: each.get(name) for name in names} for each in trainer.state.log_history if "reward" in each]
    rollouts = {f"step {step}": first_rollouts(trainer.args.output_dir, step) for step in (1, words.steps)}
    result = {"before": before, "after": after, "seconds": seconds, "curve": curve, "rollouts": rollouts}
    Path(words.output, "result.json").write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")
    print(f"{len(curve)} steps in {seconds:.0f} s: {after['accuracy'] - before['accuracy']:+.3f}")


if __name__ == "__main__":
    main()
