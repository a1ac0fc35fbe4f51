"""SFT of SmolLM2-135M-Instruct on GSM8K: does the held-out loss fall, by more than its error?

    python benchmarks/real_runs/sft_gsm8k.py MODEL GSM8K_FOLDER OUTPUT [--rows N] [--held-out N]

GSM8K_FOLDER holds train.jsonl and test.jsonl with `question` and `answer`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from datasets import Dataset

from posttrain import SFTConfig, SFTTrainer
from posttrain.models.scoring.token_scores import score_tokens


def read(path: Path, count: int | None) -> Dataset:
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in map(json.loads, lines)
        ]
    )


@torch.no_grad()
def nll_by_row(trainer: SFTTrainer) -> torch.Tensor:
    model = trainer.model.eval()
    batches = (batch.to(trainer.args.device) for batch in trainer.get_eval_dataloader())
    return torch.cat([-batch.sequence_mean(score_tokens(model, batch).logps).cpu() for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32)
    words = parser.parse_args()
    args = SFTConfig(
        output_dir=words.output,
        num_train_epochs=1,
        per_device_train_batch_size=words.batch,
        per_device_eval_batch_size=words.batch,
        learning_rate=1e-4,
        warmup_steps=10,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
    )
    train, test = read(words.data / "train.jsonl", words.rows), read(words.data / "test.jsonl", words.held_out)
    trainer = SFTTrainer(words.model, args, train_dataset=train, eval_dataset=test)
    before = nll_by_row(trainer)
    trainer.train()
    after = nll_by_row(trainer)
    gain = before - after
    error = gain.std().item() / math.sqrt(len(gain))
    print(
        f"held-out nll {before.mean():.4f} -> {after.mean():.4f} on {len(gain)} rows: {gain.mean():.4f} +- {error:.4f} lower, "
        f"better on {(gain > 0).float().mean():.1%} of rows"
    )
    assert gain.mean() > 2 * error, "the held-out loss did not fall by more than twice its error"


main()
