"""Options of group relative policy optimisation, which other methods with groups take over."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.losses.advantages import EPSILON, REWARD_SCALES
from posttrain.losses.importance import AGE_CAP, AGE_MODE, check_correction
from posttrain.losses.policy import POLICY_LOSSES, TRUST_DIVERGENCES, check_policy_loss
from posttrain.rollout.engines.protocol import FP8
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.online import AgentConfig, GroupConfig

AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
LOSS_OPTIONS = tuple(
    sorted(
        set().union(*(loss.options for loss in POLICY_LOSSES.values())) - {"beta", "kl_clip", "max_completion_length"}
    )
)
"""Options that only some losses read; setting one that the chosen loss does not read is an error."""


@dataclass
class PolicyGroupConfig(AgentConfig, GroupConfig):
    """Options of group relative policy optimisation."""

    loss_type: str = option("dapo", f"Which objective: {', '.join(name for name in POLICY_LOSSES if name != 'rloo')}.")
    beta: float = option(
        0.0, "Weight of the divergence from the reference. 0: there is none, and no reference is loaded."
    )
    use_bias_correction_kl: bool = option(
        True, "Multiply the divergence by the ratio: unbiased after the policy has moved."
    )
    epsilon: float | None = option(
        None,
        "The ratio is clipped at 1 - epsilon; dppo: the divergence where masking begins. None: 0.2 (gmpo, in log space: 0.4; "
        "dppo: 0.15, of a KL 0.05).",
    )
    epsilon_high: float | None = option(
        None, "And at 1 + epsilon_high; cispo: the largest ratio itself. None: epsilon (cispo: 5)."
    )
    delta: float | None = option(
        None, "Also cap the unclipped ratio, for completions with a negative advantage. None: no cap."
    )
    importance_sampling_level: str | None = option(
        None, "Ratio of each 'token', of the 'sequence' (GSPO) or 'sequence_token' (GSPO-token). None: the loss's own."
    )
    sapo_temperature_neg: float = option(1.05, "sapo: temperature of the gate where the advantage is not positive.")
    sapo_temperature_pos: float = option(1.0, "sapo: temperature of the gate where the advantage is positive.")
    vespo_k_pos: float = option(2.0, "vespo: exponent where the advantage is not negative.")
    vespo_lambda_pos: float = option(3.0, "vespo: decay where the advantage is not negative.")
    vespo_k_neg: float = option(3.0, "vespo: exponent where the advantage is negative.")
    vespo_lambda_neg: float = option(2.0, "vespo: decay where the advantage is negative.")
    divergence_type: str = option(
        "binary_tv", f"dppo: how far the policy is from the sampler, {', '.join(TRUST_DIVERGENCES)}."
    )
    divergence_topk: int = option(20, "dppo: tokens that topk_tv and topk_kl look at, the sampler's likeliest.")
    clip_ratio_c: float = option(20.0, "dppo: largest weight of a token, its ratio to the sampler.")

    # ---- advantages
    scale_rewards: str | bool = option(
        "group", "Divide advantages by the standard deviation of the 'group', of the 'batch', or by 'none' of them."
    )
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (GDPO)."
    )

    # ---- which completions and tokens
    num_remains_in_group: int | None = option(
        None, "GFPO: completions of each group that are trained on, by the scores of `group_filter_func`. None: all."
    )
    top_entropy_quantile: float = option(
        1.0, "Train only on this share of the tokens, those of highest entropy. 1: on all."
    )
    off_policy_mask_threshold: float | None = option(
        None, "Leave out bad completions that the policy has drifted away from by more than this. None: none."
    )

    # ---- entropy bonus
    entropy_coef: float = option(0.0, "Weight of the entropy bonus; where it adapts, its first value.")
    use_adaptive_entropy: bool = option(False, "Move `entropy_coef` so that the entropy stays near `entropy_target`.")
    entropy_coef_min: float = option(0.0, "Lowest value of a coefficient that adapts.")
    entropy_coef_max: float = option(1.0, "Highest value of a coefficient that adapts.")
    entropy_coef_delta: float = option(0.005, "By how much it moves after a step.")
    entropy_target: float = option(0.2, "Mean entropy of a token, in nats, to be kept.")

    # ---- sampler against trainer
    vllm_importance_sampling_correction: bool | None = option(
        None,
        "Weigh tokens by the ratio of trainer to sampler. None: where they are different programs, and for our own engine where it "
        "rounds (`rollout_kv_dtype`, `rollout_weight_dtype`).",
    )
    vllm_importance_sampling_mode: str = option(
        "sequence_mask",
        "token_truncate, token_mask, sequence_truncate or sequence_mask. Where the engine rounds to 8 bits, and where tokens are "
        "older than a step, token_truncate with a largest ratio of 2, unless you say otherwise.",
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Largest ratio. None: any.")
    vllm_importance_sampling_clip_min: float | None = option(None, "Smallest ratio. None: any.")
    vllm_importance_sampling_cap: float | None = option(None, "Old name of `vllm_importance_sampling_clip_max`.")

    clips_ratios = True
    advantage_epsilon = EPSILON  # added to a standard deviation before advantages are divided by it

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.vllm_importance_sampling_cap is not None:
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        super().__post_init__()
        chosen = {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"}
        # Many tokens that are each a little apart: the ratio of a long completion would be far beyond any bound.
        is_gradual = self.trains_on_older_tokens or FP8 in (self.rollout_kv_dtype, self.rollout_weight_dtype)
        if is_gradual and not chosen & self.set_by_user():
            self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_max = AGE_MODE, AGE_CAP
        check_choice("scale_rewards", self.scale_rewards, tuple(REWARD_SCALES))
        check_choice("multi_objective_aggregation", self.multi_objective_aggregation, AGGREGATIONS)
        check_range("top_entropy_quantile", self.top_entropy_quantile, 0, 1, open_low=True)
        check_correction(
            self.vllm_importance_sampling_mode,
            self.vllm_importance_sampling_clip_min,
            self.vllm_importance_sampling_clip_max,
        )
        if self.loss_type == "rloo":
            raise ValueError("`loss_type='rloo'` belongs to RLOOTrainer, which also has its advantages.")
        check_policy_loss(self.loss_type, self)
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        ignored = sorted((set(LOSS_OPTIONS) & self.set_by_user()) - POLICY_LOSSES[self.loss_type].options)
        if ignored:
            raise ValueError(f"`{ignored[0]}` is set, but the loss {self.loss_type!r} does not read it. Leave it out.")
        if self.num_remains_in_group is not None and not 2 <= self.num_remains_in_group < self.num_generations:
            raise ValueError(
                f"`num_remains_in_group` is {self.num_remains_in_group}; of `num_generations`={self.num_generations} completions "
                "at least 2 and not all must remain."
            )
        check_range("divergence_topk", self.divergence_topk, 1)
        if "divergence_topk" in self.set_by_user() and not self.compares_likeliest:
            raise ValueError(
                "`divergence_topk` is set, but only `divergence_type` topk_tv and topk_kl of dppo read it."
            )
        corrections = sorted(name for name in self.set_by_user() if name.startswith("vllm_importance_sampling"))
        if self.loss_type == "dppo" and corrections and self.vllm_importance_sampling_correction is not False:
            raise ValueError(
                f"dppo weighs tokens by their ratio to the sampler, as `clip_ratio_c` says: leave `{corrections[0]}` out."
            )
        if self.centres_on_sampler and self.loss_type == "dppo":
            raise ValueError("dppo measures from the sampler whatever `proximal_policy` is: leave it out.")
        if self.centres_on_sampler and corrections and self.vllm_importance_sampling_correction is not False:
            raise ValueError(
                f"`proximal_policy` is 'sampler': the ratio itself is to the sampler, and `{corrections[0]}` would correct for it "
                "twice. Leave it out, or take `proximal_policy='step_start'`."
            )
        is_scaled = self.scale_rewards != "none" or self.multi_objective_aggregation == "normalize_then_sum"
        if not is_scaled and "advantage_std" in self.set_by_user():
            raise ValueError("`advantage_std` is set, but with `scale_rewards='none'` no advantage is scaled.")
        if self.loss_type == "vespo" and self.vllm_importance_sampling_mode.startswith("sequence"):
            if "vllm_importance_sampling_mode" in self.set_by_user():
                raise ValueError("vespo has the ratio of whole completions already: use token_truncate or token_mask.")
            self.vllm_importance_sampling_mode = "token_truncate"

    @property
    def compares_likeliest(self) -> bool:
        """Whether the loss looks at the sampler's likeliest tokens."""
        return self.loss_type == "dppo" and self.divergence_type.startswith("topk")
