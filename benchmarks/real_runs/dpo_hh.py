"""DPO of SmolLM2-135M-Instruct on HH harmlessness pairs: does held-out preference accuracy rise above chance?

    python benchmarks/real_runs/dpo_hh.py MODEL HH_FILE OUTPUT [--held-out N] [--epochs E]

HH_FILE is JSONL (or .gz) with `chosen` and `rejected`, dialogues in the form "\\n\\nHuman: ...\\n\\nAssistant: ...". Rows whose two
dialogues differ before the last answer, or whose answers are equal or empty, are left out and counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
from pathlib import Path

from datasets import Dataset

from posttrain import DPOConfig, DPOTrainer

TURN = re.compile(r"\n\n(Human|Assistant): ?")
ROLES = {"Human": "user", "Assistant": "assistant"}


def messages(dialogue: str) -> list[dict[str, str]]:
    pieces = TURN.split(dialogue)[1:]
    return [{"role": ROLES[who], "content": said.strip()} for who, said in zip(pieces[::2], pieces[1::2])]


def pairs(path: Path) -> tuple[list[dict], int]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    kept, left_out = [], 0
    for row in map(json.loads, text.splitlines()):
        chosen, rejected = messages(row["chosen"]), messages(row["rejected"])
        alternate = [m["role"] for m in chosen] == ["user", "assistant"] * (len(chosen) // 2)
        said = all(m["content"] for m in [*chosen, *rejected])
        if alternate and said and chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]:
            kept.append({"prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]})
        else:
            left_out += 1
    return kept, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output")
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch", type=int, default=16)
    words = parser.parse_args()
    rows, left_out = pairs(words.data)
    print(f"{len(rows)} pairs, {left_out} left out")
    args = DPOConfig(
        output_dir=words.output,
        num_train_epochs=words.epochs,
        per_device_train_batch_size=words.batch,
        per_device_eval_batch_size=words.batch,
        learning_rate=2e-5,
        warmup_steps=10,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    train, test = Dataset.from_list(rows[words.held_out :]), Dataset.from_list(rows[: words.held_out])
    trainer = DPOTrainer(words.model, args=args, train_dataset=train, eval_dataset=test)
    trainer.train()
    found = trainer.evaluate()
    accuracy, count = found["eval_rewards/accuracies"], len(trainer.eval_dataset)
    error = math.sqrt(accuracy * (1 - accuracy) / count)
    print(
        f"held-out accuracy {accuracy:.3f} +- {error:.3f} on {count} pairs, margin {found['eval_rewards/margins']:.3f}"
    )
    assert accuracy - 0.5 > 2 * error, "held-out accuracy is not above chance by more than twice its error"


main()
