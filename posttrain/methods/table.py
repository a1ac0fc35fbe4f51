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


def ours(module: str, name: str, summary: str) -> Method:
    """Of a module of this package, whose classes are NAMETrainer and NAMEConfig."""
    return Method(f"posttrain.methods.{module}", f"{name}Trainer", f"{name}Config", summary)


METHODS: dict[str, Method] = {
    "sft": ours("sft", "SFT", "Supervised fine-tuning"),
    "dpo": ours("dpo", "DPO", "Direct preference optimisation, 15 losses"),
    "cpo": ours("cpo", "CPO", "CPO, SimPO and AlphaPO: pairs without a reference"),
    "orpo": ours("orpo", "ORPO", "Odds ratio preference optimisation"),
    "tpo": ours("tpo", "TPO", "Triple preference optimisation"),
    "kto": ours("kto", "KTO", "Kahneman-Tversky optimisation: answers with a label"),
    "bco": ours("bco", "BCO", "Binary classifier optimisation: answers with a label"),
    "reward": ours("reward_model", "Reward", "Bradley-Terry reward models"),
    "prm": ours("prm", "PRM", "Process reward models, which judge each step"),
    "grpo": ours("grpo", "GRPO", "Group relative policy optimisation, 10 losses"),
    "async_grpo": ours(
        "async_grpo", "AsyncGRPO", "GRPO whose completions are written beside training, under TRL's names"
    ),
    "papo": ours(
        "papo", "PAPO", "Perception-aware policy optimisation: GRPO whose completions must depend on the picture"
    ),
    "ppo": ours("ppo", "PPO", "Proximal policy optimisation with a critic, a head or a model"),
    "rloo": ours("rloo", "RLOO", "REINFORCE with a leave-one-out baseline"),
    "online_dpo": ours("online_dpo", "OnlineDPO", "DPO on pairs of the model's own completions"),
    "xpo": ours("xpo", "XPO", "Exploratory preference optimisation: online DPO with a bonus"),
    "nash_md": ours("nash_md", "NashMD", "Nash-MD: preferred to a mixture with the reference"),
    "a2po": ours("a2po", "A2PO", "A*-PO: one completion a prompt against its optimal value"),
    "gkd": ours(
        "gkd", "GKD", "Generalised knowledge distillation: a teacher on the student's completions and the dataset's"
    ),
    "distillation": ours(
        "distillation", "Distillation", "On-policy distillation: a teacher on what the student writes"
    ),
    "iw_opd": ours("iw_opd", "IWOPD", "IW-OPD: own completions, each token by how much likelier a teacher finds it"),
    "minillm": ours(
        "minillm",
        "MiniLLM",
        "MiniLLM: the divergence from a teacher by policy gradients, beside rewards if there are any",
    ),
    "server_distillation": ours(
        "server_distillation",
        "ServerDistillation",
        "On-policy distillation from the likeliest tokens of a teacher on a server",
    ),
    "async_distillation": ours(
        "async_distillation",
        "AsyncDistillation",
        "Distillation from a teacher's server, with completions that are written beside training",
    ),
    "gold": ours("gold", "GOLD", "GOLD: distillation from a teacher that may have another tokenizer"),
    "sdft": ours(
        "sdft", "SDFT", "Self-distillation fine-tuning: the model learns what it would say if it were shown more"
    ),
    "sdpo": ours(
        "sdpo", "SDPO", "Self-distillation policy optimisation: the model learns from itself that has seen a success"
    ),
    "ssd": ours("ssd", "SSD", "Simple self-distillation on own completions"),
}
