"""Runs that never ran: metrics, rollouts and checkpoints of a made-up GRPO run, written by the library's own writers.

python -m tests.view.made_up FOLDER [STEPS]
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from posttrain.rollout.store import write_file
from posttrain.trainer.checkpoints.step_file import StepFile

QUESTIONS = 100
NAMES = ("Ada", "Grace", "Alan", "Emmy", "Kurt", "Sofia", "Carl", "Mary", "Leo", "Ida")
THINGS = ("apples", "books", "marbles", "tickets", "stamps", "coins", "pencils")
OPENINGS = ("Let me think step by step.", "First, I add the numbers.", "We are asked for the total.", "Okay, so")
END = "<|im_end|>"
IMAGE = {"key": "0f" * 16, "column": "prompt", "place": 0, "height": 40, "width": 60, "tokens": 4, "start": 1}


def question(row: int) -> tuple[str, int]:
    dice = random.Random(row)
    one, two, times = dice.randint(2, 40), dice.randint(2, 40), dice.randint(2, 5)
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    words = (
        f"{name} has {one} {thing} and buys {two} more. A friend has {times} times as many. How many has the friend?"
    )
    return words, (one + two) * times


def answer(row: int, dice: random.Random, skill: float) -> tuple[str, bool]:
    _, right = question(row)
    is_right = dice.random() < skill
    said = right if is_right else right + dice.choice((-10, -2, -1, 1, 3, 12))
    words = [dice.choice(OPENINGS)]
    words += [f"So there are {dice.randint(4, 80)} of them at first." for _ in range(dice.randint(1, 4))]
    words.append(f"Then the friend has {said}.\n\nAnswer: {said}")
    return " ".join(words), is_right


def make_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE that has seen the questions."""
    dice = random.Random(0)
    texts = [text for row in range(QUESTIONS) for text in (question(row)[0], answer(row, dice, 0.5)[0])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[END, "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def record(
    tokenizer: Tokenizer, step: int, row: int, group: int, sample: int, dice: random.Random, of: int
) -> dict[str, Any]:
    skill = 0.15 + 0.75 / (1 + math.exp(-8 * (step / of - 0.4)))
    asked, right = question(row)
    prompt = [{"role": "user", "content": asked}]
    text, is_right = answer(row, dice, skill)
    kind = dice.random()
    calls, messages, failures = [], [{"role": "assistant", "content": text}], []
    is_cut, error = kind < 0.04, "the engine lost its connection" if 0.04 <= kind < 0.045 else None
    if kind > 0.85:  # a turn with a tool
        fails = kind > 0.97
        call = {"name": "calculate", "arguments": json.dumps({"expression": f"{right // 2} * 2"})}
        outcome = "ZeroDivisionError: division by zero" if fails else str(right)
        calls = [{**call, "result": "" if fails else outcome, "error": outcome if fails else None, "seconds": 0.02}]
        messages = [
            {
                "role": "assistant",
                "content": "Let me calculate.",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "name": "calculate", "content": outcome},
            {"role": "assistant", "content": text},
        ]
    if 0.045 <= kind < 0.06:
        failures = [{"reward": "format", "kind": "timeout", "message": "no answer within 5 s"}]
    said = [tokenizer.encode(m["content"] + END).ids for m in messages]
    ids = [number for part in said for number in part]
    trained = [m["role"] == "assistant" for m, part in zip(messages, said) for _ in part]
    noise = np.random.default_rng(dice.getrandbits(32))
    logps = -noise.exponential(0.4, len(ids)) * noise.choice([0.1, 1, 5], len(ids), p=[0.5, 0.4, 0.1])
    apart = noise.normal(0, 0.01 + 0.05 * (kind < 0.1), len(ids))
    rewards = {
        "accuracy": float(is_right),
        "format": math.nan if failures else float(dice.random() < 0.6 + 0.3 * skill),
    }
    return {
        "epoch": step * 10 / QUESTIONS,
        "row": row,
        "group": group,
        "sample": sample,
        "author": "reference" if sample == 7 else "policy",
        "prompt": json.dumps(prompt),
        "completion": "" if error else json.dumps(messages, ensure_ascii=False),
        "prompt_ids": tokenizer.encode("<|im_start|>" + asked + END).ids,
        "completion_ids": [] if error else ids,
        "trained": [] if error else trained,
        "sampling_logps": [] if error else np.where(trained, logps, 0.0),
        "old_logps": [] if error else np.where(trained, np.minimum(logps + apart, 0), 0.0),
        "rewards": {} if error else rewards,
        "reward": math.nan if error else rewards["accuracy"] + 0.2 * np.nan_to_num(rewards["format"]),
        "failures": failures,
        "extras": {} if error else {"answer_parsed": text.split()[-1]},
        "images": [IMAGE] if row % 10 == 3 else [],
        "tool_calls": calls,
        "finish_reason": "error" if error else "length" if is_cut else "stop",
        "error": error,
        "masked": bool(error or failures),
        "truncated": is_cut,
        "policy_version": step - 1,
        "seconds": {"generate": 0.5 + dice.random(), "tools": 0.02 * len(calls)},
    }


def write_step(
    folder: Path, tokenizer: Tokenizer, step: int, of: int, prompts: int = 10, samples: int = 8
) -> list[dict]:
    dice = random.Random(step)
    records = []
    for place in range(prompts):
        number = (step - 1) * prompts + place
        group = [record(tokenizer, step, number % QUESTIONS, number, i, dice, of) for i in range(samples)]
        rewards = np.array([each["reward"] for each in group])
        centred = (rewards - np.nanmean(rewards)) / (np.nanstd(rewards) + 1e-4)
        for each, value in zip(group, centred):
            each["advantage"] = 0.0 if each["masked"] or not np.isfinite(value) else float(value)
        records += group
    write_file(folder / "rollouts", step, 0, records)
    return records


def write_log(folder: Path, step: int, of: int, records: list[dict], seed: int = 0) -> None:
    noise = np.random.default_rng([step, seed])
    rewards = np.array([each["reward"] for each in records]) if records else np.array([0.5])
    share = step / of
    entry = {
        "loss": 0.02 * noise.normal() - 0.01,
        "grad_norm": 0.4 + 0.2 * noise.random() + (1.5 if step % 97 == 0 else 0),
        "learning_rate": 1e-5 * (1 - share),
        "entropy": 1.2 * math.exp(-1.5 * share) + 0.03 * noise.normal(),
        "kl": 0.08 * share + 0.004 * noise.random(),
        "reward": float(np.nanmean(rewards)) - 0.05 * seed,
        "reward_std": float(np.nanstd(rewards)),
        "completions/mean_length": 48 + 20 * share + 3 * noise.normal(),
        "completions/max_length": 96 + 8 * noise.normal(),
        "completions/clipped_ratio": 0.04 + 0.01 * noise.random(),
        "rewards/accuracy/mean": float(np.nanmean(rewards)) * 0.85,
        "rewards/format/mean": 0.6 + 0.3 * share + 0.03 * noise.normal(),
        "sampling/sampling_logp_difference/mean": 0.009 + 0.001 * noise.random(),
        "sampling/kl": 1e-4 * (1 + noise.random()),
        "rollouts/generate_s": 3.1 + 0.3 * noise.normal(),
        "rollouts/score_s": 0.8 + 0.05 * noise.normal(),
        "num_tokens": step * 6400,
        "epoch": step * 10 / QUESTIONS,
    }
    StepFile(folder / "metrics.jsonl").append(step, entry)
    if step % 50 == 0:
        StepFile(folder / "metrics.jsonl").append(
            step, {"eval_loss": 0.9 - 0.3 * share, "eval_reward": 0.3 + 0.5 * share}
        )


def make_run(folder: Path, steps: int = 20, prompts: int = 10, samples: int = 8, seed: int = 0) -> Path:
    """A GRPO run of steps x prompts x samples rollouts."""
    tokenizer = make_tokenizer(folder / f"checkpoint-{steps}")
    for step in range(1, steps + 1):
        write_log(folder, step, steps, write_step(folder, tokenizer, step, steps, prompts, samples), seed)
    options = {
        "learning_rate": 1e-5,
        "num_generations": samples,
        "beta": 0.0,
        "hub_token": "hf_not_to_be_seen",
        "pad_token": None,
    }
    (folder / f"checkpoint-{steps}" / "training_args.json").write_text(json.dumps(options))
    alert = {
        "kind": "entropy",
        "seen": "entropy fell from 1.2 to 0.31",
        "meaning": "the policy explores less",
        "remedy": "a higher temperature",
    }
    StepFile(folder / "alerts.jsonl").append(steps // 2, alert)
    return folder


def make_async_run(folder: Path, steps: int = 60, workers: int = 3) -> Path:
    """The numbers of a run whose trainer waits at first, until the lead has grown."""
    noise = np.random.default_rng(0)
    for step in range(1, steps + 1):
        lead = min(2.5, step / 20)
        idle = max(0.0, 0.62 - 0.3 * lead) + 0.05 * noise.random()
        shares = noise.dirichlet([6, 10 * lead + 0.1, 6 * lead + 0.1, 1.5, 0.01])
        entry = {
            "loss": 0.02 * noise.normal(), "async/lead": lead, "async/trainer_idle": idle, "async/in_flight": 8 + 8 * lead,
            "async/waiting": 10 * noise.random() * lead, "async/token_age/mean": float(shares @ np.arange(5)),
            "async/token_age/p95": 3.0, "async/token_age/max": 3.0, "async/bound_used": 0.75,
            "async/group_seconds/p50": 2 + noise.random(), "async/group_seconds/max": 9 + 4 * noise.random(),
            "async/finished": 8.0 * step + 20, "async/taken": 8.0 * step, "async/reissued": step // 20,
            **{f"async/token_age/share/{age}": share for age, share in enumerate(shares.tolist())},
            **{f"async/worker_idle/worker-{i}": max(0.0, 0.08 * lead - 0.05 * i) for i in range(workers)},
        }  # fmt: skip
        StepFile(folder / "metrics.jsonl").append(step, entry)
    alerts = {
        "rollouts_wait": ["the trainer waited for 0.55 of the time", "rollouts are the slow side", "more workers"],
        "entropy": ["entropy fell from 1.2 to 0.31", "the policy explores less", "a higher temperature"],
    }
    for kind, said in alerts.items():
        alert = dict(zip(("seen", "meaning", "remedy"), said), kind=kind)
        StepFile(folder / "alerts.jsonl").append(10, alert)
    return folder


if __name__ == "__main__":
    make_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
