"""Answers that a model draws with transformers' own `generate`, and what models say of them: a check that is not ours."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Chat = list[dict[str, str]]
ROWS = 32  # of a forward pass


@dataclass(frozen=True)
class Training:
    """How long and how fast a proof trains, and who serves a teacher."""

    steps: int
    learning_rate: float
    python: str
    seed: int = 1

    def at_most(self, steps: int) -> Training:
        return replace(self, steps=min(self.steps, steps))


@dataclass(frozen=True)
class Drawn:
    """Left-padded prompts and what follows: `ids` and `seen` (rows, all tokens), `real` (rows, answer) up to the first end."""

    ids: Tensor
    seen: Tensor
    real: Tensor
    texts: list[str]

    @property
    def start(self) -> int:
        return self.ids.shape[1] - self.real.shape[1]

    @torch.no_grad()
    def log_probs(self, *models: Any) -> Iterator[tuple[Tensor, ...]]:
        """(tokens of some rows, vocabulary) of each model in float32, and the tokens themselves as the last."""
        for ids, seen, real in zip(self.ids.split(ROWS), self.seen.split(ROWS), self.real.split(ROWS)):
            logits = (one.eval()(ids, attention_mask=seen).logits[:, self.start - 1 : -1][real] for one in models)
            yield *(values.float().log_softmax(-1) for values in logits), ids[:, self.start :][real]

    def mean(self, of_tokens: Any, *models: Any) -> float:
        """Mean over all tokens of a function of (log-probs of each model ..., tokens)."""
        return float(torch.cat([of_tokens(*parts) for parts in self.log_probs(*models)]).mean())


def entropies(logps: Tensor, tokens: Tensor) -> Tensor:
    return -(logps.exp() * logps).sum(-1)


def surprisals(logps: Tensor, tokens: Tensor) -> Tensor:
    return -logps.gather(-1, tokens[:, None])[:, 0]


def user(text: str) -> Chat:
    return [{"role": "user", "content": text}]


@torch.no_grad()
def draw(model: Any, tokenizer: Any, chats: list[Chat], most_tokens: int, greedy: bool = False) -> Drawn:
    """One answer to each, at temperature 1 from the whole vocabulary, or the most likely one."""
    device = next(model.parameters()).device
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    width, end = max(map(len, prompts)), tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    torch.manual_seed(0)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    ends = {"pad_token_id": pad, "eos_token_id": end}
    written = model.eval().generate(ids, attention_mask=mask, max_new_tokens=most_tokens, **how, **ends)
    is_end = written[:, width:] == end
    real = is_end.cumsum(-1) - is_end.long() == 0  # no end before the token
    texts = [tokenizer.decode(one[kept], skip_special_tokens=True) for one, kept in zip(written[:, width:], real)]
    return Drawn(written, torch.cat([mask, real.long()], -1), real, texts)


def rise(before: list[bool], after: list[bool], questions: int) -> dict[str, float]:
    """Shares of right answers, the answers to one question next to each other, and their difference in standard errors.

    The error is that of a mean over questions, whose answers are drawn from one distribution.
    """
    shares = [np.asarray(right, dtype=float).reshape(questions, -1).mean(1) for right in (before, after)]
    change = shares[1] - shares[0]
    error = float(change.std(ddof=1) / questions**0.5)
    mean = float(change.mean())
    errors = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return {"before": float(shares[0].mean()), "after": float(shares[1].mean()), "standard_errors": errors}
