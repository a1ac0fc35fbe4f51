"""A toy method with a teacher: the forward divergence over the whole vocabulary, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import LANGUAGE_MODELLING
from posttrain.losses.distributions import Divergence
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.two_heads import score_divergence, teacher_rows
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
        rows = teacher_rows(self.teacher, batch)
        return score_divergence(model, batch, rows, Divergence(0), stats=stats, chunk_tokens=self.args.chunk_tokens)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        return LossOutput(policy.divergences, per="token")
