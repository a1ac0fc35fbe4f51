"""Cells of CPO, ORPO, TPO, KTO and BCO: their options, their rows, and the loss of a step written from the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from posttrain.core.sample import Sample

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "cpo": {
        "sigmoid": {"label_smoothing": 0.1},
        "hinge": {"loss_type": "hinge"},
        "ipo": {"loss_type": "ipo"},
        "simpo": {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0},
        "cpo_simpo": {"loss_type": "simpo", "beta": 2.0},
        "alphapo": {"loss_type": "alphapo", "beta": 2.0, "alpha": 0.25},
        "alphapo_negative": {"loss_type": "alphapo", "beta": 2.0, "alpha": -0.25},
    },
    "orpo": {"prompt": {}, "answer": {"prompt_nll": False}},
    "tpo": {"sigmoid": {"label_smoothing": 0.1}, "tpo-l": {"loss_type": "tpo-l", "beta": 2.0, "tpo_alpha": 0.3}},
    "kto": {
        "kto": {},
        "weighted": {"desirable_weight": 1.3, "undesirable_weight": 0.7},
        "clamped": {},
        "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    },
    "bco": {"pooled": {}, "weighted": {}},
}
"""Method -> name of a loss -> the options that choose it."""
WITH_REFERENCE = ("kto", "bco")
STATES = {"bco": {"rewards": [3.7, 10.0, 0.0, 0.0], "classifier": {}}}
DELTA = 0.37
LABELS = (1, 0, 1, 1, 0, 1, 0, 0)
LogProbs = Callable[[Sample], list[torch.Tensor]]


@lru_cache
def units(method: str) -> list[tuple[Sample, ...]]:
    """Eight units of prompts and answers of different lengths; those of row 5 of a pair have different prompts."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 250, int(rng.integers(1, 6))) for _ in LABELS]
    answers = [[rng.integers(0, 250, int(rng.integers(1, 8))) for _ in range(3)] for _ in LABELS]
    ratios = [float(np.float32(value)) for value in rng.uniform(0.5, 3, len(LABELS))]
    if method in WITH_REFERENCE:
        made = []
        for row, label in enumerate(LABELS):
            weight = {"density_ratio": 1.0 if label else ratios[row]} if method == "bco" else {}
            sample = Sample.of_text(prompts[row], answers[row][0], row=row, label=float(label), **weight)
            other = answers[(row + 1) % len(LABELS)][0]
            sample.twin = Sample.of_text(prompts[row], other, row=row) if method == "kto" else None
            made.append((sample,))
        return made
    sides = 3 if method == "tpo" else 2
    made = []
    for row, prompt in enumerate(prompts):
        own = [prompt, *[prompt[::-1] + 1 if row == 5 else prompt] * (sides - 1)]
        made.append(tuple(Sample.of_text(own[side], answers[row][side], row=row) for side in range(sides)))
    return made


def with_prompts_trained(pairs: list[tuple[Sample, ...]]) -> list[tuple[Sample, ...]]:
    """As ORPO reads them: the chosen prompt is trained, and flags say which tokens are the answer."""
    made = []
    for pair in pairs:
        flagged = [Sample(s.input_ids, s.trained, {"answer": s.trained.astype(np.float32)}, row=s.row) for s in pair]
        flagged[0].trained = np.ones(len(flagged[0]), dtype=bool)
        made.append(tuple(flagged))
    return made


def rows_of(method: str, loss: str) -> list[tuple[Sample, ...]]:
    return with_prompts_trained(units(method)) if (method, loss) == ("orpo", "prompt") else units(method)


# ---- the oracle ----------------------------------------------------------------------------------------------------------


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-x))


def step_loss(method: str, loss: str, policy: LogProbs, reference: LogProbs | None) -> torch.Tensor:
    """The loss of all eight units, one sequence after the other. `policy(sample)`: log-probs of its trained tokens."""
    return {"cpo": _cpo, "tpo": _cpo, "orpo": _orpo, "kto": _kto, "bco": _bco}[method](method, loss, policy, reference)


def _cpo(method: str, loss: str, policy: LogProbs, reference: LogProbs | None) -> torch.Tensor:
    options = OPTIONS[method][loss]
    beta = options.get("beta", 0.1 if method == "cpo" else 0.01)
    kind, alpha = options.get("loss_type", "sigmoid"), options.get("alpha", 0.0)
    total, nll, tokens = 0.0, 0.0, 0
    for unit in units(method):
        logps = [policy(sample) for sample in unit]
        sums, means = [sum(side) for side in logps], [sum(side) / len(side) for side in logps]
        if alpha:
            means = [(1 - torch.exp(m) ** -alpha) / alpha for m in means]
        difference = sums[0] - sums[1] if kind in ("sigmoid", "hinge") else means[0] - means[1]
        if kind == "hinge":
            total = total + max(difference * 0, 1 - beta * difference)
        elif kind == "ipo":
            total = total + (difference - 1 / (2 * beta)) ** 2
        else:
            x = beta * difference - (0.0 if kind == "sigmoid" else 0.5)
            smoothing = options.get("label_smoothing", 0.0)
            total = total - (1 - smoothing) * log_sigmoid(x) - smoothing * log_sigmoid(-x)
        imitated = logps[2] if method == "tpo" else logps[0]
        nll, tokens = nll - sum(imitated), tokens + len(imitated)
    weight = options.get("tpo_alpha", 1.0) if method == "tpo" else options.get("cpo_alpha", 1.0)
    weight = 0.0 if kind == "alphapo" else weight
    return total / len(units(method)) + weight * nll / tokens


def _orpo(method: str, loss: str, policy: LogProbs, reference: LogProbs | None) -> torch.Tensor:
    total, nll, tokens = 0.0, 0.0, 0
    for plain, read in zip(units("orpo"), rows_of("orpo", loss)):
        chosen, rejected = (sum(side) / len(side) for side in map(policy, plain))
        odds = [m - torch.log1p(-torch.exp(m)) for m in (chosen, rejected)]
        total = total - log_sigmoid(odds[0] - odds[1])
        imitated = policy(read[0])
        nll, tokens = nll - sum(imitated), tokens + len(imitated)
    return nll / tokens + 0.1 * total / len(units("orpo"))


def _kto(method: str, loss: str, policy: LogProbs, reference: LogProbs) -> torch.Tensor:
    options = OPTIONS["kto"][loss]
    z = reference_point(policy, reference) if loss in ("kto", "weighted", "clamped") else 0.0
    weights = (options.get("undesirable_weight", 1.0), options.get("desirable_weight", 1.0))
    total = 0.0
    for (sample,), label in zip(units("kto"), LABELS):
        ratio = sum(policy(sample)) - sum(reference(sample)).detach()
        total = total + weights[label] * (1 - 1 / (1 + torch.exp(-0.1 * (1 if label else -1) * (ratio - z))))
    return total / len(LABELS)


def reference_point(policy: LogProbs, reference: LogProbs) -> float:
    twins = [sample.twin for (sample,) in units("kto")]
    with torch.no_grad():
        ratios = [float(sum(policy(twin)) - sum(reference(twin))) for twin in twins]
    return max(0.0, math.fsum(ratios) / len(ratios))


def _bco(method: str, loss: str, policy: LogProbs, reference: LogProbs) -> torch.Tensor:
    total = 0.0
    for (sample,), label in zip(units("bco"), LABELS):
        ratio = sum(policy(sample)) - sum(reference(sample)).detach()
        weight = sample.scalars["density_ratio"] if loss == "weighted" else 1.0
        total = total - weight * log_sigmoid((1 if label else -1) * (0.1 * ratio - DELTA))
    return total / len(LABELS)
