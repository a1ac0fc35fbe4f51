"""Skeletons: what a template writes around the texts of conversations of one shape, kept to save the second render.

Once a conversation of a shape (which roles speak, in which order) has been read with marks, the next one is predicted: the
same literal text with its own pieces in between. If the prediction equals its plain render to the byte, its pieces stand
where the prediction put them, and so do the edges of its turns. If not, it is read with marks like the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.data.render.conversation import IMAGE, REASONING_FIELDS, Conversation, is_image
from posttrain.data.render.marks import MarkedRender

Span = tuple[int, int]
SIMPLE_FIELDS = frozenset(["role", "content", *REASONING_FIELDS])
MAX_SHAPES = 10_000


@dataclass(frozen=True)
class Skeleton:
    """Literal texts around the pieces. Places in them are kept as (number of the literal, offset in it)."""

    literals: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]  # of the trained spans
    control_tokens: tuple[tuple[int, int, int], ...]  # literal, start, end

    def read(self, pieces: list[str], text: str) -> tuple[list[Span], list[Span]] | None:
        """The trained spans and the template's control tokens, if `text` is these literals with `pieces` between them."""
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
        owned = [(starts[literal] + start, starts[literal] + end) for literal, start, end in self.control_tokens]
        return list(zip(places[::2], places[1::2])), owned


class Skeletons:
    """The skeletons seen so far, by shape."""

    def __init__(self) -> None:
        self._kept: dict[Any, Skeleton] = {}

    def read(self, shape: Any, pieces: list[str], text: str) -> tuple[list[Span], list[Span]] | None:
        skeleton = self._kept.get(shape)
        return None if skeleton is None else skeleton.read(pieces, text)

    def keep(self, shape: Any, pieces: list[str], marked: MarkedRender, spans: list[Span]) -> None:
        """Remembers a conversation that was read with marks, if its pieces stand in it once each, in order, unchanged.

        Where the generation prompt continues after the header of a turn ("<think>"), the turn begins later for a text that
        continues in the same way: such turns are read one by one. What a template writes for an image is literal.
        """
        places = [place for place in marked.places if place.piece.kind != IMAGE]
        if (
            marked.cuts_prompts
            or len(self._kept) >= MAX_SHAPES
            or [marked.text[place.start : place.end] for place in places] != pieces
        ):
            return
        starts, ends = [place.start for place in places], [place.end for place in places]
        literals = list(zip([0, *ends], [*starts, len(marked.text)]))
        edges = [_in_literal(literals, edge) for span in spans for edge in span]
        tokens = [(_in_literal(literals, start), end - start) for start, end in marked.owned_control_tokens]
        if any(end < start for start, end in literals) or None in edges or any(place is None for place, _ in tokens):
            return
        self._kept[shape] = Skeleton(
            tuple(marked.text[start:end] for start, end in literals),
            tuple(edges),
            tuple((*place, place[1] + size) for place, size in tokens),
        )


def _in_literal(literals: list[Span], position: int) -> tuple[int, int] | None:
    """The last literal that holds (or ends at) a position, and the offset in it; None for the middle of a piece."""
    holding = [number for number, (start, end) in enumerate(literals) if start <= position <= end]
    return (holding[-1], position - literals[holding[-1]][0]) if holding else None


def shape_of(chat: Conversation) -> tuple[Any, list[str]] | None:
    """The shape of a conversation and its pieces in order; None if it holds more than plain texts."""
    if chat.tools:
        return None
    shape, pieces = [repr(chat.template_kwargs) if chat.template_kwargs else ""], []
    for message in chat.messages:
        kinds: tuple[str, ...] = ()  # of the parts of a content that is a list
        for field, value in message.items():
            texts = [value]
            if field == "content" and isinstance(value, list):
                kinds = tuple(map(_kind_of, value))
                texts = [part["text"] for part, kind in zip(value, kinds) if kind == "text"]
            if (
                field not in SIMPLE_FIELDS
                or not value
                or "" in kinds
                or not all(t and isinstance(t, str) for t in texts)
            ):
                return None
            if field != "role":
                pieces += texts
        shape.append((message["role"], *message, kinds))
    return tuple(shape), pieces


def _kind_of(part: Any) -> str:
    """Of a part that is a text or an image and nothing else; "" for others."""
    if is_image(part):
        return IMAGE
    return "text" if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text" else ""
