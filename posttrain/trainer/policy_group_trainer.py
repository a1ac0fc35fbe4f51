"""PolicyGroupTrainer: the machinery of GRPO and of methods that add something to its advantages or its loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import Passes, TokenBatch, passes_of
from posttrain.core.results import LossOutput, Metrics, TokenScores
from posttrain.losses.advantages import group_normalised, normalised_then_summed
from posttrain.losses.entropy import EntropyController, entropy_bonus, entropy_threshold, top_entropy_mask
from posttrain.losses.formulas import Formula, Totals, advantage_formula, number, policy_formula
from posttrain.losses.importance import off_policy_mask, sampler_correction, sampling_metrics
from posttrain.losses.policy import PolicyTokens, policy_loss
from posttrain.models.inference import evaluating
from posttrain.models.scoring.token_scores import Measure, Question, likeliest_tokens, logps_of_tokens, score_tokens
from posttrain.rollout.collector import Collected, GroupTable
from posttrain.rollout.engines.protocol import draws_apart
from posttrain.rollout.group_filter import GroupFilter, GroupScores
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, POLICY_LOGPS, SAMPLING_LOGPS, Rollout
from posttrain.trainer.online.agents import make_agents
from posttrain.trainer.online.rollout_metrics import deviation
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.policy_group import PolicyGroupConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import gathered_values

LIKELIEST = "sampler_likeliest"
"""What a Sample knows of the distribution that each of its tokens was drawn from: see `likeliest_tokens`."""


class PolicyGroupTrainer(OnlineTrainer):
    """Group relative policy optimisation: the completions of a prompt are compared, and the policy moves within bounds."""

    paper = Paper(
        "shao2024deepseekmath", "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and others",
        2024, "2402.03300",
    )  # fmt: skip
    config_class = PolicyGroupConfig
    runs_under_deepspeed = True

    entropy: EntropyController | None = None

    def __init__(
        self,
        *given: Any,
        tools: Any = None,
        environment_factory: Any = None,
        group_filter_func: GroupScores | None = None,
        **named: Any,
    ) -> None:
        """`tools` are functions that the model may call; `environment_factory` makes objects whose methods it may call.

        `group_filter_func(group_completions, group_rewards)` scores completions; see `num_remains_in_group`.
        """
        self.agents = make_agents(tools, environment_factory, named.get("rollout_func"))
        super().__init__(*given, **named)
        args = self.args
        if (group_filter_func is None) != (args.num_remains_in_group is None):
            raise ValueError("`group_filter_func` and `num_remains_in_group` need each other: give both, or neither.")
        if group_filter_func is not None:
            self.group_filter = GroupFilter(group_filter_func, args.num_remains_in_group)
        if args.use_adaptive_entropy:
            bounds = (args.entropy_coef_min, args.entropy_coef_max)
            self.entropy = EntropyController(args.entropy_coef, args.entropy_target, args.entropy_coef_delta, *bounds)
        self._step_entropy: list[Tensor] = []
        if args.compares_likeliest and (draws_apart(self.engine) or self.rollout_func is not None):
            raise ValueError(
                f"`divergence_type` is {args.divergence_type!r}, which compares the sampler's likeliest tokens: only our own "
                "engines, which draw from this model's weights, make them known, and not when they round to 8 bits. Use binary_tv "
                "or binary_kl."
            )

    # ---- advantages --------------------------------------------------------------------------------------------------

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            weights = torch.tensor(self.rewards.weights, dtype=torch.float64)
            return normalised_then_summed(table.rewards, table.groups, weights, table.masked, *self._scaling)
        return group_normalised(totals, table.groups, self.args.scale_rewards, *self._scaling)

    @property
    def _scaling(self) -> tuple[float, int]:
        return self.args.advantage_epsilon, self.args.ddof

    @property
    def corrects_sampler(self) -> bool:
        args = self.args
        if args.centres_on_sampler:
            return False
        if args.vllm_importance_sampling_correction is not None:
            return args.vllm_importance_sampling_correction
        return draws_apart(self.engine) or args.trains_on_older_tokens

    @property
    def needs_old_logps(self) -> bool:
        """Of a window of one step, the weights that it begins with are those that score it: no pass of its own is needed."""
        return super().needs_old_logps or (self.corrects_sampler and not self.args.async_rollouts)

    # ---- the sampler's likeliest tokens ------------------------------------------------------------------------------

    def annotated(self, rollouts: list[Rollout]) -> None:
        """Our engines draw from the weights that are here now: these say what the likeliest tokens were."""
        if self.args.compares_likeliest:
            self.write_columns(rollouts, lambda batch: {LIKELIEST: self._likeliest(batch)})

    def _likeliest(self, batch: TokenBatch) -> Tensor:
        # Aligned with anything, it is computed where several numbers of a token may be.
        measures = {LIKELIEST: Measure(partial(likeliest_tokens, count=self.args.divergence_topk), (batch.targets,))}
        how = {"temperature": self.args.temperature, "chunk_tokens": self.args.chunk_tokens}
        with evaluating(self.model):
            return score_tokens(self.model_wrapped, batch, measures=measures, **how).stats[LIKELIEST]

    # ---- the loss ----------------------------------------------------------------------------------------------------

    @property
    def entropy_coefficient(self) -> float:
        return self.args.entropy_coef if self.entropy is None else self.entropy.in_force

    @property
    def entropy_has_gradient(self) -> bool:
        return self.entropy_coefficient != 0

    def differentiable_stats(self) -> tuple[str, ...]:
        return ("entropy",) if self.args.entropy_coef or self.args.use_adaptive_entropy else ()

    def also_asked(self, batch: TokenBatch) -> tuple[Question, ...]:
        """What a method wants to know besides, of the same pass."""
        return ()

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        args = self.args
        wants_gradient = self.entropy_has_gradient and torch.is_grad_enabled()
        wants_value = args.top_entropy_quantile < 1 or self.entropy is not None
        if wants_value or wants_gradient:
            stats = tuple(dict.fromkeys((*stats, "entropy")))
        return score_tokens(
            model,
            batch,
            tuple(name for name in stats if not (wants_gradient and name == "entropy")),
            temperature=args.temperature,
            differentiable_stats=self.differentiable_stats() if wants_gradient else (),
            measures={LIKELIEST: Measure(logps_of_tokens, (self._sampler(batch)[0],))}
            if args.compares_likeliest
            else None,
            also=self.also_asked(batch),
            **self.scoring_options(),
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        logps = policy.logps
        old_logps = self.proximal_logps(batch, logps)
        advantages = batch.per_token.get(ADVANTAGES, torch.zeros_like(logps))  # a pass without tokens has none
        # Truncated sampling is not age: an unchanged policy has a ratio of 1 to its own untruncated log-probs.
        drawn = POLICY_LOGPS if self.args.trains_on_older_tokens else SAMPLING_LOGPS
        sampling_logps = batch.per_token.get(drawn, logps.detach())
        own_logps = batch.per_token.get(OLD_LOGPS, logps.detach())
        correction, mismatch = self._correction(batch, own_logps, sampling_logps)
        drawn_logps = sampling_logps.where(~sampling_logps.isnan(), old_logps)  # where it is unknown, the trainer's own
        keep = self._kept_tokens(batch, policy, drawn_logps, advantages)
        likeliest = (self._sampler(batch)[1], policy.stats[LIKELIEST]) if self.args.compares_likeliest else None
        tokens = PolicyTokens(batch, logps, old_logps, advantages, correction, keep, sampling_logps, likeliest)
        output = policy_loss(self.args.loss_type, tokens, self.args, None if reference is None else reference.logps)
        output.metrics |= mismatch
        if self.entropy_coefficient and "entropy" in policy.stats:
            output.terms.append(entropy_bonus(policy.stats["entropy"], self.entropy_coefficient))
        if self.args.entropy_coef or self.entropy is not None:
            output.metrics["entropy_coef"] = logps.new_full((1,), self.entropy_coefficient)
        if self.entropy is not None and torch.is_grad_enabled():
            self._step_entropy.append(policy.stats["entropy"].detach())
        return output

    def _sampler(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """(N, k) ids of the sampler's likeliest tokens, and their log-probs; a pass without tokens has none."""
        nothing = torch.zeros(batch.num_trained, 2 * self.args.divergence_topk, device=batch.device)
        ids, logps = batch.per_token.get(LIKELIEST, nothing).chunk(2, -1)
        return ids.long(), logps

    def _correction(
        self, batch: TokenBatch, old_logps: Tensor, sampling_logps: Tensor
    ) -> tuple[Tensor | None, Metrics]:
        """(weights of the tokens, how far sampler and trainer are apart); no weights where nothing is corrected."""
        args = self.args
        if not self.corrects_sampler:
            return None, sampling_metrics(old_logps, sampling_logps, batch, "token_mask")
        rule = (
            args.vllm_importance_sampling_mode,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
        )
        weights = sampler_correction(old_logps, sampling_logps, batch, *rule)
        return weights, sampling_metrics(old_logps, sampling_logps, batch, *rule)

    def _kept_tokens(
        self, batch: TokenBatch, policy: TokenScores, drawn_logps: Tensor, advantages: Tensor
    ) -> Tensor | None:
        args = self.args
        keep = None
        if args.top_entropy_quantile < 1:
            entropies = policy.stats["entropy"].detach()
            threshold = self._entropy_threshold
            keep = top_entropy_mask(entropies, self._threshold_of(entropies) if threshold is None else threshold)
        if args.off_policy_mask_threshold is not None:
            trusted = off_policy_mask(batch, policy.logps, drawn_logps, advantages, args.off_policy_mask_threshold)
            keep = trusted if keep is None else keep & trusted
        return keep

    def _measure(self, collected: Collected, mode: str) -> None:
        if self.args.loss_type == "dppo":
            known = collected.advantages[~collected.table.masked]
            collected.numbers |= {"advantages/mean": known.mean().item(), "advantages/std": deviation(known)}
        super()._measure(collected, mode)

    # ---- the entropy that a token needs ------------------------------------------------------------------------------

    _entropy_threshold: Tensor | None = None  # of the micro-batch in work, where its passes cannot see it

    def training_step(self, model: nn.Module, inputs: TokenBatch | Passes, num_items_in_batch: Any = None) -> Tensor:
        """Where a micro-batch may be run in several passes, their common threshold needs the entropies of all of them first.

        Not in the passes themselves: they would have one each, and processes with different numbers of passes would wait for
        each other indefinitely.
        """
        if self.args.top_entropy_quantile < 1 and self.args.max_tokens_per_pass is not None:
            self._entropy_threshold = self._threshold_of(self._entropies(model, passes_of(inputs)))
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._entropy_threshold = None

    @torch.no_grad()
    def _entropies(self, model: nn.Module, passes: list[TokenBatch]) -> Tensor:
        found = [self.score(model, part.to(self.args.device), ("entropy",)).stats["entropy"] for part in passes]
        return torch.cat(found)

    def _threshold_of(self, entropies: Tensor) -> Tensor:
        """Over the micro-batches of all processes."""
        every = gathered_values(entropies, self.args)
        return entropy_threshold(every, self.args.top_entropy_quantile)

    # ---- the entropy's controller ------------------------------------------------------------------------------------

    def before_step(self, batches: list[TokenBatch]) -> None:
        """Tell the controller how undecided the policy was in the step before."""
        if self.entropy is not None and self._step_entropy:
            entropies = gathered_values(torch.cat(self._step_entropy), self.args)
            self._step_entropy = []
            if len(entropies):
                self.entropy.observe(entropies.mean().item())

    def method_state(self) -> dict[str, Any]:
        return {} if self.entropy is None else {"entropy": self.entropy.state()}

    def load_method_state(self, state: dict[str, Any]) -> None:
        if self.entropy is not None:
            self.entropy.load(state["entropy"])

    def rollout_state(self) -> dict[str, Any]:
        if self.entropy is None:
            return super().rollout_state()
        entropies = torch.cat(self._step_entropy) if self._step_entropy else torch.zeros(0)
        return super().rollout_state() | {"step_entropy": entropies.cpu()}

    def load_rollout_state(self, state: dict[str, Any]) -> None:
        super().load_rollout_state(state)
        if self.entropy is not None:
            # Also where it is empty: all processes ask each other, or none does.
            self._step_entropy = [state["step_entropy"].to(self.args.device)]

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        credit = (
            args.scale_rewards if args.multi_objective_aggregation == "sum_then_normalize" else "normalize_then_sum"
        )
        advantage = advantage_formula(credit, args.advantage_std, args.advantage_epsilon)
        made = policy_formula(args.loss_type, args, totals, advantage)
        terms, names, divided = list(made.terms), list(made.names), list(made.divided_by)
        if args.beta:
            factor = "rho * " if args.use_bias_correction_kl else ""
            divergence = f"{factor}(p_ref / p - log(p_ref / p) - 1)"
            bounded = divergence if args.kl_clip is None else f"min({divergence}, {number(args.kl_clip)})"
            terms.append(f"{number(args.beta)} * {bounded}")
            names.append(("p_ref", "probability under the reference"))
        if args.num_remains_in_group is not None:
            kept = f"the {args.num_remains_in_group} of {args.num_generations} completions of a prompt that are scored highest"
            names.append(("group", kept))
        if args.loss_type == "dppo":
            names.append(("mu", "probability with which the sampler drew the token"))
        if args.entropy_coef or args.use_adaptive_entropy:
            moving = ", which adapts" if args.use_adaptive_entropy else ""
            terms.append(f"-{number(args.entropy_coef)} * entropy")
            divided.append(f"the entropy: mean over the tokens of the step{moving}")
        if args.top_entropy_quantile < 1:
            names.append(("tokens", f"the policy term has the {args.top_entropy_quantile:.0%} of highest entropy only"))
        if args.off_policy_mask_threshold is not None:
            names.append(
                ("mask", f"completions with A < 0 that drifted by more than {args.off_policy_mask_threshold} are out")
            )
        return Formula(tuple(terms), tuple(divided), tuple(names))
