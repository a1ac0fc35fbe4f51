"""GRPO on rows with images, for tests with a real vLLM: models wide enough for its kernels on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.engines.protocol import Completion, Prompt
from posttrain.rollout.episodes.episode import written_sample
from posttrain.rollout.rollout import Request, Rollout
from tests.tiny_vision import images, vision_model, widened

FAMILIES = ("llava", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava_next", "idefics3", "smolvlm", "internvl")
COLOCATED = {"vllm_engine_args": {"max_num_seqs": 16}}


def model(family: str) -> Any:
    with widened():
        return vision_model(family)


def rows() -> list[dict[str, Any]]:
    """One image, the same text about another, two images, none."""
    a, b, c = images((60, 40), (60, 40), (30, 90), seed=3)
    asked = [("What is it?", a), ("What is it?", b), ("And these?", a, c), ("Hello.",)]
    return [
        {"prompt": [{"role": "user", "content": [*map(_part, pictures), {"type": "text", "text": text}]}]}
        for text, *pictures in asked
    ]


def _part(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


def trainer(tiny: Any, folder: Path, **options: Any) -> GRPOTrainer:
    named = {name: options.pop(name) for name in ("peft_config", "train_dataset", "model") if name in options}
    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "use_vllm": True,
        "verbosity": "quiet",
        "dataset_cache_dir": str(folder / "cache"),
    }
    args = GRPOConfig(output_dir=str(folder / "run"), **settings | options)
    given = {"model": tiny.model, "train_dataset": rows(), "processing_class": tiny.processor}
    return GRPOTrainer(reward_funcs=reward, args=args, **given | named)


def asked(run: GRPOTrainer) -> list[Prompt]:
    taken = (run.train_dataset[number] for number in range(len(run.train_dataset)))
    return [Prompt(row.ids, row.row, images=row.images, positions=row.positions) for row in taken]


def own_logps(run: GRPOTrainer, written: list[Completion]) -> list[np.ndarray]:
    """What the trainer says of these completions of its rows."""
    made = []
    for number, completion in enumerate(written):
        row, request = run.train_dataset[number], Request(number, number, 0)
        sample = written_sample(row, request, completion)
        made.append(Rollout(request, row.prompt, "", sample, len(row.ids)))
    with torch.no_grad():
        run.write_columns(made, run.policy_columns)
    return [one.sample.per_token["old_logps"][one.prompt_length :] for one in made]


def largest_gap(run: GRPOTrainer, written: list[Completion]) -> float:
    own = own_logps(run, written)
    return max(float(np.abs(a - b.policy_logps).max(initial=0)) for a, b in zip(own, written))
