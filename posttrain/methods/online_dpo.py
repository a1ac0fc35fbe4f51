"""Online direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.trainer.online_pair_trainer import OnlinePairConfig, OnlinePairTrainer
from posttrain.trainer.report.model_card import Paper


@dataclass
class OnlineDPOConfig(OnlinePairConfig):
    """Options of online direct preference optimisation."""


class OnlineDPOTrainer(OnlinePairTrainer):
    """Online DPO (arXiv:2402.04792): DPO on pairs that the policy writes and rewards or a judge rank."""

    method, title = "online_dpo", "online direct preference optimisation"
    paper = Paper(
        "guo2024direct", "Direct Language Model Alignment from Online AI Feedback",
        "Guo, Shangmin and Zhang, Biao and Liu, Tianlin and Liu, Tianqi and Khalman, Misha and others",
        2024, "2402.04792",
    )  # fmt: skip
    config_class = OnlineDPOConfig
