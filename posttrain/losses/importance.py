"""The sampler is not the trainer: weights and masks for tokens that were drawn from a slightly different policy.

The engine that writes completions runs other kernels, perhaps other precision, truncated sampling or older weights. Its
log-prob of a token is s_t, the trainer's log-prob before the update is o_t, that of the policy being trained l_t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.results import Metrics
from posttrain.losses.extrema import highest, lowest
from posttrain.losses.kl import bounded_exp, k3

AGE_MODE, AGE_CAP = "token_truncate", 2.0
"""How tokens of older weights are weighed, unless options say otherwise."""


@dataclass(frozen=True)
class CorrectionMode:
    """One of the ways to weigh tokens by the ratio of trainer to sampler."""

    per_sequence: bool  # the ratio of a whole completion, exp(sum_t (o_t - s_t)), or of each token
    bounded: Callable[[Tensor, float, float], Tensor]  # (ratios, lowest, highest) -> weights


def truncated(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios outside of the bounds become the bound: little variance, some bias."""
    return ratios.clamp(lowest, highest)


def masked(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """Ratios outside of the bounds become 0: what is too far off is not learnt from at all."""
    return ratios.where((ratios >= lowest) & (ratios <= highest), 0)


def sampler_correction(
    old_logps: Tensor,
    sampling_logps: Tensor,
    batch: TokenBatch,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Tensor:
    """(N,) weights of the policy term, without gradient.

    w = exp(o_t - s_t) for each token, or exp(sum_t (o_t - s_t)) for all tokens of a completion, truncated to
    [clip_min, clip_max] or masked outside of it. A sampling log-prob of NaN is unknown and counts as a ratio of 1.
    """
    check_correction(mode, clip_min, clip_max)
    weights = _bounded(_ratios(old_logps, sampling_logps, batch, mode), mode, clip_min, clip_max)
    return batch.expand(weights) if CORRECTION_MODES[mode].per_sequence else weights


def age_correction(old_logps: Tensor, drawn_logps: Tensor, batch: TokenBatch) -> Tensor:
    """(N,) weights min(exp(o_t - s_t), 2) of tokens that older weights wrote (decoupled objective, arXiv:2110.00641).

    Of tokens and truncated: the ratio of a completion is a product, and a bound on it would leave out whatever is long.
    """
    return sampler_correction(old_logps, drawn_logps, batch, AGE_MODE, None, AGE_CAP)


def sampling_metrics(
    old_logps: Tensor,
    sampling_logps: Tensor,
    batch: TokenBatch,
    mode: str,
    clip_min: float | None = None,
    clip_max: float | None = None,
) -> Metrics:
    """How far sampler and trainer are apart. Ratios are of tokens or of completions, as the mode has it.

    The effective sample size is one number, of this batch. `sampling/kl` estimates
    KL(sampler || trainer) by k3. The effective sample size (sum w)^2 / (n sum w^2) of the unbounded ratios is the
    share of the batch that is left after weighting; 1 where the two agree. This and the masked share are reported for the longest
    quarter of the completions as well, where a rule that is too strict shows first: the ratio of a completion is a product.
    """
    log_ratios = _known_difference(old_logps, sampling_logps)
    ratios = _ratios(old_logps, sampling_logps, batch, mode)
    ratios = ratios[: batch.num_samples] if CORRECTION_MODES[mode].per_sequence else ratios
    weights = _bounded(ratios, mode, clip_min, clip_max)
    is_long = batch.counts >= batch.counts.topk(-(-len(batch.counts) // 4)).values[-1]
    is_long = is_long[: batch.num_samples] if CORRECTION_MODES[mode].per_sequence else batch.expand(is_long)
    masked_share = (weights == 0).to(weights.dtype)
    return {
        "sampling/sampling_logp_difference/mean": log_ratios.abs(),
        "sampling/sampling_logp_difference/max": highest(log_ratios.abs()),
        "sampling/kl": k3(sampling_logps.where(~sampling_logps.isnan(), old_logps.detach()), old_logps.detach()),
        "sampling/importance_sampling_ratio/min": lowest(weights),
        "sampling/importance_sampling_ratio/mean": weights,
        "sampling/importance_sampling_ratio/max": highest(weights),
        "sampling/masked_share": masked_share,
        "sampling/masked_share/longest_quarter": masked_share.masked_fill(~is_long, float("nan")),
        "sampling/effective_sample_size": effective_sample_size(ratios),
        "sampling/effective_sample_size/longest_quarter": effective_sample_size(ratios, is_long),
    }


def effective_sample_size(ratios: Tensor, counted: Tensor | None = None) -> Tensor:
    """(1,) (sum w)^2 / (n sum w^2) of the n ratios that are `counted` (all), between 1 / n and 1; empty for no ratios."""
    if len(ratios) == 0:
        return ratios
    smallest = torch.finfo(ratios.dtype).tiny
    number = len(ratios) if counted is None else counted.sum()
    ratios = ratios if counted is None else ratios * counted
    scaled = ratios / ratios.max().clamp(min=smallest)  # squares must not overflow
    share = scaled.sum() ** 2 / (number * (scaled**2).sum().clamp(min=smallest))
    return share.reshape(1)


def capped_ratios(logps: Tensor, old_logps: Tensor, cap: float) -> Tensor:
    """(N,) weights without gradient, `min(p / p_old, cap)`."""
    return bounded_exp(logps.detach() - old_logps).clamp(max=cap)


def off_policy_mask(
    batch: TokenBatch, logps: Tensor, sampling_logps: Tensor, advantages: Tensor, threshold: float
) -> Tensor:
    """(N,) bool, off-policy sequence masking of DeepSeek-V3.2: completions to learn from; all tokens of a completion alike.

    Left out: a completion with A < 0 and mean_t (s_t - l_t) > threshold, that is, a bad one which the policy would hardly
    write any more. Pushing it further down does harm and teaches nothing.
    """
    drift = batch.sequence_mean(-_known_difference(logps.detach(), sampling_logps))
    bad = batch.sequence_mean(advantages) < 0
    return batch.expand(~(bad & (drift > threshold)))


def check_correction(mode: str, clip_min: float | None, clip_max: float | None) -> None:
    """Raise for a mode or bounds that have no meaning."""
    if mode not in CORRECTION_MODES:
        raise ValueError(
            f"The importance sampling mode {mode!r} is unknown; take one of {', '.join(CORRECTION_MODES)}."
        )
    if clip_min is not None and clip_max is not None and not 0 <= clip_min < clip_max:
        raise ValueError(
            f"The bounds of the importance sampling ratio must rise from 0: got clip_min {clip_min} and clip_max {clip_max}."
        )
    if mode.endswith("truncate") and clip_min is None and clip_max is None:
        raise ValueError(f"{mode} truncates to nothing when clip_min and clip_max are both None; give one of them.")


def _ratios(old_logps: Tensor, sampling_logps: Tensor, batch: TokenBatch, mode: str) -> Tensor:
    """exp(o - s): (S,) of completions or (N,) of tokens."""
    log_ratios = _known_difference(old_logps, sampling_logps)
    return bounded_exp(batch.sequence_sum(log_ratios) if CORRECTION_MODES[mode].per_sequence else log_ratios)


def _bounded(ratios: Tensor, mode: str, clip_min: float | None, clip_max: float | None) -> Tensor:
    top = float("inf") if clip_max is None else clip_max
    return CORRECTION_MODES[mode].bounded(ratios, clip_min or 0.0, top)


def _known_difference(logps: Tensor, sampling_logps: Tensor) -> Tensor:
    """logps - sampling_logps without gradient; 0 where the sampler did not say."""
    return (logps.detach() - sampling_logps).where(~sampling_logps.isnan(), 0)


CORRECTION_MODES: dict[str, CorrectionMode] = {
    "token_truncate": CorrectionMode(False, truncated),
    "token_mask": CorrectionMode(False, masked),
    "sequence_truncate": CorrectionMode(True, truncated),
    "sequence_mask": CorrectionMode(True, masked),
}
"""Value of `vllm_importance_sampling_mode` -> what it does."""
