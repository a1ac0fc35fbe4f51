"""The policy losses written naively: one completion and one token at a time, Python's min and max, no tensors but scalars.

`naive_loss` is the loss of one micro-batch that is a whole step. Autograd differentiates it in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from posttrain.core.batch import RAGGED, TokenBatch
from posttrain.core.results import Extremum, Metrics
from posttrain.losses.policy import PolicyTokens


@dataclass
class Completion:
    """Numbers of one completion, lists with an entry for each of its trained tokens."""

    logps: list[Any]
    old: list[Any]
    advantage: float
    reference: list[Any]
    correction: list[float]
    keep: list[float]
    drawn: list[float]  # log-probs under the sampler
    # Of the sampler's likeliest tokens, under the sampler and the policy.
    likeliest: list[tuple[list[float], list[float]]]


def values_of(metrics: Metrics) -> list[torch.Tensor]:
    """What each metric is a mean or an extremum of."""
    return [metric.values if isinstance(metric, Extremum) else metric for metric in metrics.values()]


def token_batch(counts: list[int], num_units: int | None = None) -> TokenBatch:
    """A batch of completions with so many trained tokens; nothing that a loss reads is left out."""
    total = sum(counts)
    lengths = torch.tensor([count + 1 for count in counts])
    return TokenBatch(
        layout=RAGGED,
        input_ids=torch.zeros(1, total + len(counts), dtype=torch.long),
        position_ids=torch.zeros(1, total + len(counts), dtype=torch.long),
        positions=torch.zeros(total, dtype=torch.long),
        targets=torch.zeros(total, dtype=torch.long),
        counts=torch.tensor(counts),
        lengths=lengths,
        ends=lengths.cumsum(0) - 1,
        num_units=len(counts) if num_units is None else num_units,
        roles=("sample",),
        rows=tuple(range(len(counts))),
        num_tokens=total + len(counts),
        num_trained=total,
    )


def random_tokens(
    seed: int, counts: list[int], *, spread: float = 0.4, weighted: bool = False
) -> tuple[PolicyTokens, torch.Tensor]:
    """Tokens of completions with advantages of both signs, and reference log-probs. Leaves carry gradient."""
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    batch = token_batch(counts)
    old = -draw(batch.num_trained).abs() - 0.1
    tokens = PolicyTokens(
        batch=batch,
        logps=(old + spread * draw(batch.num_trained)).requires_grad_(),
        old_logps=old,
        advantages=batch.expand(draw(len(counts))),
    )
    reference = old + 0.3 * draw(batch.num_trained)
    table, other = (draw(3 * batch.num_trained).view(-1, 3).log_softmax(-1) - 0.2 for _ in range(2))
    drawn = torch.where(draw(batch.num_trained) > 1, math.nan, old - 0.2 * draw(batch.num_trained).abs())
    tokens = replace(tokens, sampling_logps=drawn, likeliest=(table, 0.6 * table + 0.4 * other))
    if weighted:
        keep = torch.rand(batch.num_trained, generator=generator) < 0.7
        tokens = replace(tokens, correction=(0.3 * draw(batch.num_trained)).exp(), keep=keep)
    return tokens, reference


def completions_of(tokens: PolicyTokens, reference: torch.Tensor) -> list[Completion]:
    found, start = [], 0
    ones = [1.0] * tokens.batch.num_trained
    correction = ones if tokens.correction is None else tokens.correction.tolist()
    keep = ones if tokens.keep is None else tokens.keep.to(torch.float64).tolist()
    for count in tokens.batch.counts.tolist():
        part = slice(start, start + count)
        advantage = tokens.advantages[start].item() if count else 0.0
        logps, old, ref = (list(values[part]) for values in (tokens.logps, tokens.old_logps, reference))
        drawn = (tokens.old_logps if tokens.sampling_logps is None else tokens.sampling_logps)[part].tolist()
        pairs = [] if tokens.likeliest is None else list(zip(*(side[part].tolist() for side in tokens.likeliest)))
        found.append(Completion(logps, old, advantage, ref, correction[part], keep[part], drawn, pairs))
        start += count
    return found


def ratios_of(one: Completion, level: str) -> list[Any]:
    n = len(one.logps)
    if n == 0:
        return []
    differences = [p - o for p, o in zip(one.logps, one.old)]
    if level == "token":
        return [torch.exp(d) for d in differences]
    if level == "sequence_sum":
        return [torch.exp(sum(differences))] * n
    whole = torch.exp(sum(differences) / n)
    if level == "sequence":
        return [whole] * n
    return [whole.detach() * torch.exp(p) / torch.exp(p).detach() for p in one.logps]


def clipped_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    low = 0.2 if o.get("epsilon") is None else o["epsilon"]
    high = low if o.get("epsilon_high") is None else o["epsilon_high"]
    values = []
    for rho in ratios:
        first = rho if o.get("delta") is None or rho < o["delta"] else rho.new_tensor(o["delta"])
        second = min(max(rho, rho.new_tensor(1 - low)), rho.new_tensor(1 + high))
        a = one.advantage
        values.append(-(first * a if (first * a).item() < (second * a).item() else second * a))
    return values


def cispo_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    cap = o.get("epsilon_high") or 5.0
    return [-min(rho.item(), cap) * one.advantage * p for rho, p in zip(ratios, one.logps)]


def sapo_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    tau = o.get("sapo_temperature_pos", 1.0) if one.advantage > 0 else o.get("sapo_temperature_neg", 1.05)
    return [-one.advantage * 4 / tau / (1 + torch.exp(-tau * (rho - 1))) for rho in ratios]


def vespo_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    signs = {True: ("vespo_k_pos", 2.0, "vespo_lambda_pos", 3.0), False: ("vespo_k_neg", 3.0, "vespo_lambda_neg", 2.0)}
    k_name, k, lam_name, lam = signs[one.advantage >= 0]
    k, lam = o.get(k_name, k), o.get(lam_name, lam)
    log_w = sum((p - old).item() for p, old in zip(one.logps, one.old)) + sum(math.log(c) for c in one.correction)
    phi = math.exp(lam + k * log_w - lam * math.exp(log_w))
    return [-phi * one.advantage * p for p in one.logps]


def gmpo_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    low = 0.4 if o.get("epsilon") is None else o["epsilon"]
    high = low if o.get("epsilon_high") is None else o["epsilon_high"]
    product = 1.0
    for p, old in zip(one.logps, one.old):
        rho = torch.exp(p - old)
        if one.advantage >= 0:
            product = product * (rho if rho.item() < math.exp(high) else math.exp(high))
        else:
            product = product * (rho if rho.item() > math.exp(-low) else math.exp(-low))
    n = len(one.logps)
    return [-(product ** (1 / n)) * one.advantage] * n


def dppo_values(one: Completion, ratios: list[Any], o: dict[str, Any]) -> list[Any]:
    kind = o.get("divergence_type", "binary_tv")
    low = o["epsilon"] if o.get("epsilon") is not None else 0.15 if kind.endswith("tv") else 0.05
    high = low if o.get("epsilon_high") is None else o["epsilon_high"]
    values = []
    for t, (log_p, old) in enumerate(zip(one.logps, one.old)):
        p, is_known = math.exp(log_p.item()), not math.isnan(one.drawn[t])
        mu = math.exp(one.drawn[t] if is_known else old.item())
        sides = ([mu], [p]) if kind.startswith("binary") else [[math.exp(x) for x in s] for s in one.likeliest[t]]
        pairs = [*zip(*sides), (1 - sum(sides[0]), max(1 - sum(sides[1]), 1e-7))]  # the last: all other tokens together
        tv, kl = sum(abs(m - q) for m, q in pairs) / 2, sum(m * math.log(m / q) for m, q in pairs)
        distance = tv if kind.endswith("tv") else kl
        leaves = (p > mu and distance > high) if one.advantage > 0 else (p < mu and distance > low)
        weight = 0.0 if leaves and is_known else min(p / mu, o.get("clip_ratio_c", 20.0))
        values.append(-weight * one.advantage * log_p)
    return values


SURROGATES = {
    "grpo": clipped_values, "dr_grpo": clipped_values, "dapo": clipped_values, "bnpo": clipped_values,
    "luspo": clipped_values, "rloo": clipped_values, "cispo": cispo_values, "sapo": sapo_values,
    "vespo": vespo_values, "gmpo": gmpo_values, "dppo": dppo_values,
}  # fmt: skip


def naive_loss(name: str, tokens: PolicyTokens, reference: torch.Tensor | None, o: dict[str, Any]) -> torch.Tensor:
    """The whole objective."""
    completions = completions_of(tokens, tokens.old_logps if reference is None else reference)
    own_level = {"luspo": "sequence", "rloo": "sequence_sum"}.get(name, "token")
    sums, means = [], []
    for one in completions:
        ratios = ratios_of(one, o.get("importance_sampling_level") or own_level)
        total = torch.zeros((), dtype=torch.float64)
        for t, value in enumerate(SURROGATES[name](one, ratios, o) if one.logps else []):
            value = value * one.keep[t] * (1.0 if name in ("vespo", "dppo") else one.correction[t])
            if reference is not None and name != "rloo":
                d = one.reference[t] - one.logps[t]
                kl = (torch.exp(d) - d - 1) * (ratios[t] if o.get("use_bias_correction_kl", True) else 1)
                bound = o.get("kl_clip")
                value = value + o["beta"] * (kl if bound is None or kl.item() < bound else bound)
            total = total + value
        sums.append(total)
        means.append(total / max(len(one.logps), 1))
    n_tokens = sum(len(one.logps) for one in completions)
    if name in ("grpo", "sapo", "gmpo", "rloo"):
        return sum(means) / len(means)
    if name == "luspo":
        return sum(sums) / len(sums)
    if name == "dr_grpo":
        return sum(sums) / (len(sums) * o["max_completion_length"])
    return sum(sums) / n_tokens
