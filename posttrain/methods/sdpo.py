"""Self-distillation policy optimisation: the model learns from itself that has seen what succeeded."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import ACTIVE, TokenBatch
from posttrain.core.options import refused
from posttrain.core.processes import of_every_process
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.core.sample import Unit
from posttrain.losses.advantages import REWARD_SCALES, group_normalised
from posttrain.losses.formulas import Formula, Totals, advantage_formula, number, policy_formula
from posttrain.losses.policy import PolicyTokens, check_policy_loss, policy_loss
from posttrain.models.load.teacher import EMA, LIVE, Teacher
from posttrain.rollout.collector import Collected, GroupTable
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, Rollout
from posttrain.trainer.distilling_trainer import DistillingTrainer
from posttrain.trainer.online.rollout_metrics import as_tensors, deviation
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.distilling import SAMPLED_TOKEN, SelfDistillingConfig
from posttrain.trainer.options.online import GroupConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.self_distilling_trainer import (
    PRIVILEGED,
    SelfDistillingTrainer,
    TeacherPromptTooLong,
    fill,
    shown,
    text_of,
)

logger = logging.getLogger(__name__)

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
MEASURED = "self_distillation/"
FEEDBACK = "feedback"
"""Scalar of a sample: 1 where its teacher is shown feedback."""
WHOLE_GROUPS = "Groups in which nothing succeeds are left out of the distillation term; none is replaced."
ONE_TEACHER = "The teacher follows the policy (`teacher_model_kind`); the reference of `beta` stays."


@dataclass
class SDPOConfig(SelfDistillingConfig, GroupConfig):
    """Options of self-distillation policy optimisation."""

    teacher_model_kind: str = option(
        EMA, "Weights of the teacher: 'base' as the run began, 'live' the policy's own, 'ema' averaged over the run."
    )
    distillation_alpha: float = option(
        1.0, "Divergence: 0 is KL(teacher, student), 1 is KL(student, teacher), in between Jensen-Shannon."
    )
    distillation_mode: str = option(
        SAMPLED_TOKEN,
        "What is compared: 'full_logits' all tokens of the vocabulary, 'topk_logits' the student's likeliest ones, 'sampled_token' "
        "the written one alone (with `distillation_alpha=1`).",
    )
    distillation_topk: int | None = option(None, "With 'topk_logits', how many of the student's likeliest tokens.")
    distillation_weight: float = option(
        1.0, "Share w of the distillation term; the policy term has 1 - w. 0: GRPO; 1: no policy term."
    )

    # ---- what the teacher is shown
    use_successful_as_teacher: bool = option(
        True, "Show the teacher a successful completion of the same prompt, the first one."
    )
    success_reward_threshold: float = option(1.0, "Lowest reward of a success.")
    dont_reprompt_on_self_success: bool = option(True, "A completion is never shown as a demonstration for itself.")
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "What the teacher is shown in the place of the prompt, of a conversation in the place of its last user turn.",
    )
    solution_template: str = option(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n", "The demonstration in it; nothing without one."
    )
    feedback_template: str = option(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "The feedback in it, of the column 'privileged_context'; nothing without such.",
    )
    include_environment_feedback: bool = option(
        False, "Show the teacher the column 'privileged_context', where it is not empty."
    )
    environment_feedback_only_without_solution: bool = option(False, "Only to teachers that have no demonstration.")
    remove_thinking_from_demonstration: bool = option(False, "Leave out what stands before </think>.")
    max_reprompt_len: int = option(10240, "Longest prompt of the teacher in tokens; longer ones are cut on their left.")

    # ---- the policy term
    loss_type: str = option("dapo", f"Which policy loss: {', '.join(LOSSES)}.")
    epsilon: float = option(0.2, "The ratio is clipped at 1 - epsilon.")
    epsilon_high: float | None = option(None, "And at 1 + epsilon_high. None: epsilon.")
    importance_sampling_level: str = option("token", "Ratio of each 'token', or of the 'sequence' (GSPO).")
    scale_rewards: str | bool = option(
        "group", "Divide advantages by the standard deviation of the 'group', of the 'batch', or by 'none' of them."
    )

    # ---- warnings
    diagnostics_warning_interval: int = option(
        10, "Warn after so many generations in a row that teach nothing, and again after as many. 0: never."
    )
    diagnostics_flat_tolerance: float = option(
        1e-8, "Rewards of a group are all alike if they deviate by at most this."
    )

    sync_ref_model: bool = refused(False, ONE_TEACHER)
    ref_model_mixup_alpha: float = refused(0.6, ONE_TEACHER)
    ref_model_sync_steps: int = refused(512, ONE_TEACHER)
    drop_zero_variance: bool = refused(False, WHOLE_GROUPS)
    refill_rounds: int = refused(4, WHOLE_GROUPS)
    replay_buffer_size: int = refused(0, WHOLE_GROUPS)

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        super().__post_init__()
        check_choice("scale_rewards", self.scale_rewards, tuple(REWARD_SCALES))
        check_choice("loss_type", self.loss_type, LOSSES)
        check_policy_loss(self.loss_type, self)
        check_range("distillation_weight", self.distillation_weight, 0, 1)
        check_range("max_reprompt_len", self.max_reprompt_len, 1)
        check_range("diagnostics_warning_interval", self.diagnostics_warning_interval, 0)
        check_range("diagnostics_flat_tolerance", self.diagnostics_flat_tolerance, 0)
        if self.beta and self.distillation_weight == 1:
            raise ValueError(
                f"`beta` is {self.beta:g} and belongs to the policy term, which `distillation_weight=1` leaves out. Set one of "
                "them."
            )
        if not (self.use_successful_as_teacher or self.include_environment_feedback or self.distillation_weight == 0):
            raise ValueError(
                "Without `use_successful_as_teacher` and `include_environment_feedback` the teacher is shown nothing, and nothing "
                "is learnt from it: set one of them, or `distillation_weight=0`."
            )
        for name, places in (
            ("reprompt_template", ("{prompt}", "{solution}", "{feedback}")),
            ("solution_template", ("{successful_previous_attempt}",)),
            ("feedback_template", ("{feedback_raw}",)),
        ):
            for place in places:
                if place not in getattr(self, name):
                    raise ValueError(f"`{name}` has no {place}: the teacher would not be shown it.")


def without_thinking(text: str) -> str:
    """What follows the last </think>: the tag that opens may be the chat template's."""
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL).rpartition("</think>")[2].strip()


Attempt = tuple[int, int, str]
"""(number of the prompt, which of its completions, what it says): a success."""


def demonstration(successes: list[Attempt], group: int, sample: int, others_only: bool) -> str | None:
    """The first success of a prompt, of all processes; with `others_only` not the sample itself."""
    found = [text for number, which, text in successes if number == group and not (others_only and which == sample)]
    return found[0] if found else None


class SDPOTrainer(SelfDistillingTrainer):
    """SDPO (arXiv:2601.20802): a completion is compared, token by token, with what the model says after it has seen a success."""

    method, title = "sdpo", "self-distillation policy optimisation"
    paper = Paper(
        "hubotter2026reinforcement", "Reinforcement Learning via Self-Distillation",
        'H{\\"u}botter, Jonas and L{\\"u}beck, Frederike and Behric, Lejs and Baumann, Anton and others',
        2026, "2601.20802",
    )  # fmt: skip
    config_class = SDPOConfig
    needs_rewards = True
    needs_reference = OnlineTrainer.needs_reference
    _flat = _inactive = 0  # generations in a row

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SDPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        quantization_config: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order."""
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, reward_funcs=reward_funcs, callbacks=callbacks,
            reward_processing_classes=reward_processing_classes, optimizers=optimizers, peft_config=peft_config,
            quantization_config=quantization_config, engine=engine,
        )  # fmt: skip

    @property
    def weight(self) -> float:
        return self.args.distillation_weight

    @property
    def needs_old_logps(self) -> bool:
        return not self.args.schedule().is_on_policy

    # ---- rewards and what the teacher is shown -----------------------------------------------------------------------

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        return group_normalised(totals, table.groups, self.args.scale_rewards, ddof=self.args.ddof)

    def spread(self, rollouts: list[Rollout]) -> None:
        super(DistillingTrainer, self).spread(rollouts)
        if not self.weight:
            return
        args = self.args
        own = [(one.group, one.request.sample, self._demonstrated(one)) for one in rollouts if self._succeeded(one)]
        every = of_every_process(own, args.world_size)  # also where there is none: all processes ask, or none does
        successes = sorted(attempt for part in every for attempt in part)
        for rollout in (one for one in rollouts if not one.masked):
            solution = demonstration(
                successes, rollout.group, rollout.request.sample, args.dont_reprompt_on_self_success
            )
            is_alone = solution is None or not args.environment_feedback_only_without_solution
            feedback = (
                text_of(rollout.columns.get(PRIVILEGED)) if args.include_environment_feedback and is_alone else ""
            )
            is_active = solution is not None or bool(feedback)
            rollout.sample.scalars |= {ACTIVE: float(is_active), FEEDBACK: float(bool(feedback))}
            self._reprompt(rollout, solution, feedback)

    def _succeeded(self, rollout: Rollout) -> bool:
        is_success = not rollout.masked and rollout.reward >= self.args.success_reward_threshold
        return self.args.use_successful_as_teacher and is_success

    def _demonstrated(self, rollout: Rollout) -> str:
        text = text_of(rollout.completion)
        return without_thinking(text) if self.args.remove_thinking_from_demonstration else text

    _has_said_too_long = False

    def _reprompt(self, rollout: Rollout, solution: str | None, feedback: str) -> None:
        """Give a sample its twin: the completion behind what the teacher is shown."""
        args, sample = self.args, rollout.sample
        itself = replace(sample, per_token={}, scalars={}, twin=None)  # compared, and counted for nothing
        if not sample.scalars[ACTIVE]:
            sample.twin = itself
            return
        parts = {
            "solution": ""
            if solution is None
            else fill(args.solution_template, {"successful_previous_attempt": solution}),
            "feedback": fill(args.feedback_template, {"feedback_raw": feedback}) if feedback else "",
        }
        prompt = shown(rollout.prompt, lambda text: fill(args.reprompt_template, {"prompt": text, **parts}), sample.row)
        try:
            self.attach_twin(rollout, prompt, args.max_reprompt_len)
        except TeacherPromptTooLong as error:  # its length is that of a completion: no reason to end a run
            if not self._has_said_too_long:
                logger.warning(f"{error} Such completions have no part in the distillation.")
            self._has_said_too_long = True
            sample.twin, sample.scalars = itself, sample.scalars | {ACTIVE: 0.0, FEEDBACK: 0.0}

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """Without a policy term, samples whose teacher is shown nothing take part in nothing."""
        units = super().arranged(groups)
        if self.weight < 1:
            return units
        return [unit if unit is not None and unit[0].scalars[ACTIVE] else None for unit in units]

    # ---- the step ----------------------------------------------------------------------------------------------------

    def make_teacher(self, policy: Any) -> Teacher:
        if self.weight:
            return super().make_teacher(policy)
        return self.reference_setup().self_teacher(LIVE, policy)  # who is never asked

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        if self.weight:
            return super().score(model, batch, stats)
        return super(DistillingTrainer, self).score(model, batch, stats)

    def how_compared(self, batch: TokenBatch) -> dict[str, Any]:
        return super().how_compared(batch) | {"logps_in_loss": self.weight < 1}

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        """(1 - w) policy + w distillation; the latter is a mean over the samples whose teacher is shown something."""
        logps = policy.logps if self.weight < 1 else policy.logps.detach()
        old_logps = batch.per_token.get(OLD_LOGPS, logps.detach())
        advantages = batch.per_token.get(ADVANTAGES, torch.zeros_like(logps))  # a pass without tokens has none
        tokens = PolicyTokens(batch, logps, old_logps, advantages, self.age_weights(batch, old_logps))
        output = policy_loss(self.args.loss_type, tokens, self.args, None if reference is None else reference.logps)
        output.metrics[f"{MEASURED}policy_loss"] = output.metrics.pop("policy_loss")
        terms = [replace(term, weight=term.weight * (1 - self.weight)) for term in output.terms if self.weight < 1]
        if self.weight:
            values = self.distillation(batch, policy)
            active = batch.scalars.get(ACTIVE, torch.zeros_like(values)).to(values.dtype)
            terms.append(LossTerm(values * active, f"sequence:{ACTIVE}", self.weight, entries="sequence"))
            shown_ones = values.masked_fill(active == 0, torch.nan)[: batch.num_samples]
            output.metrics |= self.distillation_metrics(shown_ones)
        return LossOutput(terms, metrics=output.metrics)

    # ---- what is said of the run -------------------------------------------------------------------------------------

    def _measure(self, collected: Collected, mode: str) -> None:
        totals, args = collected.totals, self.args
        known = ~totals.isnan()
        groups = [totals[known & (collected.table.groups == number)] for number in collected.table.groups.unique()]
        groups = [group for group in groups if len(group)]
        if groups:
            rewards = totals[known]
            deviations = torch.tensor([deviation(group) for group in groups]).nan_to_num(0.0)  # of a lone one
            flat = (deviations <= args.diagnostics_flat_tolerance).double().mean().item()
            found = {
                "success_group_fraction": sum((group >= args.success_reward_threshold).any().item() for group in groups)
                / len(groups),
                "success_sample_fraction": (rewards >= args.success_reward_threshold).double().mean().item(),
                "reward_mean": rewards.mean().item(),
                "reward_std": deviation(rewards),
                "reward_min": rewards.min().item(),
                "reward_max": rewards.max().item(),
                "group_reward_std_mean": deviations.mean().item(),
                "flat_group_fraction": flat,
            }
            of_rewards = collected.table.rewards[known].nanmean(0).tolist()
            found |= {f"rewards/{name}": value for name, value in zip(self.rewards.names, of_rewards)}
            collected.numbers |= {f"{MEASURED}{name}": value for name, value in found.items()}
            if mode == "train":
                self._flat = self._flat + 1 if flat == 1 else 0
        if self.weight:
            self._measure_prompts(collected, mode)
        if mode == "train":
            self._warn()
        super()._measure(collected, mode)

    def _measure_prompts(self, collected: Collected, mode: str) -> None:
        """What the teacher was shown, of this process: a log puts the processes together."""
        mine = [one for one in collected.rollouts if not one.masked]
        found = {
            "feedback_available_fraction": [bool(text_of(one.columns.get(PRIVILEGED))) for one in mine],
            "feedback_used_fraction": [one.sample.scalars[FEEDBACK] for one in mine],
            "reprompt_sample_fraction": [one.sample.scalars[ACTIVE] for one in mine],
        }
        self.metrics.add(mode, as_tensors({f"{MEASURED}{name}": values for name, values in found.items()}))
        if mode == "train":
            self._inactive = 0 if any(found["reprompt_sample_fraction"]) else self._inactive + 1

    def _warn(self) -> None:
        interval = self.args.diagnostics_warning_interval
        if not interval or not self.is_world_process_zero():
            return
        if self._flat and self._flat % interval == 0 and self.weight < 1:
            logger.warning(
                f"For {self._flat} generations in a row the rewards of every group were all alike: the policy term teaches nothing."
            )
        if self._inactive and self._inactive % interval == 0 and self.weight:
            logger.warning(
                f"For {self._inactive} generations in a row no completion reached `success_reward_threshold`="
                f"{self.args.success_reward_threshold:g} and there was no feedback to show: the distillation term teaches nothing."
            )

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        weight = args.distillation_weight
        advantage = advantage_formula(args.scale_rewards, args.advantage_std)
        policy = policy_formula(args.loss_type, args, totals, advantage)
        if args.beta:
            line = f"{number(args.beta)} * rho * (p_ref / p - log(p_ref / p) - 1)"
            policy = replace(
                policy, terms=(*policy.terms, line), names=(*policy.names, ("p_ref", "probability under the reference"))
            )
        if not weight:
            return policy
        own = super().formula(args, totals)
        divided = (
            "distillation: mean over the tokens of a completion, sum over completions / completions of the step whose teacher is "
            "shown a success or feedback",
        )
        terms = tuple(f"{number(weight)} * ({term})" if weight < 1 else term for term in own.terms)
        if weight == 1:
            return replace(own, divided_by=divided)
        terms += tuple(f"{number(1 - weight)} * ({term})" for term in policy.terms)
        return Formula(terms, (*divided, *(f"policy: {one}" for one in policy.divided_by)), own.names + policy.names)
