"""Nash-MD: the policy learns to be preferred to a mixture of itself and its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.options import by_epoch, refused, values_of
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Unit
from posttrain.losses.formulas import Formula, Totals, number
from posttrain.rollout.collector import GroupTable
from posttrain.rollout.feed.pacing import IN_ORDER
from posttrain.rollout.rollout import ADVANTAGES, MIXTURE, OLD_LOGPS, POLICY, Request, Rollout
from posttrain.trainer.online_pair_trainer import ENDED, SCORE, ComparedConfig, ComparedTrainer
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.report.model_card import Paper

OTHER_SCORE, OTHER_ENDED = "other_score", "other_ended"
"""Scalars of the policy's completion: score and end of the mixture's."""


# ---- the divergence from the reference: what a token's log-prob is multiplied by, from log(policy / reference) of each token


def of_token(batch: TokenBatch, log_ratios: Tensor) -> Tensor:
    """The token's own; it forgets that a token changes what comes after it."""
    return log_ratios


def of_sequence(batch: TokenBatch, log_ratios: Tensor) -> Tensor:
    """That of the whole completion, as in the paper."""
    return batch.expand(batch.sequence_sum(log_ratios))


def to_go(batch: TokenBatch, log_ratios: Tensor) -> Tensor:
    """From the token on: what was before it does not depend on it. The same gradient on average, with less variance."""
    until = log_ratios.double().cumsum(0)
    ends = batch.sequence_sum(log_ratios.double()).cumsum(0)
    return (batch.expand(ends) - until).to(log_ratios) + log_ratios


KL_LEVELS: dict[str, Callable[[TokenBatch, Tensor], Tensor]] = {
    "to_go": to_go,
    "sequence": of_sequence,
    "token": of_token,
}
"""Value of `kl_level` -> (N,) log-ratios to (N,) weights of log-probs."""
KL_FORMULAS = {"to_go": "sum_from_t(log(p / p_ref))", "sequence": "sum_t(log(p / p_ref))", "token": "log(p / p_ref)"}


@dataclass
class NashMDConfig(ComparedConfig):
    """Options of Nash-MD."""

    mixture_coef: list[float] = option(
        [0.5],
        "Weight of the reference's logits in the mixture that the policy plays against; several: one for each epoch.",
    )
    kl_level: str = option(
        "to_go", "Divergence that a token answers for: to_go (from it on), sequence (the paper's), or token (TRL's)."
    )
    num_generations: int = refused(2, "One completion of the policy is compared with one of the mixture.")
    num_generations_eval: int | None = refused(
        None, "One completion of the policy is compared with one of the mixture."
    )
    use_vllm: bool = refused(
        False,
        "A mixture is drawn from the logits of two models at once, and vLLM runs one: the native engine has both.",
    )
    num_iterations: int = refused(1, "The loss has no ratio that would correct for older weights: generate anew.")

    def __post_init__(self) -> None:
        if not isinstance(self.mixture_coef, (list, tuple)):
            self.mixture_coef = [self.mixture_coef]
        super().__post_init__()
        for value in values_of(self.mixture_coef):
            check_range("mixture_coef", value, 0, 1)
        check_choice("kl_level", self.kl_level, tuple(KL_LEVELS))
        if self.trains_on_older_tokens and self.async_order == IN_ORDER and len(values_of(self.mixture_coef)) > 1:
            raise ValueError(
                "`mixture_coef` changes from epoch to epoch, and a mixture that writes ahead takes that of the epoch in which it "
                "writes: `async_order='in_order'`, which depends on no time, needs one value, or `async_lead=0`."
            )


class NashMDTrainer(ComparedTrainer):
    """Nash-MD-PG (arXiv:2312.00886).

    Of each prompt the policy writes y, and the geometric mixture of policy and reference writes y'. With P the probability that y
    is preferred, only y is trained: beta times its divergence from the reference less (P - 1/2) times its log-prob.
    """

    method, title = "nash_md", "Nash learning from human feedback"
    paper = Paper(
        "munos2024nash", "Nash Learning from Human Feedback",
        "Munos, R{\\'e}mi and Valko, Michal and Calandriello, Daniele and Azar, Mohammad Gheshlaghi and others",
        2024, "2312.00886", "International Conference on Machine Learning",
    )  # fmt: skip
    config_class = NashMDConfig
    token_stats: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: str | Path | nn.Module,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: NashMDConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        reward_processing_classes: Any = None,
        **named: Any,
    ) -> None:
        """Arguments in TRL's order. `reward_funcs` are functions, reward models or one judge, also to be given as `judge`."""
        super().__init__(
            model, ref_model, reward_funcs, args, data_collator, train_dataset, eval_dataset, processing_class,
            reward_processing_classes, peft_config, compute_metrics, callbacks, optimizers, preprocess_logits_for_metrics, **named,
        )  # fmt: skip
        self.is_judged = any(getattr(reward, "whole_groups", False) for reward in self.rewards.rewards)
        if self.is_judged and (self.args.missing_eos_penalty or self.args.reward_weights not in (None, [1.0])):
            raise ValueError(
                "A judge says how probable it is that a completion is preferred; `missing_eos_penalty` and `reward_weights` change "
                "rewards. Leave them out, or give reward functions."
            )

    # ---- who writes, and who wins --------------------------------------------------------------------------------------------

    def author_of(self, request: Request) -> str:
        return POLICY if request.sample == 0 else MIXTURE

    def mixture_weight(self) -> float:
        return by_epoch(self.args.mixture_coef, self.state.epoch)

    def annotate(self, rollouts: list[Rollout]) -> None:
        """Of each group the first, which is the policy's: the mixture's is not trained on."""
        first = {rollout.group: rollout for rollout in reversed(rollouts)}
        super().annotate([*reversed(first.values())])

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """P - 1/2 of the policy's completion, 1/2 - P of the mixture's; 0 where one of the two has no reward."""
        pairs = torch.argsort(table.groups, stable=True).view(-1, 2)
        own, other = (totals if self.is_judged else self.scores(table, totals))[pairs].unbind(1)
        edge = ((own if self.is_judged else torch.sigmoid(own - other)) - 0.5).masked_fill((own + other).isnan(), 0.0)
        return torch.zeros_like(totals).scatter(0, pairs[:, 0], edge).scatter(0, pairs[:, 1], -edge)

    def spread(self, rollouts: list[Rollout]) -> None:
        OnlineTrainer.spread(self, rollouts)
        super().spread(rollouts)
        others = {rollout.group: rollout.sample.scalars for rollout in rollouts if rollout.request.sample == 1}
        for rollout in rollouts:
            other = others[rollout.group]
            rollout.sample.scalars |= {OTHER_SCORE: other[SCORE], OTHER_ENDED: other[ENDED]}

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """The policy's completion of each group, where both could be written and compared."""
        usable = [not any(rollout.masked or math.isnan(rollout.reward) for rollout in group) for group in groups]
        return [(own.sample,) if is_usable else None for (own, _), is_usable in zip(groups, usable)]

    # ---- the step ------------------------------------------------------------------------------------------------------------

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        beta, logps = by_epoch(self.args.beta, self.state.epoch), policy.logps
        ratios = (logps - reference.logps).detach()
        advantages = batch.per_token.get(ADVANTAGES, torch.zeros_like(logps))
        divergence = KL_LEVELS[self.args.kl_level](batch, ratios)
        weights = self.age_weights(batch, batch.per_token.get(OLD_LOGPS, logps.detach()))
        values = (beta * divergence - advantages) * logps
        values = batch.sequence_sum(values if weights is None else values * weights)
        return LossOutput(
            values, per="sequence", metrics=self._metrics(batch, logps.detach(), ratios, advantages, beta)
        )

    def _metrics(
        self, batch: TokenBatch, logps: Tensor, ratios: Tensor, advantages: Tensor, beta: float
    ) -> dict[str, Tensor]:
        """Under TRL's names: `chosen` is the policy and its completion, `rejected` the mixture's, or the reference."""
        real = slice(batch.num_samples)  # an empty batch holds a token that belongs to no sample
        said, divergence, score = (batch.sequence_sum(x)[real] for x in (logps, ratios, advantages * logps))
        found = {
            "loss/score": score,
            "loss/kl": divergence,
            "objective/entropy": -said,
            "rewards/probabilities": batch.sequence_mean(advantages)[real] + 0.5,
            "rewards/margins": divergence,
            "rewards/accuracies": (divergence > 0).float(),
            "logps/chosen": said,
            "logps/rejected": said - divergence,
            "beta": said.new_full((1,), beta),
            "mixture_coef": said.new_full((1,), self.mixture_weight()),
        }
        if SCORE in batch.scalars:
            own = {"val/model_contain_eos_token": ENDED, "val/ref_contain_eos_token": OTHER_ENDED}
            if not self.is_judged:
                own |= {"rewards/chosen": SCORE, "rewards/rejected": OTHER_SCORE}
            found |= {name: batch.scalars[scalar][real] for name, scalar in own.items()}
        return found

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        beta, coefficient = (", then ".join(map(number, values_of(v))) for v in (args.beta, args.mixture_coef))
        return Formula(
            (f"(beta * sg({KL_FORMULAS[args.kl_level]}) - (P - 1/2)) * log(p)",),
            (
                f"sum over the tokens of a completion, sum over completions / {totals['sequences']} completions of the step",
            ),
            (
                ("beta", beta),
                ("P", "sigmoid(r - r'), or a judge's probability that the completion is preferred"),
                ("r, r'", "rewards of the policy's completion and of the mixture's"),
                ("mixture", f"logits (1 - c) * policy + c * reference, c = {coefficient}"),
            ),
        )
