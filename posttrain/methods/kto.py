"""Kahneman-Tversky optimisation: answers that are wanted or not, without pairs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.core.batch import Passes, TokenBatch, passes_of
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.unpaired import PartneredRows, Partners
from posttrain.losses.formulas import UNPAIRED_FORMULAS, Formula, Totals, filled, number
from posttrain.losses.named_options import call
from posttrain.losses.unpaired import UNPAIRED_LOSSES, Unpaired
from posttrain.trainer.checkpoints.sharding import most_of_any_process
from posttrain.trainer.options.base import BaseConfig, OlderOptions, ReferenceConfig, check_choice, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import over_processes
from posttrain.trainer.unpaired_trainer import UnpairedTrainer

logger = logging.getLogger(__name__)
WITH_REFERENCE_POINT = "kto"


@dataclass
class KTOConfig(OlderOptions, ReferenceConfig, ImageConfig, BaseConfig):
    """Options of Kahneman-Tversky optimisation."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    loss_type: str = option("kto", "kto, or apo_zero_unpaired, which has no reference point and no passes for it.")
    beta: float = option(0.1, "Strength of the pull towards the reference.")
    desirable_weight: float = option(1.0, "Weight of wanted answers.")
    undesirable_weight: float = option(1.0, "Weight of unwanted answers.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("loss_type", self.loss_type, ("kto", "apo_zero_unpaired"))
        check_range("beta", self.beta, 0, open_low=True)
        check_range("desirable_weight", self.desirable_weight, 0)
        check_range("undesirable_weight", self.undesirable_weight, 0)


class KTOTrainer(UnpairedTrainer):
    """Kahneman-Tversky optimisation (arXiv:2402.01306).

    The reference point z is one number for an optimizer step: how far the policy has moved on mismatched rows, over all of its
    micro-batches and processes. A step with fewer than two prompts keeps the last one.
    """

    method, title = "kto", "Kahneman-Tversky optimisation"
    paper = Paper(
        "ethayarajh2024kto", "KTO: Model Alignment as Prospect Theoretic Optimization",
        "Ethayarajh, Kawin and Xu, Winnie and Muennighoff, Niklas and Jurafsky, Dan and Kiela, Douwe",
        2024, "2402.01306", "International Conference on Machine Learning",
    )  # fmt: skip
    config_class = KTOConfig
    divergence = 0.0

    @property
    def has_reference_point(self) -> bool:
        return self.args.loss_type == WITH_REFERENCE_POINT

    # ---- partners ------------------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Log-probs that are computed before training need partners that are known before it: the row before in the dataset."""
        rows = super()._prepared(dataset, name)
        if rows is None or isinstance(rows, PartneredRows):
            return rows
        if name == "train":
            self._advise_weights(rows)
        is_fixed = self.has_reference_point and self.args.precompute_ref_log_probs
        return PartneredRows(rows, self._partners(within_step=False)) if is_fixed else rows

    def partners(self, is_training: bool) -> Partners | None:
        if not self.has_reference_point or self.args.precompute_ref_log_probs:
            return None
        return self._partners(within_step=is_training)

    def _partners(self, within_step: bool) -> Partners:
        return Partners(self.args.max_length, self.args.truncation_mode, within_step)

    def _advise_weights(self, rows: Any) -> None:
        """Eq. 8 of the paper: wanted rows times their weight should be 1 to 4/3 times unwanted rows times theirs."""
        labels = getattr(rows.report, "labels", None)
        if labels is None or labels.kind != "labels" or not 0 < labels.wanted_share < 1:
            return
        wanted, unwanted = labels.wanted_share * labels.total, (1 - labels.wanted_share) * labels.total
        args = self.args
        ratio = wanted * args.desirable_weight / max(unwanted * args.undesirable_weight, 1e-9)
        if not 1 <= ratio * 1.01 <= 1.36:
            best = unwanted * args.undesirable_weight / wanted
            logger.warning(
                f"{wanted:.0f} rows are wanted and {unwanted:.0f} are not; the paper advises `desirable_weight` between "
                f"{best:.2f} and {4 / 3 * best:.2f} (it is {number(args.desirable_weight)}), or `undesirable_weight` moved instead."
            )

    # ---- the step ------------------------------------------------------------------------------------------------------------

    def before_step(self, batches: list[TokenBatch]) -> None:
        if self.has_reference_point:
            self.model_wrapped.train()
            self.divergence = self._divergence_on(batches, most_of_any_process(len(batches), self.args))

    def forward_before_step(self, passes: float) -> str | None:
        return "of mismatched rows, for the reference point" if self.has_reference_point else None

    def evaluation_loop(self, dataloader: Any, *given: Any, **named: Any) -> Any:
        """Trainer's loop, with the reference point of all rows that are evaluated on."""
        if not self.has_reference_point:
            return super().evaluation_loop(dataloader, *given, **named)
        of_training = self.divergence
        self.model_wrapped.eval()
        self.divergence = self._divergence_on(part for batch in dataloader for part in passes_of(batch))
        try:
            return super().evaluation_loop(dataloader, *given, **named)
        finally:
            self.divergence = of_training

    @torch.no_grad()
    def _divergence_on(self, batches: Iterable[TokenBatch | Passes], rounds: int = 0) -> float:
        """z = max(0, mean of sum_t log(policy / reference) over the mismatched rows of all processes). Collective."""
        totals, count = [], 0
        for batch in batches:
            mismatched = batch if batch.twin is None else batch.twin
            count += int((mismatched.counts > 0).sum()) if batch.num_units else 0
            totals.append(self._log_ratios(self._prepare_inputs(mismatched)).double().sum())
        for _ in range(len(totals), rounds):  # sharded weights need every process in every forward
            self._log_ratios(self._prepare_inputs(self.data_collator.one_pass([])))
        total = torch.stack(totals).sum().item() if totals else 0.0
        total, count = over_processes(total, self.args), over_processes(count, self.args)
        return max(0.0, total / count) if count else self.divergence

    def _log_ratios(self, batch: TokenBatch) -> torch.Tensor:
        policy = self.score(self.model_wrapped, batch, ())
        return batch.sequence_sum(policy.logps - self.reference.scores(batch).logps)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        args = self.args
        rows = Unpaired.of(batch, policy.logps, reference.logps)
        options = {"beta": args.beta, "divergence": self.divergence}
        values = call(UNPAIRED_LOSSES[args.loss_type], rows, options=options)
        weights = torch.where(rows.wanted, *map(values.new_tensor, (args.desirable_weight, args.undesirable_weight)))
        metrics = rows.metrics(args.beta) | self.token_metrics(batch, policy, rows)
        if self.has_reference_point:
            metrics["kl"] = torch.full_like(values, self.divergence)
        return LossOutput(weights * values, per="unit", metrics=metrics)

    def method_state(self) -> dict[str, Any]:
        return {"divergence": self.divergence}

    def load_method_state(self, state: dict[str, Any]) -> None:
        self.divergence = state["divergence"]

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        names = [
            ("s", "1 of a wanted answer, -1 of an unwanted one"),
            ("l", "log(policy / reference) of a whole answer"),
        ]
        if args.loss_type == WITH_REFERENCE_POINT:
            names.append(("z", "max(0, mean of l over mismatched rows of the step), without gradient"))
        weights = (
            f"{number(args.desirable_weight)} of a wanted answer, {number(args.undesirable_weight)} of an unwanted one"
        )
        term = f"w * ({filled(UNPAIRED_FORMULAS[args.loss_type], args)})"
        return Formula((term,), (f"sum over rows / {totals['units']} rows of the step",), (("w", weights), *names))
