"""A toy method with a state of its own: tokens weigh less the less likely the steps before found theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import LANGUAGE_MODELLING
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig, option
from posttrain.trainer.step.gathering import gathered_values


@dataclass
class BaselineConfig(BaseConfig):
    """Options of the toy."""

    decay: float = option(0.5, "How much of the running mean a step keeps.")


class BaselineTrainer(BaseTrainer):
    """The nll of a token, divided by a running mean of earlier steps."""

    method, title = "baseline", "likelihood with a running baseline"
    config_class = BaselineConfig
    formats = (LANGUAGE_MODELLING,)
    roles = ("text",)

    mean = 1.0

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        if self.model.training:
            self._seen = [*getattr(self, "_seen", ()), -policy.logps.detach()]
        return LossOutput(-policy.logps / self.mean, per="token")

    def before_step(self, batches: list[TokenBatch]) -> None:
        seen: list[Tensor] = getattr(self, "_seen", [])
        if seen:
            nll = gathered_values(torch.cat(seen), self.args).double().mean().item()
            self.mean = self.args.decay * self.mean + (1 - self.args.decay) * nll
        self._seen = []

    def method_state(self) -> dict[str, Any]:
        seen = torch.cat(self._seen) if getattr(self, "_seen", None) else torch.zeros(0)
        return {"mean": self.mean, "seen": gathered_values(seen, self.args)}

    def load_method_state(self, state: dict[str, Any]) -> None:
        self.mean, self._seen = state["mean"], [state["seen"]]
