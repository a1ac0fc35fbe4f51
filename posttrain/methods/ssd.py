"""Simple self-distillation: training on what the model itself writes, sampled more carefully than it will be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.options import refused
from posttrain.core.results import SUMMED, LossOutput, LossTerm, TokenScores
from posttrain.core.sample import Unit
from posttrain.losses.formulas import SUPERVISED_FORMULAS, Formula, Totals, number
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.collector import Collected, GroupTable
from posttrain.rollout.rollout import Rollout
from posttrain.trainer.online.rollout_metrics import as_tensors
from posttrain.trainer.options.base import option
from posttrain.trainer.options.distilling import NO_REFERENCE, NoRewardsConfig, SelfTaughtConfig
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.self_distilling_trainer import SelfTaughtTrainer, text_of

SHORTEST_LINE = 10
"""Characters; a single line of fewer is a stub."""
ACTIVE_RATIO = "ssd/active_sample_ratio"


@dataclass
class SSDConfig(SelfTaughtConfig, NoRewardsConfig, OnlineConfig):
    """Options of simple self-distillation."""

    num_generations: int = option(1, "Completions of each prompt.")
    temperature: float = option(1.0, "Divides the logits in sampling. The loss is that at temperature 1.")
    filter_empty: bool = option(
        True, "Leave out completions that are empty, or a single line of fewer than 10 characters."
    )
    beta: float = refused(0.0, NO_REFERENCE)


def is_stub(text: str) -> bool:
    """Empty, or a single line that says hardly anything."""
    text = text.strip()
    return not text or ("\n" not in text and len(text) < SHORTEST_LINE)


class SSDTrainer(SelfTaughtTrainer):
    """SSD (arXiv:2604.01193): cross-entropy, at temperature 1, on own completions that were drawn otherwise."""

    method, title = "ssd", "simple self-distillation"
    paper = Paper(
        "zhang2026embarrassingly", "Embarrassingly Simple Self-Distillation Improves Code Generation",
        "Zhang, Ruixiang and Bai, Richard He and Zheng, Huangjie and Jaitly, Navdeep and Collobert, Ronan and others",
        2026, "2604.01193",
    )  # fmt: skip
    config_class = SSDConfig
    needs_rewards: ClassVar[bool] = False
    needs_reference = False
    needs_old_logps = False
    scoring_temperature = 1.0

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        return torch.zeros_like(totals)

    def spread(self, rollouts: list[Rollout]) -> None:
        """Nothing is weighed."""

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        return [(one.sample,) if self._is_active(one) else None for group in groups for one in group]

    def _is_active(self, rollout: Rollout) -> bool:
        """Whether it is trained on."""
        return not (rollout.masked or (self.args.filter_empty and is_stub(text_of(rollout.completion))))

    def _measure(self, collected: Collected, mode: str) -> None:
        """Of an evaluation; in training each step counts what is left of its own samples, which a checkpoint holds."""
        super()._measure(collected, mode)
        if mode == "eval":
            self.metrics.add(mode, as_tensors({ACTIVE_RATIO: [*map(self._is_active, collected.rollouts)]}))

    # ---- the step ----------------------------------------------------------------------------------------------------

    def before_step(self, batches: list[TokenBatch]) -> None:
        micro_batches = round(sum(batch.share for batch in batches))  # each may be run in several passes
        samples = micro_batches * self.args.per_device_train_batch_size
        active = sum(batch.num_samples for batch in batches)
        self.metrics.add("train", as_tensors({ACTIVE_RATIO: [1.0] * active + [0.0] * (samples - active)}))

    def recomputes_logits(self) -> bool:
        """A plain sum of nll has its gradient in the forward."""
        return False

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        return score_tokens(model, batch, stats, summed=True, **self.scoring_options())

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        metrics = {"ssd/cross_entropy_loss": -policy.logps.detach()}
        return LossOutput([LossTerm(policy.nll_sum, per="token", entries=SUMMED)], metrics=metrics)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        drawn = f"temperature {number(args.temperature)}, top_p {number(args.top_p)}, top_k {number(args.top_k)}"
        return Formula(
            (SUPERVISED_FORMULAS["nll"],),
            (f"sum over tokens / {totals['tokens']} trained tokens of the step",),
            (("p", f"probability, at temperature 1, of a token that the model drew at {drawn}"),),
        )
