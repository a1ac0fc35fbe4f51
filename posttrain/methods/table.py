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
    "cpo": Method(
        "posttrain.methods.cpo", "CPOTrainer", "CPOConfig", "CPO, SimPO and AlphaPO: pairs without a reference"
    ),
    "orpo": Method("posttrain.methods.orpo", "ORPOTrainer", "ORPOConfig", "Odds ratio preference optimisation"),
    "tpo": Method("posttrain.methods.tpo", "TPOTrainer", "TPOConfig", "Triple preference optimisation"),
    "kto": Method(
        "posttrain.methods.kto", "KTOTrainer", "KTOConfig", "Kahneman-Tversky optimisation: answers with a label"
    ),
    "bco": Method(
        "posttrain.methods.bco", "BCOTrainer", "BCOConfig", "Binary classifier optimisation: answers with a label"
    ),
    "reward": Method("posttrain.methods.reward_model", "RewardTrainer", "RewardConfig", "Bradley-Terry reward models"),
    "prm": Method("posttrain.methods.prm", "PRMTrainer", "PRMConfig", "Process reward models, which judge each step"),
    "grpo": Method(
        "posttrain.methods.grpo", "GRPOTrainer", "GRPOConfig", "Group relative policy optimisation, 10 losses"
    ),
    "async_grpo": Method(
        "posttrain.methods.async_grpo",
        "AsyncGRPOTrainer",
        "AsyncGRPOConfig",
        "GRPO whose completions are written beside training, under TRL's names",
    ),
    "papo": Method(
        "posttrain.methods.papo",
        "PAPOTrainer",
        "PAPOConfig",
        "Perception-aware policy optimisation: GRPO whose completions must depend on the picture",
    ),
    "ppo": Method(
        "posttrain.methods.ppo",
        "PPOTrainer",
        "PPOConfig",
        "Proximal policy optimisation with a critic, a head or a model",
    ),
    "rloo": Method("posttrain.methods.rloo", "RLOOTrainer", "RLOOConfig", "REINFORCE with a leave-one-out baseline"),
    "online_dpo": Method(
        "posttrain.methods.online_dpo",
        "OnlineDPOTrainer",
        "OnlineDPOConfig",
        "DPO on pairs of the model's own completions",
    ),
    "xpo": Method(
        "posttrain.methods.xpo",
        "XPOTrainer",
        "XPOConfig",
        "Exploratory preference optimisation: online DPO with a bonus",
    ),
    "nash_md": Method(
        "posttrain.methods.nash_md",
        "NashMDTrainer",
        "NashMDConfig",
        "Nash-MD: preferred to a mixture with the reference",
    ),
    "a2po": Method(
        "posttrain.methods.a2po",
        "A2POTrainer",
        "A2POConfig",
        "A*-PO: one completion a prompt against its optimal value",
    ),
    "gkd": Method(
        "posttrain.methods.gkd",
        "GKDTrainer",
        "GKDConfig",
        "Generalised knowledge distillation: a teacher on the student's completions and the dataset's",
    ),
    "distillation": Method(
        "posttrain.methods.distillation",
        "DistillationTrainer",
        "DistillationConfig",
        "On-policy distillation: a teacher on what the student writes",
    ),
    "iw_opd": Method(
        "posttrain.methods.iw_opd",
        "IWOPDTrainer",
        "IWOPDConfig",
        "IW-OPD: own completions, each token by how much likelier a teacher finds it",
    ),
    "minillm": Method(
        "posttrain.methods.minillm",
        "MiniLLMTrainer",
        "MiniLLMConfig",
        "MiniLLM: the divergence from a teacher by policy gradients, beside rewards if there are any",
    ),
    "server_distillation": Method(
        "posttrain.methods.server_distillation",
        "ServerDistillationTrainer",
        "ServerDistillationConfig",
        "On-policy distillation from the likeliest tokens of a teacher on a server",
    ),
    "async_distillation": Method(
        "posttrain.methods.async_distillation",
        "AsyncDistillationTrainer",
        "AsyncDistillationConfig",
        "Distillation from a teacher's server, with completions that are written beside training",
    ),
    "gold": Method(
        "posttrain.methods.gold",
        "GOLDTrainer",
        "GOLDConfig",
        "GOLD: distillation from a teacher that may have another tokenizer",
    ),
    "sdft": Method(
        "posttrain.methods.sdft",
        "SDFTTrainer",
        "SDFTConfig",
        "Self-distillation fine-tuning: the model learns what it would say if it were shown more",
    ),
    "sdpo": Method(
        "posttrain.methods.sdpo",
        "SDPOTrainer",
        "SDPOConfig",
        "Self-distillation policy optimisation: the model learns from itself that has seen a success",
    ),
    "ssd": Method("posttrain.methods.ssd", "SSDTrainer", "SSDConfig", "Simple self-distillation on own completions"),
}
