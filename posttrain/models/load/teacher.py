"""Teachers: whom a student is compared with, token by token over the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.models.load.model import innermost_model
from posttrain.models.load.reference import ModelReference
from posttrain.models.load.vocabulary import tokenizer_of
from posttrain.models.scoring.two_heads import TeacherRows, teacher_rows

BASE, LIVE, EMA = "base", "live", "ema"
"""States of the student that can be its teacher: as the run began, as it is, averaged over the run."""


class Teacher(Protocol):
    """Answers about a batch without a gradient. Which kind it is, no loss ever asks."""

    words: int | None
    """Of its vocabulary, where that is not the student's."""

    def rows(self, batch: TokenBatch) -> TeacherRows:
        """Hidden states at the trained tokens of a batch, and the head that reads them."""

    def logps(self, batch: TokenBatch, vocabulary: int | None = None) -> Tensor:
        """(N,) log-probs of the trained tokens; words from number `vocabulary` on are in no normaliser."""

    def check(self, tokenizer: Any) -> None:
        """Refuse a student whose tokens it does not read."""


@dataclass
class ModelTeacher:
    """A teacher whose weights are in memory: another model, or another state of the student (`asked.context` switches to it)."""

    asked: ModelReference
    name: str
    words: int | None = None
    tokenizer: Any = None  # None: the student's own

    def __str__(self) -> str:
        return str(self.asked)

    @torch.no_grad()
    def rows(self, batch: TokenBatch) -> TeacherRows:
        with self.asked.asked():
            found = teacher_rows(self.asked.model, batch, self.asked.temperature)
        return replace(found, model=innermost_model(self.asked.model))

    def logps(self, batch: TokenBatch, vocabulary: int | None = None) -> Tensor:
        return self.asked.scores(batch, vocabulary).logps

    def check(self, tokenizer: Any) -> None:
        if self.tokenizer is not None:
            check_tokenizers(tokenizer, self.tokenizer, self.name)


def check_tokenizers(student: Any, teacher: Any, name: str) -> None:
    """Refuse two tokenizers, or processors with such, that do not map every token to the same id; numbers of padded rows of an
    embedding may differ."""
    ours, theirs = (tokenizer_of(one).get_vocab() for one in (student, teacher))
    if ours == theirs:
        return
    where = [(vocabulary[token], token) for vocabulary in (ours, theirs) for token in vocabulary]
    _, token = min((number, token) for number, token in where if ours.get(token) != theirs.get(token))
    has = [
        f"token {vocabulary[token]} of the {who}" if token in vocabulary else f"not in the vocabulary of the {who}"
        for who, vocabulary in (("student", ours), ("teacher", theirs))
    ]
    raise ValueError(
        f"The tokenizers of the student and of the teacher {name} differ: {token!r} is {' and '.join(has)}. Distributions over "
        "two vocabularies cannot be compared word by word. Take a teacher with the student's tokenizer; GOLD is for two."
    )
