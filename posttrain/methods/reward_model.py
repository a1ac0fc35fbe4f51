"""Reward models: one number for a whole answer, learnt from pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.rows.formats import SCORED_PREFERENCE, TOKENISED_SCORED_PREFERENCE
from posttrain.losses.formulas import REWARD_FORMULAS, Formula, Totals, number
from posttrain.losses.reward import bradley_terry, centring, reward_metrics
from posttrain.models.load.model import SEQUENCE_REWARD
from posttrain.models.scoring.heads import score_sequences
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig, SharedPromptsConfig, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.report.model_card import Paper


@dataclass
class RewardConfig(SharedPromptsConfig, ImageConfig, BaseConfig):
    """Options of reward modelling."""

    learning_rate: float = option(1e-4, "Initial learning rate of AdamW.")
    truncation_mode: str = option(
        "drop",
        "Pairs with a side longer than `max_length`: drop (as TRL), keep_start, keep_end or error. Always counted.",
    )
    center_rewards_coefficient: float | None = option(
        None, "Weight of (r_chosen + r_rejected)^2, which keeps rewards centred on 0 (arXiv:2312.09244). None: off."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.center_rewards_coefficient is not None:
            check_range("center_rewards_coefficient", self.center_rewards_coefficient, 0)


class RewardTrainer(BaseTrainer):
    """Bradley-Terry reward model (arXiv:2203.02155), with optional margins and centring."""

    method, title = "reward", "reward modelling"
    paper = Paper(
        "ouyang2022training", "Training language models to follow instructions with human feedback",
        "Ouyang, Long and Wu, Jeff and Jiang, Xu and others",
        2022, "2203.02155", "Advances in Neural Information Processing Systems 35",
    )  # fmt: skip
    config_class = RewardConfig
    formats = (SCORED_PREFERENCE, TOKENISED_SCORED_PREFERENCE)
    roles = ("chosen", "rejected")
    task = SEQUENCE_REWARD
    token_stats: ClassVar[tuple[str, ...]] = ()

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        return score_sequences(model, batch)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        chosen, rejected = (batch.role(policy.rewards, name) for name in self.roles)
        margin = batch.scalars.get("margin")
        margin = None if margin is None else batch.role(margin, "chosen")
        terms = [LossTerm(bradley_terry(chosen, rejected, margin), "unit")]
        if self.args.center_rewards_coefficient:
            terms.append(LossTerm(centring(chosen, rejected), "unit", self.args.center_rewards_coefficient))
        return LossOutput(terms, metrics=reward_metrics(chosen, rejected))

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        terms = [REWARD_FORMULAS["bradley_terry"]]
        if args.center_rewards_coefficient:
            terms.append(f"{number(args.center_rewards_coefficient)} * {REWARD_FORMULAS['centring']}")
        names = (("r", "reward of an answer"), ("margin", "the row's, 0 where it has none"))
        return Formula(tuple(terms), (f"sum over pairs / {totals['units']} pairs of the step",), names)

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Tensor, Tensor]:
        rewards = torch.stack([batch.role(policy.rewards, name) for name in self.roles], dim=1)
        return rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)  # column 0 should win
