"""Heads of our own on a model's hidden states: the score of a whole sequence, read at its own last token.

transformers' classifiers look for the last token that is not padding, which ragged rows do not have and which goes wrong when
the padding token is also the end token. Here the batch says where each sequence ends. The weights are those of the matching Auto
class (`score`, `num_labels=1`), so the saved model loads there and gives equal scores.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.token_scores import forward_kwargs

CAUSAL_LM, SEQUENCE_REWARD = "causal_lm", "sequence_reward"
"""What a model is loaded for: the next token, or one score of a whole sequence."""
HEAD_NAMES = ("score", "classifier", "classification_head", "reward_head", "v_head")


@dataclass(frozen=True)
class SequenceRequest:
    """Score the sequences that end at these flat positions."""

    ends: Tensor  # (S,)
    width: int


def score_sequences(model: nn.Module, batch: TokenBatch) -> TokenScores:
    """One number per sample of the batch, float32 or better. `model` may be wrapped in anything."""
    request = SequenceRequest(batch.ends, batch.input_ids.shape[1])
    return TokenScores(rewards=model(**forward_kwargs(batch), use_cache=False, score_at=request)["rewards"])


def sequence_head(model: nn.Module) -> nn.Module:
    for name in HEAD_NAMES:
        if isinstance(getattr(model, name, None), nn.Module):
            return getattr(model, name)
    raise ValueError(
        f"{type(model).__name__} has no sequence head under any of the names {', '.join(HEAD_NAMES)}. Load a reward model with "
        "AutoModelForSequenceClassification(num_labels=1)."
    )


def install_sequence_scores(model: nn.Module) -> None:
    """Let a sequence classifier answer `score_at=SequenceRequest(...)`. Safe to call twice."""
    if hasattr(model, "_forward_without_sequence_scores"):
        return
    sequence_head(model)
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: nn.Module, *args: Any, score_at: SequenceRequest | None = None, **kwargs: Any) -> Any:
        if score_at is None:
            return self._forward_without_sequence_scores(*args, **kwargs)
        hidden = getattr(self, self.base_model_prefix)(**kwargs).last_hidden_state
        extra = hidden.shape[1] - score_at.width  # virtual tokens of prompt tuning
        ends = score_at.ends + (score_at.ends // score_at.width + 1) * extra if extra else score_at.ends
        rewards = sequence_head(self)(hidden.flatten(0, 1)[ends]).squeeze(-1)
        return {"rewards": rewards.to(torch.promote_types(rewards.dtype, torch.float32))}

    model._forward_without_sequence_scores = original
    model.forward = types.MethodType(forward, model)
