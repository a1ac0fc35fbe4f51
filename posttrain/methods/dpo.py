"""Direct preference optimisation and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.losses.named_options import call
from posttrain.trainer.options.base import BaseConfig, ReferenceConfig, SharedPromptsConfig, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.options.preference import PreferenceLossConfig
from posttrain.trainer.pair_trainer import PairTrainer, PreferenceLosses
from posttrain.trainer.report.model_card import Paper


@dataclass
class DPOConfig(PreferenceLossConfig, ReferenceConfig, SharedPromptsConfig, ImageConfig, BaseConfig):
    """Options of direct preference optimisation."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    beta: float = option(0.1, "Strength of the pull towards the reference.")


class DPOTrainer(PreferenceLosses, PairTrainer):
    """Direct preference optimisation (arXiv:2305.18290) and its relatives."""

    method, title = "dpo", "direct preference optimisation"
    shares_rows = True
    paper = Paper(
        "rafailov2023direct", "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and Manning, Christopher D. and Ermon, Stefano and Finn, Chelsea",
        2023, "2305.18290", "Advances in Neural Information Processing Systems 36",
    )  # fmt: skip
    config_class = DPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        *given: Any,
        loss: Callable[..., Tensor] | None = None,
        **named: Any,
    ) -> None:
        """As BaseTrainer, and `ref_model` (None: the policy as it is now), and `loss(pair, ...)`, a custom function."""
        self.custom_loss = loss
        super().__init__(model, args, *given, ref_model=ref_model, **named)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        args, pair = self.args, self.pair_of(batch, policy, reference)
        if self.custom_loss is not None:
            return LossOutput(call(self.custom_loss, pair, options=args), per="unit", metrics=pair.metrics(args.beta))
        metrics = pair.metrics(args.beta) | self.token_metrics(batch, policy)
        return LossOutput(self.preference_terms(batch, pair), metrics=metrics)
