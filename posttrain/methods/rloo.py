"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.losses.advantages import batch_normalised, incomparable, leave_one_out
from posttrain.losses.formulas import ADVANTAGE_FORMULAS, Formula, Totals, filled, number, policy_formula
from posttrain.losses.kl import k1
from posttrain.losses.policy import PolicyTokens, check_policy_loss, policy_loss
from posttrain.models.load.reference import PRECOMPUTED
from posttrain.rollout.collector import GroupTable
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, Rollout
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.online import GroupConfig
from posttrain.trainer.report.model_card import Paper


@dataclass
class RLOOConfig(GroupConfig):
    """Options of REINFORCE leave-one-out."""

    num_generations: int = option(2, "Completions of each prompt: the size of a group.")
    beta: float = option(
        0.05, "The divergence from the reference, times this, is subtracted from the reward. 0: no reference."
    )
    epsilon: float = option(0.2, "The ratio of a whole completion is clipped at 1 - epsilon.")
    epsilon_high: float | None = option(None, "And at 1 + epsilon_high. None: epsilon.")
    normalize_advantages: bool = option(
        False, "Shift and scale the advantages of a generation to mean 0 and deviation 1."
    )
    reward_clip_range: tuple[float, float] | None = option(
        None, "Clamp the summed reward to (low, high). None: no clamp."
    )

    clips_ratios = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("epsilon", self.epsilon, 0, 1)
        check_policy_loss("rloo", self)
        clip = self.reward_clip_range
        if clip is not None and (len(clip) != 2 or not clip[0] < clip[1]):
            raise ValueError(
                f"`reward_clip_range` is {self.reward_clip_range}; it must be (low, high) with low below high."
            )
        if "advantage_std" in self.set_by_user() and not self.normalize_advantages:
            raise ValueError("`advantage_std` is set, but without `normalize_advantages` no advantage is scaled.")


class RLOOTrainer(OnlineTrainer):
    """REINFORCE leave-one-out (arXiv:2402.14740), with the divergence from the reference in the reward."""

    method, title = "rloo", "REINFORCE with a leave-one-out baseline"
    shares_rows = True
    paper = Paper(
        "ahmadian2024back",
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        "Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and others",
        2024, "2402.14740", "Annual Meeting of the Association for Computational Linguistics",
    )  # fmt: skip
    config_class = RLOOConfig
    runs_under_deepspeed = True

    @property
    def needs_old_logps(self) -> bool:
        return super().needs_old_logps or self.args.beta != 0

    def annotated(self, rollouts: list[Rollout]) -> None:
        """sum_t (old_t - reference_t): an estimate (k1) of the divergence of a whole completion."""
        bound = float("inf") if self.args.kl_clip is None else self.args.kl_clip
        for sample in [rollout.sample for rollout in rollouts] if self.args.beta else []:
            difference = sample.per_token[OLD_LOGPS] - sample.per_token[PRECOMPUTED]
            difference = difference[sample.trained].astype("float64").clip(-bound, bound)
            sample.scalars["kl_sum"] = float(difference.sum())

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """A = r' - mean of the others' r', with r' = clip(r) - beta * kl."""
        args = self.args
        if args.reward_clip_range is not None:
            totals = totals.clamp(*args.reward_clip_range)
        advantages = leave_one_out(totals - args.beta * table.kl_sums, table.groups)
        if not args.normalize_advantages:
            return advantages
        return batch_normalised(advantages, incomparable(totals, table.groups), ddof=args.ddof)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        logps = policy.logps
        old_logps = self.proximal_logps(batch, logps)
        advantages = batch.per_token.get(ADVANTAGES, torch.zeros_like(logps))
        tokens = PolicyTokens(batch, logps, old_logps, advantages, self.age_weights(batch, old_logps))
        output = policy_loss("rloo", tokens, self.args)
        if reference is not None:  # of a token, as GRPO logs it; the reward has the sum over a completion
            kl = k1(batch.per_token.get(OLD_LOGPS, logps.detach()), reference.logps)
            if (bound := self.args.kl_clip) is not None:
                output.metrics["kl_clip_ratio"] = (kl.abs() > bound).to(kl.dtype)
                kl = kl.clamp(-bound, bound)
            output.metrics["kl"] = kl
        return output

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        advantage = filled(ADVANTAGE_FORMULAS["rloo"], {"others": args.num_generations - 1})
        made = policy_formula("rloo", args, totals, advantage)
        clip = args.reward_clip_range
        clipped = "reward" if clip is None else f"clip(reward, {clip[0]}, {clip[1]})"
        bound = None if args.kl_clip is None else number(args.kl_clip)
        divergence = "log(p_old / p_ref)" if bound is None else f"clip(log(p_old / p_ref), -{bound}, {bound})"
        penalty = f" - {number(args.beta)} * sum_t({divergence})" if args.beta else ""
        names = [*made.names, ("r", clipped + penalty)]
        if args.normalize_advantages:
            deviation = "deviation" if args.advantage_std == "sample" else f"{args.advantage_std} deviation"
            names.append(("A, then", f"shifted and scaled to mean 0 and {deviation} 1 over a generation"))
        return Formula(made.terms, made.divided_by, tuple(names))
