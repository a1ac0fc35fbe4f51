"""GRPO and RLOO in the gradient matrix: groups of completions, the options of each variant, and the naive loss of a whole step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.core.sample import Sample, Unit
from posttrain.data.collate import Collator
from posttrain.losses.policy import POLICY_LOSSES, PolicyTokens
from posttrain.models.load.reference import PRECOMPUTED
from posttrain.rollout.loader import units_of
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, POLICY_LOGPS, SAMPLING_LOGPS
from posttrain.trainer.policy_group_trainer import LIKELIEST
from tests.losses.policy_oracle import naive_loss, token_batch

# (n, V) log-probs where the trained tokens of a sample are predicted, the tokens.
Scored = tuple[torch.Tensor, torch.Tensor]

ROWS_WITHOUT_PROMPT_IN_COMMON = (5,)
SHARED_OPTIONS = {"max_completion_length": 9, "reward_workers": 0, "rollout_engine": "transformers"}
CORRECTED = {"vllm_importance_sampling_correction": True}
TOKEN_CORRECTED = {
    **CORRECTED,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.2,
    "vllm_importance_sampling_clip_min": 0.6,
}
DPPO = {"loss_type": "dppo", "epsilon": 4e-4, "epsilon_high": 2e-4}  # about half of the tokens are further off
GRPO_VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"loss_type": name} for name in POLICY_LOSSES if name != "rloo"},
    "dppo": DPPO,
    "dppo_kl": {**DPPO, "divergence_type": "binary_kl", "clip_ratio_c": 1.2},
    "dppo_topk_tv": {**DPPO, "divergence_type": "topk_tv", "divergence_topk": 3},
    "dppo_topk_kl": {**DPPO, "divergence_type": "topk_kl", "divergence_topk": 3, "epsilon": 2e-6, "epsilon_high": 1e-6},
    "gfpo": {"loss_type": "grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03},
    "gspo_token": {"loss_type": "grpo", "importance_sampling_level": "sequence_token", "epsilon": 0.03},
    "delta": {"loss_type": "dapo", "delta": 1.3, "epsilon_high": 0.28},
    "kl": {"loss_type": "dapo", "beta": 0.1},
    "kl_plain": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    "kl_clip": {"loss_type": "dapo", "beta": 0.1, "kl_clip": 0.02},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.3},
    "masked": {"loss_type": "dapo", "off_policy_mask_threshold": 0.02},
    "correction": {"loss_type": "dapo", **CORRECTED, "vllm_importance_sampling_clip_max": 1.5},
    "top_entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.37},
    "correction_token": {"loss_type": "grpo", **TOKEN_CORRECTED},
    "correction_vespo": {"loss_type": "vespo", **TOKEN_CORRECTED},
}
"""Name of a variant -> options of GRPOConfig."""
ON_SAMPLER = {"loss_type": "dapo", "proximal_policy": "sampler"}
"""Of AsyncGRPO, whose ratios are those to the policy that wrote."""
NASH_LEVELS = ("to_go", "sequence", "token")
NASH_BETA = 0.1
DEPEND_ON_THE_CUT = ("bnpo", "top_entropy")
"""A mean over the tokens of each micro-batch, by process; a threshold over those of each, of all processes."""


def options(method: str, loss: str) -> dict[str, Any]:
    if method == "nash_md":
        return {**SHARED_OPTIONS, "kl_level": loss, "beta": NASH_BETA}
    own = {"rloo": {"beta": 0.0}, "async_grpo": ON_SAMPLER}
    return {**SHARED_OPTIONS, **(own[method] if method in own else GRPO_VARIANTS[loss])}


def arguments() -> dict[str, Any]:
    """What the constructor of an online trainer wants besides; nothing is generated or judged here."""
    return {"reward_funcs": lambda completions, **columns: [0.0] * len(completions)}


# ---- the rows ------------------------------------------------------------------------------------------------------------


def groups(policy_scores: Any, reference_scores: Any) -> list[Unit]:
    """Eight groups of two or three completions with advantages of both signs; `..._scores` map a sample to its Scored.

    Old log-probs lie around the policy's, so that ratios differ from 1 and some are clipped; sampling log-probs lie around the
    old ones. All are float64, so that they limit no comparison; the reference's, which travel in float32, are rounded to it.
    """
    rng, more = np.random.default_rng(11), np.random.default_rng(12)
    made = []
    for row in range(8):
        prompt = rng.integers(0, 250, int(rng.integers(1, 6)))
        unit = []
        for member in range(int(rng.integers(2, 4))):
            start = (prompt + member) % 250 if row in ROWS_WITHOUT_PROMPT_IN_COMMON else prompt
            sample = Sample.of_text(start, rng.integers(0, 250, int(rng.integers(1, 8))), row=row)
            sample.group = row
            own = _picked(policy_scores(sample))
            old = own + 0.3 * rng.normal(size=len(own))
            reference = np.float32(0.7 * own + 0.3 * _picked(reference_scores(sample)))
            _write(sample, OLD_LOGPS, old)
            _write(sample, SAMPLING_LOGPS, old + 0.2 * rng.normal(size=len(own)))
            _write(sample, PRECOMPUTED, reference.astype(np.float64))
            _write(sample, ADVANTAGES, np.full(len(own), rng.normal()))
            _write(sample, LIKELIEST, _likeliest(policy_scores(sample)[0], more))
            _write(sample, POLICY_LOGPS, own + 0.3 * more.normal(size=len(own)))
            unit.append(sample)
        made.append(tuple(unit))
    return made


def _picked(scored: Scored) -> np.ndarray:
    rows, tokens = scored
    return rows[torch.arange(len(tokens)), tokens].detach().numpy()


def _write(sample: Sample, name: str, values: np.ndarray) -> None:
    column = np.zeros((len(sample), *values.shape[1:]), dtype=np.float64)
    column[sample.trained] = values
    sample.per_token[name] = column


def _likeliest(rows: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """(n, 6): ids and log-probs of the three likeliest tokens of a sampler near the policy."""
    sampler = (rows.detach() + 0.02 * torch.from_numpy(rng.normal(size=rows.shape))).log_softmax(-1).topk(3)
    return torch.cat([sampler.indices.double(), sampler.values], -1).numpy()


def rows_of(loss: str, units: list[Unit]) -> list[Unit]:
    """GFPO trains on the members of a group that its filter has left: here two of three."""
    if loss != "gfpo":
        return units
    kept = [
        [None if len(unit) == 3 and i == row % 3 else (s,) for i, s in enumerate(unit)]
        for row, unit in enumerate(units)
    ]
    return [units_of(window, Collator(("completion",), 0))[0] for window in kept]


Windows = list[list[list[Unit]]]  # the units of each micro-batch, for each process


# ---- the oracle ----------------------------------------------------------------------------------------------------------


def step_loss(method: str, loss: str, windows: Windows, policy_scores: Any) -> torch.Tensor:
    """The loss of a step: of all its samples together, but for the losses that depend on how it is cut up."""
    chosen = options(method, loss)
    name = "rloo" if method == "rloo" else chosen["loss_type"]
    micro_batches = [[sample for mine in window for unit in mine for sample in unit] for window in windows]
    samples = [sample for window in micro_batches for sample in window]
    scored = {id(sample): policy_scores(sample) for sample in samples}
    if loss == "bnpo":
        parts = [[sample for unit in mine for sample in unit] for window in windows for mine in window]
        return sum(_whole(name, part, [scored[id(s)] for s in part], chosen) for part in parts if part) / len(parts)
    keep = None
    if "top_entropy_quantile" in chosen:
        share = chosen["top_entropy_quantile"]
        keep = [kept for window in micro_batches for kept in _undecided([scored[id(s)] for s in window], share)]
    return _whole(name, samples, [scored[id(s)] for s in samples], chosen, keep)


def nash_step_loss(level: str, samples: Sequence[Sample], policy_scores: Any) -> torch.Tensor:
    """sum over samples of [beta K - (P - 1/2) sum_t log p_t] / samples; the advantage of a sample is P - 1/2."""
    total = 0.0
    for sample in samples:
        rows, tokens = policy_scores(sample)
        logps = [row[token] for row, token in zip(rows, tokens)]
        ratios = [lp.item() - ref for lp, ref in zip(logps, sample.per_token[PRECOMPUTED][sample.trained].tolist())]
        weights = {
            "to_go": [math.fsum(ratios[place:]) for place in range(len(ratios))],
            "sequence": [math.fsum(ratios)] * len(ratios),
            "token": ratios,
        }[level]
        advantage = float(sample.per_token[ADVANTAGES][-1])
        total = total + sum((NASH_BETA * weight - advantage) * lp for weight, lp in zip(weights, logps))
    return total / len(samples)


def _undecided(scored: list[Scored], share: float) -> list[bool]:
    """Of the tokens of a micro-batch, those whose entropy the share `share` of them reaches."""
    entropies = np.array([-(row.exp() * row).sum().item() for rows, _ in scored for row in rows])
    return (entropies >= np.quantile(entropies, 1 - share) - 1e-5).tolist() if len(entropies) else []  # ties are kept


def _whole(
    name: str, samples: Sequence[Sample], scored: list[Scored], o: dict[str, Any], kept: list[bool] | None = None
) -> torch.Tensor:
    logps = [rows[torch.arange(len(tokens)), tokens] for rows, tokens in scored]
    numbers = [{key: torch.from_numpy(v[s.trained]) for key, v in s.per_token.items()} for s in samples]
    columns = {key: torch.cat([one[key] for one in numbers]) for key in numbers[0]}
    correction = None
    keep = None if kept is None else torch.tensor(kept)
    if o.get("vllm_importance_sampling_correction"):
        correction = torch.tensor([w for one in numbers for w in _corrections(one, o)], dtype=torch.float64)
    if o.get("off_policy_mask_threshold") is not None:
        keep = torch.tensor([kept for one, own in zip(numbers, logps) for kept in _kept(one, own, o)])
    tokens = PolicyTokens(
        token_batch([len(own) for own in logps]),
        torch.cat(logps),
        columns[POLICY_LOGPS if "proximal_policy" in o else OLD_LOGPS],
        columns[ADVANTAGES],
        correction,
        keep,
        columns[SAMPLING_LOGPS],
        (columns[LIKELIEST][:, 3:], _at_ids(scored, columns[LIKELIEST][:, :3])),
    )
    total = naive_loss(name, tokens, columns[PRECOMPUTED] if o.get("beta") else None, o)
    if o.get("entropy_coef"):
        entropies = [-(row.exp() * row).sum() for rows, _ in scored for row in rows]
        total = total - o["entropy_coef"] * sum(entropies) / len(entropies)
    return total


def _at_ids(scored: list[Scored], ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows for rows, _ in scored]).detach().gather(1, ids.long())


def _corrections(one: dict[str, torch.Tensor], o: dict[str, Any]) -> list[float]:
    differences = (one[OLD_LOGPS] - one[SAMPLING_LOGPS]).tolist()
    low, high = o.get("vllm_importance_sampling_clip_min") or 0.0, o["vllm_importance_sampling_clip_max"]
    if o.get("vllm_importance_sampling_mode") == "token_truncate":
        return [min(max(math.exp(d), low), high) for d in differences]
    ratio = math.exp(sum(differences))
    return [ratio if low <= ratio <= high else 0.0] * len(differences)


def _kept(one: dict[str, torch.Tensor], own: torch.Tensor, o: dict[str, Any]) -> list[bool]:
    drift = sum(one[SAMPLING_LOGPS].tolist()) / len(own) - sum(own.tolist()) / len(own)
    left_out = one[ADVANTAGES][0].item() < 0 and drift > o["off_policy_mask_threshold"]
    return [not left_out] * len(own)
