"""Group relative policy optimisation and the losses that differ from it in one choice."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.trainer.options.policy_group import PolicyGroupConfig
from posttrain.trainer.policy_group_trainer import PolicyGroupTrainer


@dataclass
class GRPOConfig(PolicyGroupConfig):
    """Options of group relative policy optimisation."""


class GRPOTrainer(PolicyGroupTrainer):
    """Group relative policy optimisation (arXiv:2402.03300) and the losses that differ from it in one choice."""

    method, title = "grpo", "group relative policy optimisation"
    shares_rows = True
    config_class = GRPOConfig
