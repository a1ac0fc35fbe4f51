"""Heads of our own on a model's hidden states: a value or labels at a token, the score of a whole sequence at its own last token.

transformers' classifiers look for the last token that is not padding, which ragged rows do not have and which goes wrong when
the padding token is also the end token. Here the batch says where each sequence ends. The weights are those of the matching Auto
class (`score` with `num_labels=1` for sequences, with 2 for tokens), so the saved model loads there and gives equal scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.scoring.token_scores import ask

CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS = "causal_lm", "sequence_reward", "token_labels"
"""What a model is loaded for: the next token, one score of a whole sequence, or labels of single tokens."""
NUM_LABELS = {SEQUENCE_REWARD: 1, TOKEN_LABELS: 2}
"""Task -> outputs of its head."""
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


@dataclass(frozen=True)
class LabelsQuestion(HeadQuestion):
    """What a token classifier says at each position, behind its own dropout, as its own forward has it."""

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        dropout = getattr(model, "dropout", None)
        return super().answer(model, dropout(rows) if isinstance(dropout, nn.Dropout) else rows)


def score_labels(model: nn.Module, batch: TokenBatch, router_loss: bool = False) -> TokenScores:
    """(N, labels) about the trained tokens, each read at the token itself and not, as its log-prob would be, before it."""
    return ask(model, batch, LabelsQuestion("labels", batch.places), router_loss=router_loss)


def sequence_head(model: nn.Module) -> nn.Module:
    for name in HEAD_NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    raise ValueError(
        f"{type(model).__name__} has no head under any of the names {', '.join(HEAD_NAMES)}. Load a reward model with "
        "AutoModelForSequenceClassification(num_labels=1), a process reward model with "
        "AutoModelForTokenClassification(num_labels=2)."
    )
