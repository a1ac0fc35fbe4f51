"""A method of your own: its options, the rows it reads, its loss. Layouts, adapters, checkpoints and logs come with the base."""

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from datasets import load_dataset
from peft import LoraConfig

from posttrain import BaseConfig, BaseTrainer, LossOutput, option
from posttrain.data.rows.formats import PREFERENCE


@dataclass
class SimPOConfig(BaseConfig):
    beta: float = option(2.0, "Scale of the mean log-prob of an answer.")
    gamma: float = option(0.5, "Margin by which the chosen answer should win.")


class SimPOTrainer(BaseTrainer):
    """SimPO (arXiv:2405.14734): -log sigmoid(beta (mean log p(chosen) - mean log p(rejected)) - gamma), no reference."""

    method = "simpo"
    config_class = SimPOConfig
    formats = (PREFERENCE,)
    roles = ("chosen", "rejected")

    def loss(self, batch, policy, reference):
        means = self.args.beta * batch.sequence_mean(policy.logps)
        chosen, rejected = (batch.role(means, name) for name in self.roles)
        won = (chosen > rejected).float()
        values = -F.logsigmoid(chosen - rejected - self.args.gamma)
        return LossOutput(values, per="unit", metrics={"rewards/accuracies": won, "rewards/margins": chosen - rejected})


pairs = load_dataset("json", data_files=str(Path(__file__).parent / "data/pairs.jsonl"), split="train")

trainer = SimPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=SimPOConfig(output_dir="runs/simpo", num_train_epochs=1, per_device_train_batch_size=6, logging_steps=1),
    train_dataset=pairs,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)
trainer.train()
