"""Cases of GRPO and RLOO. Both libraries are given the same completions (completions.py) and judge them by the same functions.

A step has eight samples, two prompts with four completions each: `NAME@1x8` as one micro-batch, `NAME@2x4` as two. With
`num_iterations` above 1 the policy has moved when a batch is used again, so that ratios differ from 1 and some are clipped.

TRL shuffles the samples of a generation before it cuts them into micro-batches; here they stay in the order of their groups, so
that a group's prompt is computed once. TRL's shuffling is therefore turned off for all cases but the one that shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.completions import MAX_LENGTH

WHOLE, HALVES = "1x8", "2x4"
OURS = {"reward_workers": 0, "keep_rollouts": False, "rollout_engine": "transformers"}
SHARED = {"max_completion_length": MAX_LENGTH, "shuffle_dataset": False, "num_generations": 4}
AGAIN: dict[str, Any] = {"num_iterations": 3, "max_steps": 6, "optim": "sgd", "learning_rate": 0.05, "epsilon": 0.05}
"""SGD: AdamW makes a full-size step of a gradient that is 0 but for rounding, and a ratio, or RLOO's small difference of large
divergences, then shows that step rather than what is compared. Cases that are on policy have AdamW."""
AGAIN_UNCLIPPED = {name: value for name, value in AGAIN.items() if name != "epsilon"}
TWO_REWARDS = ("brevity", "vowels")
TWO_STEPS = {"generation_batch_size": 16, "max_steps": 8, "learning_rate": 4e-3}
TOKEN_MODE = {"vllm_importance_sampling_mode": "token_truncate"}  # vespo refuses the default, which is of sequences
EVERYTHING = ("loss", "grad_norm", "entropy", "clip_ratio/*", "weights:*")
POLICY_MEANS = dict.fromkeys(
    ("kl", "clip_ratio/*", "cispo_clip_ratio", "vespo/*", "sampling/*", "policy_loss"), "step-means"
)


def grpo(name: str, *rewards: str, **options: Any) -> Case:
    chosen = rewards or ("brevity",)
    return Case(
        f"grpo-{name}", "grpo", "prompt_only", {**SHARED, **options}, ours=OURS, rewards=chosen, splits=(WHOLE, HALVES)
    )


def rloo(name: str, *rewards: str, **options: Any) -> Case:
    """TRL's trainer takes no function that writes rollouts: its model's `generate` is scripted, as is our engine."""
    return replace(grpo(name, *rewards, **options), name=f"rloo-{name}", method="rloo", written_by="engine")


def whole(case: Case) -> Case:
    """In one micro-batch only: the numbers depend on how a step is cut up, here as in TRL, so that there is no witness."""
    return replace(case, splits=(WHOLE,))


def different(case: Case, key: str, *numbers: str) -> Case:
    return replace(case, differs=dict.fromkeys(numbers or EVERYTHING, key))


def refused(case: Case, key: str) -> Case:
    return replace(case, differs={"error": key}, splits=(HALVES,))


CLIPPED = ("grpo", "dr_grpo", "dapo")

GRPO_LOSS_CASES = [
    *(grpo(f"loss-{name}", loss_type=name, **AGAIN) for name in CLIPPED),
    whole(grpo("loss-bnpo", loss_type="bnpo", **AGAIN)),
    grpo("loss-cispo", loss_type="cispo", epsilon_high=1.05, **AGAIN_UNCLIPPED),
    grpo("loss-sapo", loss_type="sapo", **AGAIN_UNCLIPPED),
    grpo("loss-sapo-warm", loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0, **AGAIN_UNCLIPPED),
    grpo("loss-luspo", loss_type="luspo", importance_sampling_level="sequence", **AGAIN),
    grpo("loss-luspo-token", loss_type="luspo", importance_sampling_level="token", **AGAIN),
    grpo("loss-vespo", loss_type="vespo", **TOKEN_MODE, **AGAIN_UNCLIPPED),
    grpo(
        "loss-vespo-shape", loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=2.0, vespo_k_neg=1.5,
        vespo_lambda_neg=2.5, **TOKEN_MODE, **AGAIN_UNCLIPPED,
    ),
    *(
        grpo(f"sequence-{name}", loss_type=name, importance_sampling_level="sequence", **{**AGAIN, "epsilon": 0.02})
        for name in CLIPPED
    ),
    whole(grpo("sequence-bnpo", loss_type="bnpo", importance_sampling_level="sequence", **{**AGAIN, "epsilon": 0.02})),
    grpo("sequence-cispo", loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.02, **AGAIN_UNCLIPPED),
    grpo("sequence-sapo", loss_type="sapo", importance_sampling_level="sequence", **AGAIN_UNCLIPPED),
    replace(grpo("cispo-cap", loss_type="cispo", **AGAIN_UNCLIPPED), trl={"epsilon_high": 5.0}),
    replace(
        different(whole(grpo("cispo-default", loss_type="cispo", **AGAIN_UNCLIPPED)), "cispo-cap", *EVERYTHING, "cispo_clip_ratio"),
        witness="grpo-cispo-cap",
    ),
    replace(different(whole(grpo("luspo-default", loss_type="luspo", **AGAIN)), "luspo-level"), witness="grpo-loss-luspo"),
]  # fmt: skip

GRPO_CASES = [
    grpo("plain"),
    grpo("epsilon-high", epsilon_high=0.1, **AGAIN),
    grpo("delta", delta=1.1, **AGAIN),
    grpo("kl", beta=0.2, **AGAIN),
    grpo("kl-plain", beta=0.2, use_bias_correction_kl=False, **AGAIN),
    grpo("kl-sequence", beta=0.2, loss_type="grpo", importance_sampling_level="sequence", **AGAIN),
    grpo("kl-moving", beta=0.2, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, **AGAIN),
    *(grpo(f"scale-{scale}", *TWO_REWARDS, scale_rewards=scale) for scale in ("group", "batch", "none", True, False)),
    grpo("weights", *TWO_REWARDS, reward_weights=[0.5, 2.0]),
    grpo("normalise-then-sum", *TWO_REWARDS, multi_objective_aggregation="normalize_then_sum"),
    grpo(
        "normalise-then-sum-weights", *TWO_REWARDS, "near_answer", multi_objective_aggregation="normalize_then_sum",
        reward_weights=[0.5, 2.0, 1.0],
    ),
    grpo("some-opinions", "brevity", "of_the_short", "near_answer"),
    grpo("some-opinions-normalised", "brevity", "of_the_short", multi_objective_aggregation="normalize_then_sum"),
    *(
        different(grpo(f"no-opinion-{scale}", "of_the_short", scale_rewards=scale), "unscored-groups", "frac_reward_zero_std")
        for scale in ("group", "batch", "none")
    ),
    different(
        grpo("no-opinion-normalised", "of_the_short", multi_objective_aggregation="normalize_then_sum"),
        "unscored-groups", "frac_reward_zero_std",
    ),
    different(whole(grpo("mean-reward", "tied_brevity", **AGAIN)), "exact-zeros", "clip_ratio/*"),
    *(grpo(f"mask-truncated-{loss}", loss_type=loss, mask_truncated_completions=True, **AGAIN) for loss in CLIPPED),
    whole(grpo("mask-truncated-bnpo", loss_type="bnpo", mask_truncated_completions=True, **AGAIN)),
    whole(grpo("top-entropy", top_entropy_quantile=0.4, **AGAIN)),  # the threshold is of a micro-batch
    whole(grpo("entropy-bonus-again", entropy_coef=0.1, **AGAIN)),
    *(
        replace(
            grpo(f"entropy-bonus-{loss}", entropy_coef=0.1, loss_type=loss),
            differs_when_split=dict.fromkeys(("loss", "grad_norm", "weights:*"), "entropy-of-the-step"),
        )
        for loss in ("grpo", "dapo")
    ),
    different(
        whole(grpo(
            "entropy-adaptive", entropy_coef=0.1, use_adaptive_entropy=True, entropy_target=0.65, entropy_coef_delta=0.02, **AGAIN
        )),
        "entropy-coef-in-force", "entropy_coef",
    ),
    grpo("off-policy-mask", off_policy_mask_threshold=7.5, **AGAIN),
    grpo("temperature", temperature=0.7, beta=0.1, **AGAIN),
    grpo("generation-batch-size", loss_type="grpo", **TWO_STEPS),
    whole(grpo("steps-per-generation", loss_type="dr_grpo", steps_per_generation=2, max_steps=8, learning_rate=4e-3)),
    different(whole(grpo("tokens-of-the-step", **TWO_STEPS)), "tokens-of-the-step"),
    replace(grpo("shuffled-step"), is_shuffled=True),
    different(replace(whole(grpo("shuffled-steps", loss_type="grpo", **TWO_STEPS)), is_shuffled=True), "rollout-order"),
    grpo("shuffled-prompts", shuffle_dataset=True),
    grpo("two-epochs", max_steps=14),
    replace(grpo("lora", beta=0.1, **AGAIN), adapter="new"),
    replace(grpo("lora-loaded", **AGAIN), adapter="loaded"),
    replace(grpo("llama", **AGAIN), model="llama"),
    replace(grpo("mixture-of-experts", **AGAIN), model="moe"),
    replace(grpo("engine", *TWO_REWARDS), written_by="engine"),
    different(
        replace(grpo("evaluation", *TWO_REWARDS, per_device_eval_batch_size=24), evaluation=True),
        "eval-num-tokens", "eval_num_tokens",
    ),
    refused(grpo("refused-unread", loss_type="sapo", delta=2.0), "unread-options"),
    refused(grpo("refused-cap", loss_type="cispo", epsilon_high=0.2), "option-ranges"),
    refused(grpo("refused-share", top_entropy_quantile=1.5), "option-ranges"),
]  # fmt: skip

AMPLIFIED = 3.0
"""RLOO's logged loss is a mean of ratio times advantage, terms of about 1 that cancel but for 0.02. Divergences and ratios come
from sums of log-probs of about 60, which float32 rounds by 4e-6, and the loss was 3e-6 apart; in float64 it was 5e-7."""
MASKED = {"mask_truncated_completions": True}

RLOO_CASES = [
    rloo("plain"),
    rloo("two-completions", "tied_brevity", num_generations=2),
    rloo("again", **AGAIN),
    rloo("epsilon-high", epsilon_high=0.1, **AGAIN),
    replace(rloo("beta", beta=0.5, **AGAIN), rounding=AMPLIFIED),
    rloo("no-reference", beta=0.0, **AGAIN),
    rloo("normalised", normalize_advantages=True, **AGAIN),
    rloo("clipped-rewards", reward_clip_range=(-0.3, 0.4), **AGAIN),
    rloo("weights", *TWO_REWARDS, reward_weights=[0.5, 2.0]),
    rloo("some-opinions", "brevity", "of_the_short"),
    different(rloo("no-opinion", "of_the_short", beta=0.1), "unscored-groups", "frac_reward_zero_std"),
    different(
        rloo("no-opinion-normalised", "of_the_short", normalize_advantages=True), "unscored-groups", "frac_reward_zero_std"
    ),
    different(rloo("mask-truncated", beta=0.0, **MASKED, **AGAIN), "truncated-loss", "loss"),
    different(whole(rloo("mask-truncated-kl", beta=0.5, **MASKED, **AGAIN)), "truncated-kl", *EVERYTHING, "kl"),
    replace(
        rloo(
            "moving-reference", beta=0.3, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6, **AGAIN
        ),
        rounding=AMPLIFIED,
    ),
    replace(rloo("lora", **AGAIN), adapter="new"),
]  # fmt: skip

POLICY_CASES = [
    case if "error" in case.differs else replace(case, differs_when_split={**POLICY_MEANS, **case.differs_when_split})
    for case in (*GRPO_LOSS_CASES, *GRPO_CASES, *RLOO_CASES)
]
