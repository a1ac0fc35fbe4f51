"""Sample: one token sequence and what is known about each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

KEEP_START, KEEP_END = "keep_start", "keep_end"


@dataclass
class Sample:
    """Everything that is trained on: a flat token sequence, a mask of trained tokens, and numbers aligned with them.

    `trained[t]` says whether the model is asked to predict token `t`; `per_token[name][t]` speaks about token `t`.
    The shift by one (position `t - 1` predicts token `t`) happens once, in `data/collate`.
    """

    input_ids: np.ndarray  # (tokens,) integers
    trained: np.ndarray  # (tokens,) bool
    per_token: dict[str, np.ndarray] = field(default_factory=dict)  # name -> (tokens,) or (tokens, k)
    scalars: dict[str, float] = field(default_factory=dict)  # numbers about the whole sequence
    media: dict[str, Any] = field(default_factory=dict)  # opaque tensors for the model's forward
    row: int = -1  # number of the dataset row it came from
    group: int = -1  # samples of one prompt share a group
    policy_version: int = -1  # version of the weights that wrote it, for rollouts
    twin: Sample | None = (
        None  # another sequence about the same thing, which is scored beside this one and never trained
    )

    def __post_init__(self) -> None:
        self.input_ids = np.asarray(self.input_ids, dtype=np.int32)
        self.trained = np.asarray(self.trained, dtype=bool)
        self.per_token = {name: np.asarray(values) for name, values in self.per_token.items()}
        for name, values in (("trained", self.trained), *self.per_token.items()):
            if len(values) != len(self.input_ids):
                raise ValueError(
                    f"Sample of row {self.row}: {name!r} has {len(values)} entries for {len(self.input_ids)} tokens."
                )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """Tokens that can be predicted: the first token of a sequence has no position before it."""
        return int(self.trained[1:].sum())

    @classmethod
    def of_text(cls, prompt_ids: Any, completion_ids: Any, *, row: int = -1, **scalars: float) -> Sample:
        """A sample whose completion is trained and whose prompt is context."""
        ids = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(completion_ids, np.int32)])
        trained = np.arange(len(ids)) >= len(prompt_ids)
        return cls(ids, trained, scalars=dict(scalars), row=row)

    def read_trained(self, name: str) -> np.ndarray:
        """(num_trained,) numbers about the tokens that can be predicted."""
        return self.per_token[name][1:][self.trained[1:]]

    def write_trained(self, name: str, values: np.ndarray) -> None:
        """What `read_trained` reads; 0 at all other tokens."""
        column = np.zeros((len(self), *values.shape[1:]), dtype=values.dtype)
        column[1:][self.trained[1:]] = values
        self.per_token[name] = column

    def append(self, tokens: Any, trained: bool, **per_token: Any) -> Sample:
        """This sample followed by `tokens`; numbers that are not given for the new tokens are 0."""
        tokens = np.asarray(tokens, dtype=np.int32)
        columns = {}
        for name in self.per_token.keys() | per_token.keys():
            old, new = (
                None if part.get(name) is None else np.asarray(part[name]) for part in (self.per_token, per_token)
            )
            old = np.zeros((len(self), *new.shape[1:]), np.float32) if old is None else old
            new = np.zeros((len(tokens), *old.shape[1:]), old.dtype) if new is None else new
            columns[name] = np.concatenate([old, new])
        return self._with(
            np.concatenate([self.input_ids, tokens]),
            np.concatenate([self.trained, np.full(len(tokens), trained)]),
            columns,
        )

    def truncate(self, max_length: int | None, mode: str = KEEP_START) -> Sample:
        """The first (or last) `max_length` tokens; the sample itself when it is short enough."""
        if max_length is None or len(self) <= max_length:
            return self
        if mode not in (KEEP_START, KEEP_END):
            raise ValueError(f"A sample is cut by {KEEP_START!r} or {KEEP_END!r}, not by {mode!r}.")
        return self.slice(0, max_length) if mode == KEEP_START else self.slice(len(self) - max_length, len(self))

    def slice(self, start: int, stop: int) -> Sample:
        """Tokens `start` to `stop`, with everything that is aligned with them."""
        part = slice(start, stop)
        return self._with(
            self.input_ids[part], self.trained[part], {name: values[part] for name, values in self.per_token.items()}
        )

    def _with(self, input_ids: np.ndarray, trained: np.ndarray, per_token: dict[str, np.ndarray]) -> Sample:
        return Sample(
            input_ids,
            trained,
            per_token,
            dict(self.scalars),
            dict(self.media),
            self.row,
            self.group,
            self.policy_version,
            self.twin,
        )


Unit = tuple[Sample, ...]
"""Samples that must stay together: (text,), (chosen, rejected), the documents of one packed block."""
