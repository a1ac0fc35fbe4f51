"""Marks: a conversation whose pieces can be identified after a chat template has rendered it.

Each piece of a message's text is wrapped in two characters of Unicode's private plane 16, a pair of its own. Taking
the marks out of the marked render must give the plain render to the byte; then the place of every piece in the plain render
is known, without knowing anything about the template.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from posttrain.data.render.conversation import IMAGE, REASONING_FIELDS, RenderError, is_image
from posttrain.data.render.special_tokens import ControlTokens

MARK_BASE = 0x100000
DATA_MARK = 0x10FFFD  # stands before the text of a control token inside a message, a tool or a template argument
_MARKS = re.compile("([\U00100000-\U0010fffd])")
_ESCAPED_MARKS = re.compile(
    "([\U00100000-\U0010fffd]|\\\\u[dD][bB][c-fC-F][0-9a-fA-F]\\\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\\\U0010[0-9a-fA-F]{4})"
)
MAX_PIECES = (DATA_MARK - MARK_BASE) // 2

STRUCTURE_FIELDS = ("role", "type")  # templates compare these with words of their own, so they are never marked


@dataclass(frozen=True)
class Piece:
    """A piece of text in a chat: which message it belongs to and which part of it."""

    message: int
    kind: str  # "content", "reasoning", "tool call name", "tool call argument", "tool call arguments", "image"
    text: str


@dataclass(frozen=True)
class Place:
    """Where a piece stands in the rendered text, and whether it stands there unchanged."""

    piece: Piece
    start: int
    end: int
    verbatim: bool


UNMARKED = "unmarked"
PLACEMENTS: dict[str, Callable[[str], tuple[int, int]]] = {
    "around": lambda text: (0, len(text)),
    "inside": lambda text: (len(text) - len(text.lstrip()), len(text.rstrip())),
    "middle": lambda text: (len(text) // 2, len(text) // 2),
}
"""Where the two marks go: around all of a text (a template that trims it is found out), inside its outer white space
(trimming is allowed), or both in its middle (tests such as `content.startswith(...)` are not disturbed)."""


@dataclass
class Marker:
    """Builds the marked copy of one conversation and remembers its pieces."""

    trained_messages: frozenset[int]  # messages whose text is trained, and so must survive unchanged
    trained_placement: str
    context_placement: str
    mark_names: bool
    control: ControlTokens  # their texts in the data are marked as well
    pieces: list[Piece] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each piece: where its marks were put
    unmarked: list[Piece] = field(default_factory=list)  # white space that may be trimmed away
    # they carry no marks: the template writes a control token for each
    images: list[Piece] = field(default_factory=list)
    kinds: dict[int, tuple[str, ...]] = field(default_factory=dict)  # see `MarkedRender`

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._message(number, message) for number, message in enumerate(messages)]

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        marked = {}
        for key, value in message.items():
            if key == "content":
                marked[key] = self._content(number, value)
            elif key in REASONING_FIELDS and isinstance(value, str):
                marked[key] = self._piece(number, "reasoning", value)
            elif key == "tool_calls" and isinstance(value, list):
                marked[key] = [self._tool_call(number, call) for call in value]
            else:
                marked[key] = self._field(key, value)
        return marked

    def _field(self, key: str, value: Any) -> Any:
        if key not in STRUCTURE_FIELDS:
            return self.data(value)
        if isinstance(value, str) and self.control.occurs_in(value):
            raise RenderError(f"The field {key!r} of a message holds the text of a control token: {value!r}.")
        return value

    def _content(self, number: int, content: Any) -> Any:
        if isinstance(content, str):
            return self._piece(number, "content", content)
        if isinstance(content, list):
            return [self._content(number, block) for block in content]
        if is_image(content) and self.control.image_mark:
            self.images.append(Piece(number, IMAGE, self.control.image_mark))
            self._add_kind(number, IMAGE)
            return content
        if isinstance(content, dict) and "type" in content:  # a block: only its text is content
            return {key: self._block_field(number, key, value) for key, value in content.items()}
        if isinstance(content, dict):  # the result of a tool as it is
            return {self.data(key): self._content(number, value) for key, value in content.items()}
        return content

    def _add_kind(self, number: int, kind: str) -> None:
        self.kinds[number] = (*self.kinds.get(number, ()), kind)

    def _block_field(self, number: int, key: str, value: Any) -> Any:
        if key == "text" and isinstance(value, str):
            return self._piece(number, "content", value)
        return self._field(key, value)

    def _tool_call(self, number: int, call: Any) -> Any:
        if not isinstance(call, dict):
            return self.data(call)
        if isinstance(call.get("function"), dict):
            rest = {key: self._field(key, value) for key, value in call.items()}
            return rest | {"function": self._tool_call(number, call["function"])}
        marked = {}
        for key, value in call.items():
            if key == "name" and isinstance(value, str) and self.mark_names:
                marked[key] = self._piece(number, "tool call name", value)
            elif key == "arguments" and isinstance(value, str):
                marked[key] = self._piece(number, "tool call arguments", value)
            elif key == "arguments":
                marked[key] = self._arguments(number, value)
            else:
                marked[key] = self._field(key, value)
        return marked

    def _arguments(self, number: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._piece(number, "tool call argument", value)
        if isinstance(value, dict):
            return {self.data(key): self._arguments(number, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._arguments(number, item) for item in value]
        return value

    def data(self, value: Any) -> Any:
        """`value` with a mark before the text of each control token in it."""
        if isinstance(value, str):
            return self._with_data_marks(value, 0, len(value))
        if isinstance(value, dict):
            return {self.data(key): self.data(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.data(item) for item in value]
        return value

    def _piece(self, number: int, kind: str, text: str) -> str:
        placement = self.trained_placement if number in self.trained_messages else self.context_placement
        if placement == UNMARKED:
            return self.data(text)
        start, end = PLACEMENTS[placement](text)
        # An empty text stays empty: templates ask whether there is any. So does white space that may be trimmed away.
        if not text or start > end or (start == end and placement == "inside"):
            if text:
                self.unmarked.append(Piece(number, kind, text))
            return self.data(text)
        if len(self.pieces) == MAX_PIECES:
            raise RenderError(f"The conversation has more than {MAX_PIECES:,} pieces of text; split it.")
        opening = chr(MARK_BASE + 2 * len(self.pieces))
        closing = chr(MARK_BASE + 2 * len(self.pieces) + 1)
        self.pieces.append(Piece(number, kind, text))
        self._add_kind(number, kind)
        self.spans.append((start, end))
        edges = ((0, start), (start, end), (end, len(text)))
        head, core, tail = (self._with_data_marks(text, *part) for part in edges)
        return f"{head}{opening}{core}{closing}{tail}"

    def _with_data_marks(self, text: str, start: int, end: int) -> str:
        """`text[start:end]` with a mark before each control token that begins in it."""
        if not self.control.occurs_in(text):
            return text[start:end]
        starts = [found for found in self.control.find_starts(text) if start <= found < end]
        edges = [start, *starts, end]
        return chr(DATA_MARK).join(text[a:b] for a, b in pairwise(edges))


@dataclass
class MarkedRender:
    """The plain render, with the place of every piece whose marks survived."""

    text: str
    places: list[Place]
    lost: list[Piece]
    kinds: dict[int, tuple[str, ...]]  # message -> kinds of its pieces, in the order of the message
    trained_messages: frozenset[int]  # messages that are trained
    owned_control_tokens: list[tuple[int, int]]  # control tokens that the template wrote, not the data
    image_marks: list[tuple[int, int]]  # those of them that stand for images
    cuts_prompts: bool = False  # a turn was found to begin before the end of what the generation prompt would be

    def places_of(self, message: int) -> list[Place]:
        return [place for place in self.places if place.piece.message == message]


def read_marks(plain: str, marked: str, marker: Marker) -> MarkedRender | None:
    """Finds the places of the pieces; None if the marked text without its marks is not the plain text."""
    for pattern in (_MARKS, _ESCAPED_MARKS):
        parts = pattern.split(marked)
        if "".join(parts[::2]) == plain:
            break
    else:
        return None
    found: dict[int, list[int]] = {}
    position, owned = 0, []
    for index in range(0, len(parts), 2):
        code = _mark_code(parts[index - 1]) if index else 0
        if index:
            found.setdefault(code, []).append(position)
        spans = marker.control.find(parts[index])
        owned += [(position + a, position + b) for a, b in spans if not (code == DATA_MARK and a == 0)]
        position += len(parts[index])
    places, lost = [], [*marker.unmarked]
    for number, (piece, span) in enumerate(zip(marker.pieces, marker.spans)):
        openings = found.get(MARK_BASE + 2 * number, [])
        closings = found.get(MARK_BASE + 2 * number + 1, [])
        if not openings and not closings:
            lost.append(piece)
        standing = _places(plain, piece, span, openings, closings)
        # A template may name the tool again beside its result; only the call itself is the assistant's.
        places += standing[:1] if piece.kind == "tool call name" else standing
    owned = [(a, b) for a, b in owned if not any(place.start < b and a < place.end for place in places)]
    image_marks = [(a, b) for a, b in owned if plain[a:b] == marker.control.image_mark]
    places += [Place(piece, a, b, True) for piece, (a, b) in zip(marker.images, image_marks)]
    places.sort(key=lambda place: (place.start, place.end))
    return MarkedRender(plain, places, lost, marker.kinds, marker.trained_messages, owned, image_marks)


def common_prefix(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071 - by characters, not by parts of a path


def _mark_code(mark: str) -> int:
    """The code point of a mark that came through as itself, as a JSON surrogate pair, or as a Python escape."""
    if len(mark) == 1:
        return ord(mark)
    return ord(json.loads(f'"{mark}"')) if mark[1] == "u" else int(mark[2:], 16)


def _places(plain: str, piece: Piece, span: tuple[int, int], openings: list[int], closings: list[int]) -> list[Place]:
    """Where the marks of one piece stand. A pair gives the place at once; of a lone mark, the text beside it must agree."""
    start, end = span
    core = piece.text[start:end]
    if start == end:  # both marks in the middle of the text
        before, after = piece.text[:start], piece.text[end:]
        return [
            Place(piece, at - len(before), at + len(after), True)
            if plain.endswith(before, 0, at) and plain.startswith(after, at)
            else Place(piece, at, at, False)
            for at in openings
        ]
    if len(openings) == len(closings):
        trail = piece.text[end:]
        return [
            Place(piece, a, b + len(trail) * plain.startswith(trail, b), a <= b and _matches(plain[a:b], piece, core))
            for a, b in zip(openings, closings)
        ]
    if not openings:
        return [
            Place(piece, max(b - len(core), 0), b, True) if plain.endswith(core, 0, b) else Place(piece, b, b, False)
            for b in closings
        ]
    if not closings:
        return [
            Place(piece, a, a + len(core), True) if plain.startswith(core, a) else Place(piece, a, a, False)
            for a in openings
        ]
    return [Place(piece, at, at, False) for at in sorted(openings + closings)]


def _matches(rendered: str, piece: Piece, core: str) -> bool:
    """Whether `rendered` is `core`, or, for an argument of a tool call, a quoted form of it (JSON, Python, ...)."""
    if rendered == core:
        return True
    if piece.kind != "tool call argument":
        return False
    quoted = {json.dumps(core)[1:-1], json.dumps(core, ensure_ascii=False)[1:-1]}
    return rendered in quoted or rendered.replace("\\", "") in {form.replace("\\", "") for form in quoted}
