"""Skeletons: what a template writes around the texts of conversations of one shape, kept to save the second render.

Once a conversation of a shape (which roles speak, in which order) has been read with marks, the next one is predicted: the
same literal text with its own pieces in between. If the prediction equals its plain render to the byte, its pieces stand
where the prediction put them, and so do the edges of its turns. If not, it is read with marks like the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.data.conversation import REASONING_FIELDS, Conversation
from posttrain.data.marks import MarkedRender

Span = tuple[int, int]
SIMPLE_FIELDS = frozenset(["role", "content", *REASONING_FIELDS])
MOST_SHAPES = 10_000


@dataclass(frozen=True)
class Skeleton:
    """Literal texts around the pieces, and the edges of spans as (number of the literal, offset in it)."""

    literals: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    def spans(self, pieces: list[str], text: str) -> list[Span] | None:
        """The spans in `text`, if it is these literals with these pieces between them."""
        parts = [self.literals[0]]
        for piece, literal in zip(pieces, self.literals[1:]):
            parts += (piece, literal)
        if "".join(parts) != text:
            return None
        starts, position = [], 0  # of the literals
        for number, part in enumerate(parts):
            if number % 2 == 0:
                starts.append(position)
            position += len(part)
        places = [starts[literal] + offset for literal, offset in self.edges]
        return list(zip(places[::2], places[1::2]))


class Skeletons:
    """The skeletons seen so far, by shape."""

    def __init__(self) -> None:
        self._kept: dict[Any, Skeleton] = {}

    def spans(self, shape: Any, pieces: list[str], text: str) -> list[Span] | None:
        skeleton = self._kept.get(shape)
        return None if skeleton is None else skeleton.spans(pieces, text)

    def keep(self, shape: Any, pieces: list[str], marked: MarkedRender, spans: list[Span]) -> None:
        """Remembers a conversation that was read with marks, if its pieces stand in it once each, in order, unchanged."""
        places = marked.places
        if len(self._kept) >= MOST_SHAPES or [marked.text[place.start : place.end] for place in places] != pieces:
            return
        ends = [0, *(place.end for place in places)]
        starts = [*(place.start for place in places), len(marked.text)]
        if any(start < end for end, start in zip(ends, starts)):
            return
        edges = []
        for edge in (edge for span in spans for edge in span):
            inside = [number for number, (begin, end) in enumerate(zip(ends, starts)) if begin <= edge <= end]
            if not inside:  # in the middle of a piece
                return
            edges.append((inside[-1], edge - ends[inside[-1]]))
        literals = tuple(marked.text[begin:end] for begin, end in zip(ends, starts))
        self._kept[shape] = Skeleton(literals, tuple(edges))


def shape_of(chat: Conversation) -> tuple[Any, list[str]] | None:
    """The shape of a conversation and its pieces in order; None if it holds more than plain texts."""
    if chat.tools:
        return None
    shape, pieces = [repr(chat.template_kwargs) if chat.template_kwargs else ""], []
    for message in chat.messages:
        for field, value in message.items():
            if field not in SIMPLE_FIELDS or not value or not isinstance(value, str):
                return None
            if field != "role":
                pieces.append(value)
        shape.append((message["role"], *message))
    return tuple(shape), pieces
