"""A toy method with a teacher: the forward divergence over the whole vocabulary, chunk by chunk, by the plain path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import LANGUAGE_MODELLING
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import LanguageHead, Measure, RowsQuestion, ask, score_tokens
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig


@dataclass
class TeacherConfig(BaseConfig):
    """Options of the toy."""


class TeacherTrainer(BaseTrainer):
    """KL(teacher || student) of every trained token; the logits of both exist for one chunk at a time."""

    method, title = "teacher", "distillation"
    config_class = TeacherConfig
    formats = (LANGUAGE_MODELLING,)
    roles = ("text",)

    def __init__(self, model: Any, *given: Any, teacher: nn.Module, **named: Any) -> None:
        super().__init__(model, *given, **named)
        self.teacher = load_model(teacher, LoadOptions(layout=self.loaded.layout)).model.requires_grad_(False)

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        with torch.no_grad():
            rows = ask(self.teacher, batch, RowsQuestion(batch.positions)).rows
        head = LanguageHead.of(self.teacher)

        def forward_kl(logits: Tensor, log_z: Tensor, targets: Tensor, taught: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = head(taught).to(logits.dtype).log_softmax(-1)
            return (wanted.exp() * (wanted - (logits - log_z[:, None]))).sum(-1)

        measures = {"divergence": Measure(forward_kl, (rows,), differentiable=True)}
        return score_tokens(model, batch, stats, measures=measures, **self.scoring_options())

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        return LossOutput(policy.stats["divergence"], per="token")
