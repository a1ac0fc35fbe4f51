"""Distillation in the gradient matrix: the options of each variant, its teacher, and the naive loss of a whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from posttrain.core.sample import Unit
from posttrain.trainer.distilling_trainer import ON_POLICY
from tests import tiny

SHARED = {"max_completion_length": 9, "rollout_engine": "transformers"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "gkd": {
        "jsd": {"beta": 0.3},
        "forward": {"beta": 0.0},
        "reverse": {"beta": 1.0},
        "tempered": {"beta": 0.3, "loss_temperature": 0.7},
        "more_words": {"beta": 0.3},
    },
    "distillation": {"tempered": {"beta": 1.0, "temperature": 0.7}},
    "ssd": {"nll": {"temperature": 0.7}},
}
"""Method -> variant -> its options."""
TEMPERATURE = {"tempered": 0.7}
MORE_WORDS = 3


def resembles_others(method: str, loss: str) -> bool:
    """Distillation is GKD on other completions, and SSD's loss is SFT's."""
    return (method, loss) != ("gkd", "jsd")


def arguments(method: str, loss: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the constructor of the trainer wants besides."""
    return (
        {} if method == "ssd" else {"teacher_model": teacher(loss, dtype), "teacher_processing_class": tiny.tokenizer()}
    )


def teacher(loss: str, dtype: torch.dtype) -> Any:
    """Other weights than the student's; of one variant, with words that the student has not."""
    model = tiny.causal_lm(1, dtype)
    if loss == "more_words":
        torch.manual_seed(5)
        model.resize_token_embeddings(model.config.vocab_size + MORE_WORDS, mean_resizing=False)
    return tiny.with_exact_norms(model) if dtype == torch.float64 else model


def units(texts: list[Unit]) -> list[Unit]:
    """Every other completion is the student's own."""
    return [(replace(sample, scalars={ON_POLICY: float(sample.row % 2)}),) for (sample,) in texts]


def step_loss(
    method: str, loss: str, rows: list[Unit], own: Callable[..., Any], theirs: Callable[..., Any]
) -> torch.Tensor:
    """Sum over tokens of the divergence / tokens; `own` and `theirs` map a sample to ((n, V) log-probs, tokens)."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    heat, options = TEMPERATURE.get(loss, 1.0), OPTIONS[method][loss]
    for (sample,) in rows:
        logps, targets = own(sample)
        tokens += len(targets)
        if method == "ssd":
            total = total - sum(row[target] for row, target in zip(logps, targets))
            continue
        with torch.no_grad():
            wanted = theirs(sample)[0][:, : logps.shape[-1]]
        for p_row, q_row in zip(logps / heat, wanted / heat):
            p, q = p_row.exp() / p_row.exp().sum(), q_row.exp() / q_row.exp().sum()
            total = total + divergence(p, q, options["beta"])
    return total / tokens


def divergence(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    if beta in (0, 1):
        first, second = (q, p) if beta == 0 else (p, q)
        return (first * torch.log(first / second)).sum()
    m = (1 - beta) * p + beta * q
    return beta * (q * torch.log(q / m)).sum() + (1 - beta) * (p * torch.log(p / m)).sum()
