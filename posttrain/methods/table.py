"""METHODS: every method of the library, in one table. Exports, command line, docs and contract tests all read it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    """Where a method lives. Nothing is imported until it is asked for."""

    module: str
    trainer: str
    config: str
    summary: str
    status: str = "stable"

    @property
    def trainer_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.trainer)

    @property
    def config_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.config)


METHODS: dict[str, Method] = {
    "sft": Method("posttrain.methods.sft", "SFTTrainer", "SFTConfig", "Supervised fine-tuning"),
    "dpo": Method("posttrain.methods.dpo", "DPOTrainer", "DPOConfig", "Direct preference optimisation, 15 losses"),
    "reward": Method("posttrain.methods.reward_model", "RewardTrainer", "RewardConfig", "Bradley-Terry reward models"),
    "grpo": Method(
        "posttrain.methods.grpo", "GRPOTrainer", "GRPOConfig", "Group relative policy optimisation, 9 losses"
    ),
    "rloo": Method("posttrain.methods.rloo", "RLOOTrainer", "RLOOConfig", "REINFORCE with a leave-one-out baseline"),
}
