"""A preference loss of your own, without a fork. It names the options it wants as parameters and gets them from the config."""

from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import load_dataset

from posttrain import DPOConfig, DPOTrainer


def focal(pair, *, beta: float) -> torch.Tensor:
    """DPO that turns away from pairs it has won: -(1 - p)^2 log p, where p = sigmoid(beta d)."""
    log_p = F.logsigmoid(beta * pair.margins)
    return -((1 - log_p.exp()) ** 2) * log_p


pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")

trainer = DPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=DPOConfig(output_dir="runs/focal", num_train_epochs=1, per_device_train_batch_size=6, logging_steps=1),
    train_dataset=pairs,
    loss=focal,
)
trainer.train()
