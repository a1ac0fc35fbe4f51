"""A toy method with a head at tokens: a value before each trained token, labels at it, and log-probs, from one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.rows.formats import LANGUAGE_MODELLING
from posttrain.models.scoring.heads import HeadQuestion
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig, option


@dataclass
class TokenHeadConfig(BaseConfig):
    """Options of the toy."""

    value_weight: float = option(0.5, "Weight of the squared error of the value.")


class TokenHeadTrainer(BaseTrainer):
    """The value predicts the log-prob of the token that follows; the labels say whether its id is even."""

    method, title = "token_head", "heads at tokens"
    config_class = TokenHeadConfig
    formats = (LANGUAGE_MODELLING,)
    roles = ("text",)

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        values = HeadQuestion("values", batch.positions, "v_head")
        labels = HeadQuestion("labels", batch.places, "label_head")
        return score_tokens(model, batch, stats, also=(values, labels), **self.scoring_options())

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        errors = (policy.values - policy.logps.detach()) ** 2
        labels = nn.functional.cross_entropy(policy.labels, batch.targets % 2, reduction="none")
        terms = [LossTerm(errors, "token", self.args.value_weight), LossTerm(labels, "token")]
        return LossOutput([*terms, LossTerm(-policy.logps, "token")])
