"""UnpairedTrainer: what methods that train on rows with a label, wanted or not, have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import PREFERENCE, TOKENISED_PREFERENCE, UNPAIRED_PREFERENCE
from posttrain.data.unpaired import UnpairedRows, UnpairedStream
from posttrain.losses.unpaired import Unpaired
from posttrain.trainer.base import BaseTrainer

logger = logging.getLogger(__name__)


class UnpairedTrainer(BaseTrainer):
    """A method whose rows are an answer and a label; pairs are two such rows."""

    formats = (UNPAIRED_PREFERENCE, PREFERENCE, TOKENISED_PREFERENCE)
    roles = ("completion",)
    token_stats: ClassVar[tuple[str, ...]] = ("entropy", "mean_logit")

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        **named: Any,
    ) -> None:
        """As BaseTrainer, with the arguments in TRL's order, and `ref_model` (None: the policy as it is now)."""
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            quantization_config=quantization_config, peft_config=peft_config, ref_model=ref_model, **named,
        )  # fmt: skip

    def _prepared(self, dataset: Any, name: str) -> Any:
        rows = super()._prepared(dataset, name)
        if rows is None or len(rows.roles) == 1:
            return rows
        if "ref_chosen_logps" in (getattr(dataset, "column_names", None) or ()):
            logger.warning("The columns ref_chosen_logps and ref_rejected_logps are not read: the reference is run.")
        return UnpairedStream(rows) if isinstance(rows, IterableDataset) else UnpairedRows(rows)

    def token_metrics(self, batch: TokenBatch, policy: TokenScores, rows: Unpaired) -> dict[str, Tensor]:
        """The mean logit of the tokens of wanted and of unwanted answers."""
        if "mean_logit" not in policy.stats or not batch.num_units:
            return {}
        wanted, logits = batch.expand(rows.wanted), policy.stats["mean_logit"]
        sides = {"logits/chosen": ~wanted, "logits/rejected": wanted}
        return {name: logits.masked_fill(others, float("nan")) for name, others in sides.items()}

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Tensor, Tensor]:
        """The reward of each answer, and its label."""
        rewards = torch.stack([output.metrics[f"rewards/{side}"] for side in ("chosen", "rejected")]).nansum(0)
        return rewards, batch.scalars["label"].long()
