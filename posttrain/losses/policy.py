"""The policy losses: GRPO (arXiv:2402.03300) and its relatives, as presets of one objective.

    loss = normalise_t( w_t * surrogate(rho_t, A_t) + beta * rho_t^[bias corrected] * k3_t )

rho is the ratio of the policy to the one that the step began with, at the level of tokens or of completions; the
surrogate says how far the policy may move; the normaliser says what a token counts; w_t are weights without gradient
(sampler correction, masks). A loss of POLICY_LOSSES is a choice of these; nothing else knows its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import RAGGED, TokenBatch
from posttrain.core.results import LossOutput, LossTerm, Metrics
from posttrain.losses.extrema import highest, lowest
from posttrain.losses.kl import bounded_exp, k3
from posttrain.losses.named_options import call, options_taken

CISPO_CAP = 5.0
SMALLEST_WEIGHT, LARGEST_LOG_WEIGHT = 1e-8, 20.0  # of a completion, in VESPO
SMALLEST_REST = 1e-7  # probability of all tokens that are not looked at, in DPPO: float32 knows no smaller one beside 1


@dataclass(frozen=True)
class PolicyTokens:
    """The N trained tokens of a batch of completions, and what the losses need to know about them."""

    batch: TokenBatch
    logps: Tensor  # (N,) under the policy, with gradient
    old_logps: Tensor  # (N,) under the policy that the step began with, detached
    advantages: Tensor  # (N,)
    correction: Tensor | None = None  # (N,) weight of trainer against sampler, detached: see losses/importance
    keep: Tensor | None = None  # (N,) bool or numbers: tokens that have a part in the policy term
    # (N,) under the distribution that it was drawn from; NaN: not known. None: old
    sampling_logps: Tensor | None = None
    # (N, k) twice, of the sampler's k likeliest tokens: its log-probs, ours
    likeliest: tuple[Tensor, Tensor] | None = None

    @cached_property
    def sequence_advantages(self) -> Tensor:
        """(S,) mean advantage of a completion's tokens: where they all have the same, that one."""
        return self.batch.sequence_mean(self.advantages)

    def weighted(self, values: Tensor, *, corrected: bool = False) -> Tensor:
        """(N,) values of the policy term times the correction, unless they have it already, and the mask."""
        if self.correction is not None and not corrected:
            values = values * self.correction
        return values if self.keep is None else values * self.keep.to(values.dtype)


# ---- ratios --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratios:
    """log rho for each token; where it belongs to the whole completion, also once for each completion."""

    log_tokens: Tensor  # (N,)
    log_sequences: Tensor | None = None  # (S,)

    @cached_property
    def tokens(self) -> Tensor:
        """(N,) rho."""
        return bounded_exp(self.log_tokens)


def token_ratios(tokens: PolicyTokens) -> Ratios:
    """log rho_t = log p_t - log old_t."""
    return Ratios(tokens.logps - tokens.old_logps)


def sequence_ratios(tokens: PolicyTokens) -> Ratios:
    """GSPO, arXiv:2507.18071: log rho = mean_t (log p_t - log old_t), one for all tokens of a completion."""
    log_sequences = tokens.batch.sequence_mean(tokens.logps - tokens.old_logps)
    return Ratios(tokens.batch.expand(log_sequences), log_sequences)


def sequence_token_ratios(tokens: PolicyTokens) -> Ratios:
    """GSPO-token, arXiv:2507.18071: rho_t = sg(rho of the completion) p_t / sg(p_t), whose gradient is each token's own."""
    whole = sequence_ratios(tokens)
    return Ratios(whole.log_tokens.detach() + tokens.logps - tokens.logps.detach(), whole.log_sequences)


def summed_ratios(tokens: PolicyTokens) -> Ratios:
    """log rho = sum_t (log p_t - log old_t): the likelihood ratio of the whole completion."""
    log_sequences = tokens.batch.sequence_sum(tokens.logps - tokens.old_logps)
    return Ratios(tokens.batch.expand(log_sequences), log_sequences)


RATIOS: dict[str, Callable[[PolicyTokens], Ratios]] = {
    "token": token_ratios,
    "sequence": sequence_ratios,
    "sequence_token": sequence_token_ratios,
    "sequence_sum": summed_ratios,
}
"""Value of `importance_sampling_level` -> the ratios. `sequence_sum` is RLOO's own."""


# ---- surrogates: (N,) values, smaller is better, and metrics -------------------------------------------------------------


def clipped(
    tokens: PolicyTokens,
    ratios: Ratios,
    *,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped objective (arXiv:1707.06347), with two bounds (DAPO, arXiv:2503.14476) and dual clip (1912.09729).

    -min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A). `epsilon` is 0.2 where it is not given and
    `epsilon_high` is `epsilon`. `delta` bounds the ratio where A < 0, for which the clip leaves it unbounded.
    """
    low, high = clip_range(epsilon, epsilon_high, 0.2)
    if low > 1:
        raise ValueError(f"epsilon is the distance of the lower bound from a ratio of 1, and at most 1; got {low}.")
    if delta is not None and delta <= 1:
        raise ValueError(f"delta bounds the ratio from above and must exceed 1, the ratio of no change; got {delta}.")
    values = clipped_ratio(ratios.log_tokens, tokens.advantages, low, high, delta)
    return values, clip_metrics(tokens, ratios, low, high)


def clipped_ratio(
    log_ratios: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """-min(min(rho, delta) A, clip(rho, 1 - epsilon, 1 + epsilon_high) A), from log rho; tensors of any one shape."""
    ratios = bounded_exp(log_ratios)
    bounded = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.minimum(bounded * advantages, ratios.clamp(1 - epsilon, 1 + epsilon_high) * advantages)


def cispo(tokens: PolicyTokens, ratios: Ratios, *, epsilon_high: float | None = None) -> tuple[Tensor, Metrics]:
    """CISPO, arXiv:2506.13585 eq. 4: -sg(min(rho, epsilon_high)) A log p. No token loses its gradient.

    Here `epsilon_high` is the largest weight itself, 5 where it is not given. Below 1 it would shrink every gradient.
    """
    cap = CISPO_CAP if epsilon_high is None else epsilon_high
    if cap < 1:
        raise ValueError(
            f"In cispo epsilon_high is the largest ratio itself, not a distance from 1: {cap} would weigh every token "
            f"by at most {cap}. Give at least 1 (usual: {CISPO_CAP:g}), or leave it out."
        )
    values = -ratios.tokens.detach().clamp(max=cap) * tokens.advantages * tokens.logps
    measured, advantages = _at_level(tokens, ratios)
    return values, {"cispo_clip_ratio": _shares((measured > cap) & (advantages > 0), measured)}


def sapo(
    tokens: PolicyTokens, ratios: Ratios, *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> tuple[Tensor, Metrics]:
    """SAPO, arXiv:2511.20347: a soft gate instead of a clip, -A sigmoid(tau (rho - 1)) 4 / tau, tau by the sign of A.

    At rho = 1 the slope by rho is -A, as in the others; it fades on both sides, faster for A <= 0.
    """
    if min(sapo_temperature_pos, sapo_temperature_neg) <= 0:
        raise ValueError(
            "The temperatures of sapo must be above 0; got "
            f"sapo_temperature_pos {sapo_temperature_pos} and sapo_temperature_neg {sapo_temperature_neg}."
        )
    positive = tokens.advantages > 0
    tau = torch.full_like(ratios.tokens.detach(), sapo_temperature_neg).masked_fill(positive, sapo_temperature_pos)
    return -tokens.advantages * torch.sigmoid(tau * (ratios.tokens - 1)) * 4 / tau, {}


def vespo(
    tokens: PolicyTokens,
    ratios: Ratios,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """VESPO, arXiv:2602.10693: -sg(phi(w)) A log p, with log phi = lambda + k log w - lambda w; phi(1) = 1.

    w = exp(sum_t log rho_t + sum_t log correction_t) is the weight of the whole completion against the *sampler*, so the
    correction is in it and does not multiply again. log w is kept between log 1e-8 and 20. (k, lambda) by the sign of A.
    """
    if min(vespo_lambda_pos, vespo_lambda_neg) <= 0:
        raise ValueError(
            "The decays of vespo must be above 0, or phi grows without bound; got "
            f"vespo_lambda_pos {vespo_lambda_pos} and vespo_lambda_neg {vespo_lambda_neg}."
        )
    floor = math.log(SMALLEST_WEIGHT)
    exponents = ratios.log_tokens.detach().clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    if tokens.correction is not None:
        exponents = exponents + tokens.correction.log().clamp(floor, LARGEST_LOG_WEIGHT)  # a masked token: log 0
    log_weights = tokens.batch.sequence_sum(exponents).clamp(floor, LARGEST_LOG_WEIGHT)
    positive = tokens.sequence_advantages >= 0
    k = torch.full_like(log_weights, vespo_k_neg).masked_fill(positive, vespo_k_pos)
    decay = torch.full_like(log_weights, vespo_lambda_neg).masked_fill(positive, vespo_lambda_pos)
    phi = (decay + k * log_weights - decay * log_weights.exp()).exp()
    values = -tokens.batch.expand(phi) * tokens.advantages * tokens.logps
    return values, {"vespo/phi_seq_mean": phi[: tokens.batch.num_samples]}


def gmpo(
    tokens: PolicyTokens, ratios: Ratios, *, epsilon: float | None = None, epsilon_high: float | None = None
) -> tuple[Tensor, Metrics]:
    """GMPO, arXiv:2507.20673: -w A with w the geometric mean of the token ratios, each clipped in log space.

    w = exp(mean_t c_t); c_t = min(log rho_t, epsilon_high) where A >= 0 and max(log rho_t, -epsilon) where A < 0.
    `epsilon` is 0.4 where it is not given.
    """
    low, high = clip_range(epsilon, epsilon_high, 0.4)
    log_ratios = ratios.log_tokens
    bounded = torch.where(tokens.advantages >= 0, log_ratios.clamp(max=high), log_ratios.clamp(min=-low))
    weights = tokens.batch.expand(bounded_exp(tokens.batch.sequence_mean(bounded)))
    measured = log_ratios.detach()
    below, above = (measured < -low) & (tokens.advantages < 0), (measured > high) & (tokens.advantages > 0)
    return -weights * tokens.advantages, _clip_shares(tokens.batch, _shares(below, measured), _shares(above, measured))


def dppo(
    tokens: PolicyTokens,
    ratios: Ratios,
    *,
    divergence_type: str = "binary_tv",
    clip_ratio_c: float = 20.0,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """DPPO, arXiv:2602.04879: -sg(min(p / mu, c)) M A log p, where mu is the probability with which the *sampler* drew the token.

    M = 0 where a step would lead the policy further away from the sampler than it may be: A > 0, p > mu and D > epsilon_high,
    or A <= 0, p < mu and D > epsilon. D is a divergence of the two distributions (TRUST_DIVERGENCES). `epsilon` is 0.15 for a
    total variation and 0.05 for a KL where it is not given. A token of unknown mu has the old policy's, and M = 1.
    """
    if divergence_type not in TRUST_DIVERGENCES:
        raise ValueError(f"divergence_type {divergence_type!r} is unknown; take one of {', '.join(TRUST_DIVERGENCES)}.")
    if clip_ratio_c < 1:
        raise ValueError(f"clip_ratio_c is the largest weight of a token, and at least 1; got {clip_ratio_c}.")
    low, high = clip_range(epsilon, epsilon_high, trust_radius(divergence_type))
    given = tokens.old_logps if tokens.sampling_logps is None else tokens.sampling_logps
    drawn_logps = given.where(~given.isnan(), tokens.old_logps)
    ours = tokens.logps.detach()
    p, mu = ours.exp(), drawn_logps.exp()
    divergence = TRUST_DIVERGENCES[divergence_type](tokens, drawn_logps, ours)
    improves = tokens.advantages > 0
    is_far = torch.where(improves, (p > mu) & (divergence > high), (p < mu) & (divergence > low)) & ~given.isnan()
    weights = bounded_exp(ours - drawn_logps).clamp(max=clip_ratio_c) * ~is_far
    masked, difference = _shares(is_far, p), p - mu
    metrics = {
        "prob_diff/mean": difference,
        "prob_diff/max": highest(difference),
        "prob_diff/min": lowest(difference),
        "mask_ratio/overall_mean": masked,
        "mask_ratio/positive_adv_mean": masked[improves],
        "mask_ratio/negative_adv_mean": masked[tokens.advantages < 0],
    }
    return -weights * tokens.advantages * tokens.logps, metrics


def trust_radius(divergence_type: str) -> float:
    """How far the policy may be from the sampler, by default."""
    return 0.15 if divergence_type.endswith("tv") else 0.05


def _of_two(tokens: PolicyTokens, drawn_logps: Tensor, logps: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 2) twice: log-probs of the token and of all others together, of the sampler and of the policy."""
    return _with_rest(drawn_logps[:, None]), _with_rest(logps[:, None])


def _of_likeliest(tokens: PolicyTokens, *_: Tensor) -> tuple[Tensor, Tensor]:
    """(N, k + 1) twice: log-probs of the sampler's k likeliest tokens and of all others together."""
    if tokens.likeliest is None:
        raise ValueError("A divergence over the likeliest tokens needs them: PolicyTokens.likeliest is not set.")
    sampler, policy = tokens.likeliest
    return _with_rest(sampler), _with_rest(policy)


def _with_rest(logps: Tensor) -> Tensor:
    rest = 1 - logps.exp().sum(-1, keepdim=True)
    return torch.cat([logps, rest.clamp(min=SMALLEST_REST).log()], -1)


def _total_variation(sampler: Tensor, policy: Tensor) -> Tensor:
    return (sampler.exp() - policy.exp()).abs().sum(-1) / 2


def _kl(sampler: Tensor, policy: Tensor) -> Tensor:
    return (sampler.exp() * (sampler - policy)).sum(-1)


TRUST_DIVERGENCES: dict[str, Callable[[PolicyTokens, Tensor, Tensor], Tensor]] = {
    "binary_tv": lambda *of: _total_variation(*_of_two(*of)),
    "binary_kl": lambda *of: _kl(*_of_two(*of)),
    "topk_tv": lambda *of: _total_variation(*_of_likeliest(*of)),
    "topk_kl": lambda *of: _kl(*_of_likeliest(*of)),
}
"""Value of `divergence_type` -> (N,) how far the policy is from the sampler at each token."""


def clip_range(epsilon: float | None, epsilon_high: float | None, default: float) -> tuple[float, float]:
    """(lower, upper) distance from no change; what is not given is the loss's default, and the lower one."""
    low = default if epsilon is None else epsilon
    high = low if epsilon_high is None else epsilon_high
    if low < 0 or high < 0:
        raise ValueError(f"A clip range has no negative width; got epsilon {epsilon} and epsilon_high {epsilon_high}.")
    return low, high


def clip_metrics(tokens: PolicyTokens, ratios: Ratios, low: float, high: float) -> Metrics:
    """Shares of tokens (of completions, where the ratio is theirs) whose gradient the clip takes away."""
    measured, advantages = _at_level(tokens, ratios)
    below, above = (measured < 1 - low) & (advantages < 0), (measured > 1 + high) & (advantages > 0)
    is_of_tokens = ratios.log_sequences is None
    return _clip_shares(tokens.batch, _shares(below, measured), _shares(above, measured), is_of_tokens)


def _clip_shares(batch: TokenBatch, below: Tensor, above: Tensor, is_of_tokens: bool = True) -> Metrics:
    """`low_min` and `high_max`: in the least, and in the most clipped completion."""
    lowest_of, highest_of = below, above
    if is_of_tokens:
        lowest_of, highest_of = (batch.sequence_mean(share)[: batch.num_samples] for share in (below, above))
    return {
        "clip_ratio/low_mean": below,
        "clip_ratio/low_min": lowest(lowest_of),
        "clip_ratio/high_mean": above,
        "clip_ratio/high_max": highest(highest_of),
        "clip_ratio/region_mean": below + above,
    }


def _at_level(tokens: PolicyTokens, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Ratios and advantages, detached, of what the ratio belongs to: tokens or (real) completions."""
    if ratios.log_sequences is None:
        return ratios.tokens.detach(), tokens.advantages
    real = slice(tokens.batch.num_samples)
    return bounded_exp(ratios.log_sequences.detach())[real], tokens.sequence_advantages[real]


def _shares(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.to(like.dtype)


# ---- normalisers: what a token counts ------------------------------------------------------------------------------------


def per_token(batch: TokenBatch, values: Tensor) -> LossTerm:
    """Every token of the step counts the same (DAPO, arXiv:2503.14476)."""
    return LossTerm(values, "token")


def mean_of_token_means(batch: TokenBatch, values: Tensor) -> LossTerm:
    """Every completion counts the same, its tokens by their mean (GRPO, arXiv:2402.03300)."""
    return LossTerm(batch.sequence_mean(values), "sequence")


def mean_of_token_sums(batch: TokenBatch, values: Tensor) -> LossTerm:
    """The sum over a completion's tokens, mean over completions: longer ones count more (LUSPO, arXiv:2602.05261)."""
    return LossTerm(batch.sequence_sum(values), "sequence")


def per_possible_token(batch: TokenBatch, values: Tensor, *, max_completion_length: int) -> LossTerm:
    """Sum over tokens / (completions * longest possible completion): Dr. GRPO, arXiv:2503.20783, free of length bias."""
    return LossTerm(batch.sequence_sum(values) / max_completion_length, "sequence")


def per_local_token(batch: TokenBatch, values: Tensor) -> LossTerm:
    """Mean over the tokens of each micro-batch, then over micro-batches: depends on how a step is cut up (BNPO)."""
    return LossTerm(values.sum().reshape(1) / max(batch.num_trained, 1) * batch.share, "batch")


# ---- the objective -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyLoss:
    """A preset of the objective."""

    surrogate: Callable[..., tuple[Tensor, Metrics]]  # (tokens, ratios, options by name) -> (N,) values, metrics
    normaliser: Callable[..., LossTerm]  # (batch, (N,) values, options by name)
    levels: tuple[str, ...] = ("token", "sequence", "sequence_token")  # of `importance_sampling_level`; first: default
    has_kl: bool = True  # the divergence from the reference is a part of the loss (RLOO puts it into the reward)
    folds_correction: bool = False  # the surrogate has used `tokens.correction` itself

    @property
    def options(self) -> set[str]:
        """Names of the options that this loss takes; another one that a user set would have no effect."""
        taken = options_taken(self.surrogate, 2) | options_taken(self.normaliser, 2)
        taken |= {"importance_sampling_level"} if len(self.levels) > 1 else set()
        return taken | (options_taken(kl_penalty, 3) if self.has_kl else set())


def policy_loss(name: str, tokens: PolicyTokens, options: Any, reference_logps: Tensor | None = None) -> LossOutput:
    """The loss `name` of these completions, with its metrics. `options` is a config or a mapping.

    With `reference_logps`, (N,), the loss has the KL term `beta * k3`, divided as its policy term is; with `beta` 0 the
    divergence is logged and nothing more. An option that is None stands for the loss's own default.
    """
    loss = POLICY_LOSSES[name]
    ratios = RATIOS[call(chosen_level, name, loss, options=options)](tokens)
    values, metrics = call(loss.surrogate, tokens, ratios, options=options)
    values = tokens.weighted(values, corrected=loss.folds_correction)
    if reference_logps is not None and loss.has_kl:
        penalty, measured = call(kl_penalty, tokens, ratios, reference_logps, options=options)
        values = values if penalty is None else values + penalty
        metrics = {**metrics, **measured}
    term = call(loss.normaliser, tokens.batch, values, options=options)
    real = {"token": tokens.batch.num_trained, "sequence": tokens.batch.num_samples, "batch": tokens.batch.num_units}
    # A pass of a micro-batch is a part of its mean: the log puts the parts together by their tokens.
    is_part = term.per == "batch" and tokens.batch.share != 1
    metrics["policy_loss"] = values.detach() if is_part else term.values.detach()[: real[term.per]]
    return LossOutput([term], metrics=metrics)


def kl_penalty(
    tokens: PolicyTokens,
    ratios: Ratios,
    reference_logps: Tensor,
    *,
    beta: float,
    use_bias_correction_kl: bool = True,
    kl_clip: float | None = None,
) -> tuple[Tensor | None, Metrics]:
    """(N,) beta * k3, None where beta is 0, and k3 itself for the log.

    The tokens were drawn from the old policy: times rho, k3 is an unbiased estimate also after the policy has moved
    (DeepSeek-V3.2). What a token adds is at most `kl_clip`; above it, it has no gradient.
    """
    divergences = k3(tokens.logps, reference_logps)
    if use_bias_correction_kl:
        divergences = divergences * ratios.tokens
    metrics = {}
    if kl_clip is not None:
        metrics["kl_clip_ratio"] = _shares(divergences.detach() > kl_clip, divergences)
        divergences = divergences.clamp(max=kl_clip)
    return (beta * divergences if beta else None), metrics | {"kl": divergences.detach()}


def chosen_level(name: str, loss: PolicyLoss, *, importance_sampling_level: str | None = None) -> str:
    """The level of the ratio: the option, or the loss's own."""
    level = importance_sampling_level or loss.levels[0]
    if level not in loss.levels:
        raise ValueError(
            f"importance_sampling_level {level!r} is unknown to {name}; it takes {', '.join(loss.levels)}."
        )
    return level


def check_policy_loss(name: str, options: Any) -> None:
    """Raise, with the reason, for a loss or options that have no meaning. Needs no data and no model."""
    if name not in POLICY_LOSSES:
        raise ValueError(f"loss_type {name!r} is unknown; take one of {', '.join(POLICY_LOSSES)}.")
    zero, one = torch.zeros(1), torch.ones(1, dtype=torch.long)
    batch = TokenBatch(
        RAGGED, one[None], one[None], one, one, counts=one, lengths=one, ends=one, num_units=1, roles=("sample",),
        rows=(0,), num_tokens=1, num_trained=1,
    )  # fmt: skip
    likeliest = zero[None], zero[None]
    policy_loss(name, PolicyTokens(batch, zero, zero, zero, likeliest=likeliest), options, zero)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": PolicyLoss(clipped, mean_of_token_means),
    "dr_grpo": PolicyLoss(clipped, per_possible_token),
    "dapo": PolicyLoss(clipped, per_token),
    "bnpo": PolicyLoss(clipped, per_local_token),
    "cispo": PolicyLoss(cispo, per_token),
    "sapo": PolicyLoss(sapo, mean_of_token_means),
    "luspo": PolicyLoss(clipped, mean_of_token_sums, ("sequence", "token", "sequence_token")),
    "vespo": PolicyLoss(vespo, per_token, ("token",), folds_correction=True),
    "gmpo": PolicyLoss(gmpo, mean_of_token_means, ("token",)),
    "dppo": PolicyLoss(dppo, per_token, ("token",), folds_correction=True),
    "rloo": PolicyLoss(clipped, mean_of_token_means, ("sequence_sum",), has_kl=False),
}
"""Value of `loss_type` -> the loss. `rloo` is REINFORCE with clipping of whole completions, arXiv:2402.14740."""
