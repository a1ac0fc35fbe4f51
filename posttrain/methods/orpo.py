"""Odds ratio preference optimisation: imitation and preference in one pass, without a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.losses.formulas import ODDS_RATIO_FORMULA, Formula, Totals, filled
from posttrain.losses.reference_free import Answers, log_odds_ratio
from posttrain.trainer.options.base import BaseConfig, OlderPairOptions, SharedPromptsConfig, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.pair_trainer import ReferenceFreePairTrainer
from posttrain.trainer.report.model_card import Paper


@dataclass
class ORPOConfig(OlderPairOptions, SharedPromptsConfig, ImageConfig, BaseConfig):
    """Options of odds ratio preference optimisation."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    beta: float = option(0.1, "Weight of the odds ratio beside the nll: the paper's lambda.")
    prompt_nll: bool = option(
        True, "The nll runs over the prompt, too, as in the authors' code. False: the answer only."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)


class ORPOTrainer(ReferenceFreePairTrainer):
    """Odds ratio preference optimisation (arXiv:2403.07691)."""

    method, title = "orpo", "odds ratio preference optimisation"
    shares_rows = True
    paper = Paper(
        "hong2024orpo", "ORPO: Monolithic Preference Optimization without Reference Model",
        "Hong, Jiwoo and Lee, Noah and Thorne, James",
        2024, "2403.07691", "Conference on Empirical Methods in Natural Language Processing",
    )  # fmt: skip
    config_class = ORPOConfig

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        return {"train_chosen_prompt": self.args.prompt_nll}

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        means = batch.sequence_mean(policy.logps)
        if "answer" in batch.per_token:  # prompts are trained as well, and the odds are those of the answer alone
            answer = batch.per_token["answer"].to(policy.logps.dtype)
            means = batch.sequence_sum(policy.logps * answer) / batch.sequence_sum(answer).clamp(min=1)
        answers = Answers(batch.role(means, "chosen"), batch.role(means, "rejected"))
        odds = log_odds_ratio(answers.chosen_logps, answers.rejected_logps)
        preferred = F.logsigmoid(odds)
        terms = [self.nll_term(batch, policy, "chosen", 1.0), LossTerm(-preferred, "unit", self.args.beta)]
        own = {"log_odds_ratio": preferred, "log_odds_chosen": odds}
        own["nll_loss"] = batch.role_tokens(-policy.logps, "chosen")
        return LossOutput(terms, metrics=answers.metrics(self.args.beta) | self.token_metrics(batch, policy) | own)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        tokens = "the tokens of prompts and chosen answers" if args.prompt_nll else "the chosen tokens"
        divided = (
            f"nll: sum over {tokens} / their number in the step",
            f"odds: sum over pairs / {totals['units']} pairs of the step",
        )
        names = (("m", "mean of log(policy) over an answer's tokens"),)
        return Formula(("-logp_c", filled(ODDS_RATIO_FORMULA, args)), divided, names)
