"""Heads of our own on a model's hidden states: a value or labels at a token, the score of a whole sequence at its own last token.

transformers' classifiers look for the last token that is not padding, which ragged rows do not have and which goes wrong when
the padding token is also the end token. Here the batch says where each sequence ends. The weights are those of the matching Auto
class (`score`, `num_labels=1`), so the saved model loads there and gives equal scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.scoring.token_scores import ask

CAUSAL_LM, SEQUENCE_REWARD = "causal_lm", "sequence_reward"
"""What a model is loaded for: the next token, or one score of a whole sequence."""
HEAD_NAMES = ("score", "classifier", "classification_head", "reward_head", "v_head")


@dataclass(frozen=True)
class HeadQuestion:
    """What a head of our own says: a number for each position, or as many as the head has outputs; float32 or better."""

    name: str  # of the answer: "rewards", "values" or "labels" of TokenScores, or another
    positions: Tensor
    module: str | None = None  # attribute of the model; None: the first of HEAD_NAMES

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        head = sequence_head(model) if self.module is None else getattr(model, self.module)
        values = head(rows)
        values = values.squeeze(-1) if values.shape[-1] == 1 else values
        return {self.name: values.to(torch.promote_types(values.dtype, torch.float32))}


def score_sequences(model: nn.Module, batch: TokenBatch) -> TokenScores:
    """One number per sample of the batch, read at its last token. `model` may be wrapped in anything."""
    return ask(model, batch, HeadQuestion("rewards", batch.ends))


def sequence_head(model: nn.Module) -> nn.Module:
    for name in HEAD_NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    raise ValueError(
        f"{type(model).__name__} has no sequence head under any of the names {', '.join(HEAD_NAMES)}. Load a reward model with "
        "AutoModelForSequenceClassification(num_labels=1)."
    )
