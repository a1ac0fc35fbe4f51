"""Exploratory preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.options import by_epoch, values_of
from posttrain.core.results import LossTerm, TokenScores
from posttrain.losses.formulas import Formula, Totals, number
from posttrain.rollout.rollout import POLICY, REFERENCE, Request, Rollout
from posttrain.trainer.online_pair_trainer import ENDED, SCORE, OnlinePairConfig, OnlinePairTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.report.model_card import Paper

BY_REFERENCE = "by_reference"
"""Scalar of a sample: 1 where the reference wrote it."""


@dataclass
class XPOConfig(OnlinePairConfig):
    """Options of exploratory preference optimisation."""

    alpha: list[float] = option(
        [1e-5],
        "Weight of the log-prob of the reference's completion, which is pushed down; several: one for each epoch.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (list, tuple)):
            self.alpha = [self.alpha]
        super().__post_init__()
        for value in self.alpha:
            check_range("alpha", value, 0)
        if self.num_generations != 2 or self.num_generations_eval not in (None, 2):
            raise ValueError(
                "XPO compares one completion of the policy with one of the reference: leave `num_generations` at 2."
            )


class XPOTrainer(OnlinePairTrainer):
    """XPO (arXiv:2405.21046): online DPO whose second completion is the reference's, and a bonus for leaving it.

    loss = dpo(chosen, rejected) + alpha * sum_t log policy(y'_t), y' the completion that the reference wrote.
    """

    method, title = "xpo", "exploratory preference optimisation"
    paper = Paper(
        "xie2024exploratory",
        "Exploratory Preference Optimization: Harnessing Implicit Q*-Approximation for Sample-Efficient RLHF",
        "Xie, Tengyang and Foster, Dylan J. and Krishnamurthy, Akshay and Rosset, Corby and others",
        2024, "2405.21046",
    )  # fmt: skip
    config_class = XPOConfig

    @property
    def alpha(self) -> float:
        """Of this epoch."""
        return by_epoch(self.args.alpha, self.state.epoch)

    def author_of(self, request: Request) -> str:
        return REFERENCE if request.sample else POLICY

    def spread(self, rollouts: list[Rollout]) -> None:
        super().spread(rollouts)
        for rollout in rollouts:
            rollout.sample.scalars[BY_REFERENCE] = float(rollout.request.sample)

    def further_terms(self, batch: TokenBatch, policy: TokenScores) -> list[LossTerm]:
        if BY_REFERENCE not in batch.scalars:  # a process without a pair
            return []
        values = self._of_reference(batch, batch.sequence_sum(policy.logps))
        return [LossTerm(values, "unit", self.alpha, entries="unit")]

    def _of_reference(self, batch: TokenBatch, values: Tensor) -> Tensor:
        """(S,) -> (U,): those of the completion that the reference wrote."""
        values = values * batch.scalars[BY_REFERENCE].to(values)
        return batch.role(values, "chosen") + batch.role(values, "rejected")

    def objective(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> dict[str, Tensor]:
        found = super().objective(batch, policy, reference)
        found["alpha"] = policy.logps.new_full((1,), self.alpha).detach()
        if SCORE not in batch.scalars:
            return found
        sums = batch.sequence_sum(policy.logps.detach())
        found["loss/xpo"] = self.alpha * self._of_reference(batch, sums)
        for name, column in (("objective/{}_scores", SCORE), ("val/{}_contain_eos_token", ENDED)):
            values = batch.scalars[column].to(sums)
            theirs = self._of_reference(batch, values)
            found[name.format("ref")] = theirs
            found[name.format("model")] = batch.role(values, "chosen") + batch.role(values, "rejected") - theirs
        found["objective/scores_margin"] = found["objective/model_scores"] - found["objective/ref_scores"]
        return found

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        term = f"{number(values_of(args.alpha)[0])} * log(policy(y'))"
        divided = f"the bonus: sum over pairs / {totals['units']} pairs of the step"
        names = (*made.names[:-1], ("c, r", "the completions of policy and reference, in the order of their rewards"))
        return Formula((*made.terms, term), (*made.divided_by, divided), (*names, ("y'", "the reference's completion")))
