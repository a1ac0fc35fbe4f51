"""Sample: one token sequence and what is known about each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

KEEP_START, KEEP_END = "keep_start", "keep_end"


@dataclass(frozen=True)
class ImageSpan:
    """Where the tokens of an image stand in a sample, and which image it is. Never its pixels: those are made for each batch."""

    start: int  # first token of all that stands for the image, markers of the processor included
    stop: int  # one past the last
    key: bytes  # 16 bytes: what the image is, by content, and where to find it again
    size: tuple[int, int]  # height, width of what the image processor is given
    grid: tuple[int, ...]  # see `VisionFamily.grid_of`
    draw: int | None = None  # seeds the augmentation of this image in this batch; None: it is shown as it is

    def moved(self, by: int) -> Self:
        return replace(self, start=self.start + by, stop=self.stop + by)


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
    images: tuple[ImageSpan, ...] = ()  # in the order of their tokens
    positions: np.ndarray | None = None  # (3, tokens) of time, row and column; None: 0, 1, 2, ...
    row: int = -1  # number of the dataset row it came from
    group: int = -1  # samples of one prompt share a group
    policy_version: int = -1  # version of the weights that wrote it, for rollouts
    # another sequence about the same thing, which is scored beside this one and never trained
    twin: Sample | None = None

    def __post_init__(self) -> None:
        self.input_ids = np.asarray(self.input_ids, dtype=np.int32)
        self.trained = np.asarray(self.trained, dtype=bool)
        self.per_token = {name: np.asarray(values) for name, values in self.per_token.items()}
        for name, values in (("trained", self.trained), *self.per_token.items()):
            if len(values) != len(self.input_ids):
                raise ValueError(
                    f"Sample of row {self.row}: {name!r} has {len(values)} entries for {len(self.input_ids)} tokens."
                )
        if self.positions is not None and self.positions.shape != (3, len(self.input_ids)):
            raise ValueError(
                f"Sample of row {self.row}: positions of shape {self.positions.shape} for {len(self.input_ids)} tokens."
            )
        edges = [edge for image in self.images for edge in (image.start, image.stop)]
        if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= len(self.input_ids)):
            raise ValueError(
                f"Sample of row {self.row}: images at {edges} overlap, or lie outside of {len(self.input_ids)} tokens."
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

    def append(
        self,
        tokens: Any,
        trained: bool,
        *,
        images: tuple[ImageSpan, ...] = (),
        positions: np.ndarray | None = None,
        **per_token: Any,
    ) -> Sample:
        """This sample followed by `tokens`; numbers that are not given for the new tokens are 0.

        Spans of `images` and `positions` are counted from the first new token.
        """
        tokens = np.asarray(tokens, dtype=np.int32)
        columns = {}
        for name in self.per_token.keys() | per_token.keys():
            old, new = (
                None if part.get(name) is None else np.asarray(part[name]) for part in (self.per_token, per_token)
            )
            old = np.zeros((len(self), *new.shape[1:]), np.float32) if old is None else old
            new = np.zeros((len(tokens), *old.shape[1:]), old.dtype) if new is None else new
            columns[name] = np.concatenate([old, new])
        return replace(
            self,
            input_ids=np.concatenate([self.input_ids, tokens]),
            trained=np.concatenate([self.trained, np.full(len(tokens), trained)]),
            per_token=columns,
            scalars=dict(self.scalars),
            images=(*self.images, *(image.moved(len(self)) for image in images)),
            positions=self._continued(len(tokens), positions),
        )

    def _continued(self, added: int, positions: np.ndarray | None) -> np.ndarray | None:
        """What follows begins one past the largest position on any axis: the number of tokens only where there is no image."""
        if self.positions is None and positions is None:
            return None
        own, new = (
            np.tile(np.arange(tokens, dtype=np.int32), (3, 1)) if given is None else given
            for given, tokens in ((self.positions, len(self)), (positions, added))
        )
        return np.concatenate([own, new + np.int32(own.max(initial=-1) + 1)], axis=1)

    def truncate(self, max_length: int | None, mode: str = KEEP_START) -> Sample:
        """The first (or last) `max_length` tokens; the sample itself when it is short enough. No cut splits an image."""
        if max_length is None or len(self) <= max_length:
            return self
        if mode not in (KEEP_START, KEEP_END):
            raise ValueError(f"A sample is cut by {KEEP_START!r} or {KEEP_END!r}, not by {mode!r}.")
        return self.slice(0, max_length) if mode == KEEP_START else self.slice(len(self) - max_length, len(self))

    def slice(self, start: int, stop: int) -> Sample:
        """Tokens `start` to `stop`, with everything that is aligned with them. An image is kept whole or left out whole."""
        part = slice(start, stop)
        kept = tuple(image for image in self.images if image.start < stop and image.stop > start)
        for image in kept:
            if image.start < start or image.stop > stop:
                raise ValueError(
                    f"Sample of row {self.row}: a cut at tokens {start} to {stop} would split the image at {image.start} to "
                    f"{image.stop}."
                )
        return replace(
            self,
            input_ids=self.input_ids[part],
            trained=self.trained[part],
            per_token={name: values[part] for name, values in self.per_token.items()},
            scalars=dict(self.scalars),
            images=tuple(image.moved(-start) for image in kept),
            positions=None if self.positions is None else self.positions[:, part],
        )


Unit = tuple[Sample, ...]
"""Samples that must stay together: (text,), (chosen, rejected), the documents of one packed block."""
