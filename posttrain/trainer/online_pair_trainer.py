"""OnlinePairTrainer: of the completions of a prompt, the best is trained against the worst by DPO's losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.options import refused
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import KEEP_END, Unit
from posttrain.losses.advantages import leave_one_out
from posttrain.losses.formulas import Formula, Totals
from posttrain.rollout.collector import GroupTable
from posttrain.rollout.rollout import Rollout
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.options.preference import PreferenceLossConfig
from posttrain.trainer.pair_trainer import Pairs, PreferenceLosses

SCORE, ENDED = "score", "ended"
"""Scalars of a sample: its reward less the penalty, and whether it ended by itself."""


@dataclass
class ComparedConfig(OnlineConfig):
    """Options of methods that compare the completions of a prompt with each other."""

    learning_rate: float = option(5e-7, "Initial learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")
    beta: list[float] = option(
        [0.1], "Strength of the pull towards the reference; several numbers: one for each epoch."
    )
    num_generations: int = option(2, "Completions of each prompt, of which the best and the worst become a pair.")
    max_length: int | None = option(
        512, "Most tokens of prompt and completion together: prompts are cut at their beginning. None: no limit."
    )
    max_prompt_length: int | None = refused(None, "`max_length` limits prompt and completion together.")
    max_completion_length: int = option(64, "Most tokens of a completion; with tools, of all its turns together.")
    max_new_tokens: int | None = option(None, "Old name of `max_completion_length`.")
    temperature: float = option(
        0.9, "Divides the logits in sampling. Log-probs in the loss are those at temperature 1."
    )
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the reward of a completion that did not end by itself. None: nothing is."
    )
    vllm_gpu_memory_utilization: float = option(0.55, "Colocated: share of the GPU's memory that vLLM may take.")
    mask_truncated_completions: bool = refused(False, "A pair has two sides: lower one by `missing_eos_penalty`.")
    replay_buffer_size: int = refused(0, "Pairs that teach nothing are left out; `drop_zero_variance` writes others.")
    reward_model_path: str | None = refused(None, "Pass the path of a reward model as `reward_funcs`.")

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            self.max_completion_length = self.max_new_tokens
        if not isinstance(self.beta, (list, tuple)):
            self.beta = [self.beta]
        super().__post_init__()
        if self.missing_eos_penalty is not None:
            check_range("missing_eos_penalty", self.missing_eos_penalty, 0)
        if self.max_length is not None and self.max_length <= self.max_completion_length:
            raise ValueError(
                f"`max_length`={self.max_length} leaves no token for a prompt before `max_completion_length`="
                f"{self.max_completion_length}: it counts both. Raise it, or set it to None."
            )

    def samples_of(self, batch_size: int) -> int:
        """`per_device_train_batch_size` counts prompts: all completions of one are in one micro-batch."""
        return batch_size * self.num_generations


@dataclass
class OnlinePairConfig(PreferenceLossConfig, ComparedConfig):
    """Options of methods that make pairs of what the model itself writes."""


class ComparedTrainer(OnlineTrainer):
    """Scores completions to compare them. Log-probs are those at temperature 1: those of the models themselves, and not of the
    way they are sampled."""

    scoring_temperature = 1.0
    needs_reference = True
    needs_old_logps = False

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: OnlinePairConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        *,
        judge: Any = None,
        reward_model: Any = None,
        **named: Any,
    ) -> None:
        """Arguments in TRL's order. `judge` and `reward_model` are older names of `reward_funcs`."""
        refused = {"data_collator": data_collator, "compute_metrics": compute_metrics}
        refused["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        refuse_arguments(type(self).__name__, model, **refused)
        given = [one for one in (reward_funcs, judge, reward_model) if one is not None]
        if len(given) > 1:
            raise ValueError("`reward_funcs`, `judge` and `reward_model` all rank completions: give one of them.")
        data = (train_dataset, eval_dataset, processing_class, reward_processing_classes)
        more = {"peft_config": peft_config, "ref_model": ref_model, **named}
        super().__init__(model, given[0] if given else None, args, *data, callbacks, optimizers, **more)

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        args = self.args
        longest = None if args.max_length is None else args.max_length - args.max_completion_length
        return super().prepare_options(is_training) | {"max_length": longest, "truncation_mode": KEEP_END}

    def scores(self, table: GroupTable, totals: Tensor) -> Tensor:
        """(N,) rewards less the penalty of completions that were cut off."""
        return totals - (self.args.missing_eos_penalty or 0.0) * table.truncated

    def spread(self, rollouts: list[Rollout]) -> None:
        penalty = self.args.missing_eos_penalty or 0.0
        for rollout in rollouts:
            rollout.sample.scalars[SCORE] = rollout.reward - penalty * rollout.is_truncated
            rollout.sample.scalars[ENDED] = float(not rollout.is_truncated)


class OnlinePairTrainer(PreferenceLosses, Pairs, ComparedTrainer):
    """Makes a pair of each group: the completion with the highest score against that with the lowest."""

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """Score less the mean of the others': 0 throughout a group of equal ones, which teaches nothing."""
        return leave_one_out(self.scores(table, totals), table.groups)

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        return [self.pair_in(group) for group in groups]

    def pair_in(self, group: list[Rollout]) -> Unit | None:
        """(chosen, rejected); None where fewer than two have a reward, or all have the same: a tie teaches nothing."""
        known = [rollout for rollout in group if not rollout.masked and not math.isnan(rollout.reward)]
        chosen = max(known, key=lambda rollout: rollout.advantage, default=None)
        rejected = min(known, key=lambda rollout: rollout.advantage, default=None)
        if len(known) < 2 or chosen.advantage == rejected.advantage:
            return None
        return chosen.sample, rejected.sample

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        pair = self.pair_of(batch, policy, reference)
        terms = self.preference_terms(batch, pair)
        metrics = pair.metrics(self.beta) | self.token_metrics(batch, policy)
        metrics |= self.objective(batch, policy, reference)
        if more := self.further_terms(batch, policy):
            metrics["loss/dpo"] = sum(term.weight * term.values.detach() for term in terms if term.per == "unit")
        return LossOutput([*terms, *more], metrics=metrics)

    def further_terms(self, batch: TokenBatch, policy: TokenScores) -> list[Any]:
        """Of a method, besides DPO's."""
        return []

    def objective(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> dict[str, Tensor]:
        """What the pairs say about reward and divergence, under TRL's names; sums over the tokens of a completion."""
        kl = batch.sequence_sum((policy.logps - reference.logps).detach())
        found = {
            "objective/kl": kl,
            "objective/entropy": -batch.sequence_sum(policy.logps.detach()),
            "objective/non_score_reward": -self.beta * kl,
            "beta": kl.new_full((1,), self.beta),
        }
        if SCORE not in batch.scalars:  # a process without a pair
            return found
        scores = batch.scalars[SCORE].to(kl)
        found["objective/scores"], found["objective/rlhf_reward"] = scores, scores - self.beta * kl
        found["objective/scores_margin"] = batch.role(scores, "chosen") - batch.role(scores, "rejected")
        found["val/contain_eos_token"] = batch.scalars[ENDED].to(kl)
        return found

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        who = "the better and the worse completion"
        if args.num_generations > 2:
            who = f"the best and the worst of {args.num_generations} completions"
        pair = ("c, r", f"{who} of a prompt, by reward; ties are left out")
        return Formula(made.terms, made.divided_by, (*made.names, pair))
