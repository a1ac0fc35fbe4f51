"""Families with mixers, and their answers in a layout: for tests here and on a GPU, where hypothesis is not installed."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens

KINDS = {
    "stablelm": "attention that is handed no keyword arguments",
    "qwen3_5_text": "gated delta net",
    "falcon_h1": "Mamba 2 beside attention",
    "jamba": "Mamba and experts",
    "lfm2_moe": "short convolution",
    "minimax": "lightning attention",
    "zaya": "attention with a convolution inside",
}
OPTIONS = {
    PADDED: LoadOptions(layout=PADDED),
    RAGGED: LoadOptions(layout=RAGGED),
    SHARED: LoadOptions(share_prefixes=True),
}


def pairs():
    """Prompts of unequal lengths with two answers each."""
    draw = np.random.default_rng(0)

    def one(prompt, *answers):
        ids = draw.integers(3, 250, prompt)
        rows = [np.concatenate([ids, draw.integers(3, 250, length)]) for length in answers]
        return tuple(Sample(row.astype(np.int32), np.arange(len(row)) >= prompt) for row in rows)

    return [one(9, 5, 3), one(40, 20, 2), one(3, 7, 30)]


def answers(model, layout):
    """Log-probs, and the gradients of a sum of them with unequal weights."""
    model.zero_grad()
    batch = collate(pairs(), ("chosen", "rejected"), layout).to(next(model.parameters()).device)
    found = score_tokens(model, batch).logps
    (found * torch.linspace(-1, 1, len(found)).to(found)).sum().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loaded(model, layout, **more):
    made = load_model(copy.deepcopy(model), replace(OPTIONS[layout], **more))
    assert made.layout == layout, made.notes
    return made.model


def assert_alike(found, wanted, tolerance=1e-5):
    torch.testing.assert_close(found[0], wanted[0], rtol=tolerance, atol=tolerance)
    for name, gradient in wanted[1].items():
        size = gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=10 * tolerance, atol=tolerance * size + 1e-7)
