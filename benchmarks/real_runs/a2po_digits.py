"""A*-PO of SmolLM2-135M-Instruct with the reward "the answer has a digit": does it rise, and does a reward of 1 move nothing?

python -m benchmarks.real_runs.a2po_digits OUTPUT [STEPS]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from posttrain import A2POConfig, A2POTrainer
from posttrain.cli.commands import demo

TOPICS = [
    "rain",
    "bread",
    "maps",
    "clocks",
    "glass",
    "paper",
    "radio",
    "bees",
    "salt",
    "rivers",
    "bridges",
    "snow",
    "trains",
    "tea",
    "violins",
    "stars",
    "horses",
    "coal",
    "apples",
    "ships",
    "sand",
    "chess",
    "ice",
    "wool",
    "gold",
    "moths",
    "tides",
    "corn",
    "bells",
    "kites",
]


def has_a_digit(completions: list[Any], **columns: Any) -> list[float]:
    return [float(any(letter.isdigit() for letter in answer[-1]["content"])) for answer in completions]


def always(completions: list[Any], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def trained(reward: Any, folder: Path, steps: int) -> tuple[list[float], float, Any]:
    """(reward of each step, largest change of a weight, values of stage 1)."""
    rows = [{"prompt": [{"role": "user", "content": f"Tell me a fact about {topic}."}]} for topic in TOPICS]
    options = {"per_device_train_batch_size": 16, "max_completion_length": 16, "num_value_samples": 4}
    args = A2POConfig(
        output_dir=str(folder), max_steps=steps, learning_rate=1e-5, lr_scheduler_type="constant", logging_steps=1,
        filter_all_incorrect=False, save_strategy="no", report_to="none", **options,
    )  # fmt: skip
    trainer = A2POTrainer(str(demo.real_model()), reward, args, Dataset.from_list(rows))
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    moved = max((a - b).abs().max().item() for a, b in zip(before, trainer.model.parameters()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["reward"] for line in lines if "v_star" in line], moved, trainer.values["v_star"]


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    rewards, moved, values = trained(has_a_digit, folder / "digits", steps)
    tenth = max(len(rewards) // 8, 1)
    shown = [round(sum(rewards[i : i + tenth]) / len(rewards[i : i + tenth]), 3) for i in range(0, len(rewards), tenth)]
    _, control, _ = trained(always, folder / "control", 2)
    found = {
        "steps": len(rewards), "reward of each eighth": shown, "V*": [values.min().item(), values.max().item()],
        "largest change of a weight": moved, "the same with a reward of 1": control,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 80)
