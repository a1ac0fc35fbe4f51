"""Generalised knowledge distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.core.options import refused
from posttrain.trainer.distilling_trainer import RowsDistillingTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import MixedAuthorsConfig


@dataclass
class GKDConfig(MixedAuthorsConfig):
    """Options of generalised knowledge distillation."""

    learning_rate: float = option(2e-5, "Initial learning rate of AdamW.")
    truncation_mode: str = option(
        "keep_end", "What happens to a longer one: keep_start, keep_end, error or drop. Always counted and reported."
    )
    max_new_tokens: int | None = option(None, "TRL's name of `max_completion_length`.")
    temperature: float = option(0.9, "Divides the logits in sampling. The loss has a temperature of its own.")
    loss_temperature: float = option(1.0, "Divides the logits of student and teacher where they are compared.")
    num_generations: int = refused(1, "Each prompt has one completion: the student's, the teacher's or the dataset's.")
    num_generations_eval: int | None = refused(None, "Each prompt has one completion.")

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            self.max_completion_length = self.max_new_tokens
        super().__post_init__()
        check_range("loss_temperature", self.loss_temperature, 0, open_low=True)


class GKDTrainer(RowsDistillingTrainer):
    """GKD (arXiv:2306.13649): the divergence from a teacher on the student's own completions and on those of a dataset."""

    method, title = "gkd", "generalised knowledge distillation"
    config_class = GKDConfig

    @classmethod
    def compared_at(cls, args: Any) -> float:
        return args.loss_temperature
