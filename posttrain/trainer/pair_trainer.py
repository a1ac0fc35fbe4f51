"""PairTrainer: what methods that train on preference pairs have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.rows.formats import PREFERENCE, TOKENISED_PREFERENCE
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.construction import refuse_arguments

SIDES = ("chosen", "rejected")


class PairTrainer(BaseTrainer):
    """A method whose rows hold a chosen and a rejected answer, and whose loss logs a reward of each."""

    formats = (PREFERENCE, TOKENISED_PREFERENCE)
    roles = SIDES
    token_stats: ClassVar[tuple[str, ...]] = ("entropy", "is_most_likely", "mean_logit")

    def nll_term(self, batch: TokenBatch, policy: TokenScores, role: str, weight: float) -> LossTerm:
        """The nll of the trained tokens of one role, to be divided by their number in the step."""
        return LossTerm(-batch.role(batch.sequence_sum(policy.logps), role), f"token:{role}", weight, entries="unit")

    def token_metrics(self, batch: TokenBatch, policy: TokenScores) -> dict[str, Tensor]:
        """The mean logit of each side's tokens, and how often the chosen ones are the likeliest."""
        found = {}
        if "mean_logit" in policy.stats:
            found |= {f"logits/{name}": batch.role_tokens(policy.stats["mean_logit"], name) for name in SIDES}
        if "is_most_likely" in policy.stats:  # of the chosen tokens only: rejected ones are not to be predicted
            found["mean_token_accuracy"] = batch.role_tokens(policy.stats["is_most_likely"], "chosen")
        return found

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Tensor, Tensor]:
        rewards = torch.stack([output.metrics[f"rewards/{name}"] for name in SIDES], dim=1)
        return rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)  # column 0 should win


class ReferenceFreePairTrainer(PairTrainer):
    """A method of pairs without a reference model, whose constructor has TRL's older order of arguments."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        compute_metrics: Callable | None = None,
        **named: Any,
    ) -> None:
        refused = {"model_init": model_init, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        refuse_arguments(type(self).__name__, model, **refused)
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            peft_config=peft_config, **named,
        )  # fmt: skip
