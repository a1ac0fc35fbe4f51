"""The images of a row: all payloads in one fixed order, and the row with each image in its place in the conversation.

A dataset says where its images are in many ways. All of them end as content parts `{"type": "image", "image": RowImage}`: the check
of a row opens every payload once, and what comes after knows keys and sizes only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.data.images.row_image import RowImage
from posttrain.data.rows.checks import Finding
from posttrain.data.rows.foreign_formats import CONVERSATION_COLUMNS, MESSAGE_COLUMNS, Row, parsed_messages

IMAGE_COLUMNS = ("image", "images")
IMAGE_PARTS = ("image", "image_url", "input_image")
PAYLOAD_KEYS = ("image", "bytes", "base64", "image_url", "url", "path")
PLACED_COLUMNS = (*MESSAGE_COLUMNS, "reference")
CHAT_COLUMNS = (*PLACED_COLUMNS, *CONVERSATION_COLUMNS, "input", "preferred_output", "non_preferred_output")
MARKER = "<image>"
"""What LLaVA's data, and all that was modelled on it, write into a text for an image."""
Use = Callable[[Any, str, str], Any]
"""(payload, its column, its place within the column in words) -> what takes the place of the payload."""
Message = dict[str, Any]


# ---- finding payloads ------------------------------------------------------------------------------------------------------


def row_images(row: Row) -> list[Any]:
    """The payloads of a row in the order in which the image table of a store numbers them: columns first, then messages."""
    return [payload for payload, _, _ in placed_payloads(row)]


def placed_payloads(row: Row) -> list[tuple[Any, str, str]]:
    """(payload, column, place in words) of every image of a row, in the order of `row_images`."""
    found: list[tuple[Any, str, str]] = []
    with_images_used(parsed_messages(row), lambda *image: found.append(image))
    return found


def with_images_used(row: Row, use: Use) -> Row:
    """The row with every payload replaced by what `use` gives for it; the row itself where it has none."""
    changed: Row = {}
    for column in IMAGE_COLUMNS:
        value = row.get(column)
        if isinstance(value, list | tuple):
            changed[column] = [use(payload, column, f"image {i}: ") for i, payload in enumerate(value)]
        elif value is not None:
            changed[column] = [use(value, column, "")]
    for column in CHAT_COLUMNS:
        value = row.get(column)
        messages = value.get("messages") if column == "input" and isinstance(value, Mapping) else value
        used = _used_in_messages(messages, column, use)
        if used is not messages:
            changed[column] = used if messages is value else {**value, "messages": used}
    return {**row, **changed} if changed else row


def _used_in_messages(messages: Any, column: str, use: Use) -> Any:
    if isinstance(messages, Mapping):
        messages = [messages]
    if not isinstance(messages, list) or not any(_parts(message) for message in messages):
        return messages
    return [_used_in_message(message, f"message {i}, ", column, use) for i, message in enumerate(messages)]


def _parts(message: Any) -> list[Any] | None:
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else None


def _used_in_message(message: Any, place: str, column: str, use: Use) -> Any:
    parts = _parts(message)
    if parts is None:
        return message
    used = list(parts)
    for i, part in enumerate(parts):
        payload = payload_of(part) if is_image_part(part) else None
        if payload is not None:
            used[i] = {"type": "image", "image": use(payload, column, f"{place}part {i}: ")}
    return {**message, ("content" if message.get("content") is parts else "value"): used}


def is_image_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def payload_of(part: Mapping[str, Any]) -> Any:
    """What an image part holds; None: its image stands in a column of the row."""
    key = next((key for key in PAYLOAD_KEYS if part.get(key) is not None), None)
    payload = None if key is None else part[key]
    if key == "image_url" and isinstance(payload, Mapping):
        return payload.get("url")
    if key == "base64" and isinstance(payload, str) and not payload.startswith("data:"):
        return f"data:image;base64,{payload}"
    return payload


def num_column_images(row: Row) -> int:
    return sum(column in IMAGE_COLUMNS for _, column, _ in placed_payloads(row))


# ---- placing images --------------------------------------------------------------------------------------------------------


def counts_markers(rows: Sequence[tuple[Row, int]]) -> bool:
    """Whether `<image>` in texts is where images stand: in every row there are as many as the row has images in columns.

    `rows` are in our own format, each with its number of such images.
    """
    counts = [
        (_places(_chats(row, by_marker=True)), _places(_chats(row, by_marker=False)), images) for row, images in rows
    ]
    has_markers = any(marked != unmarked for marked, unmarked, _ in counts)
    return has_markers and all(_firsts(marked, images) is not None for marked, _, images in counts)


def _chats(row: Row, by_marker: bool) -> dict[str, list[Any]]:
    return {column: _chat(row[column], by_marker) for column in PLACED_COLUMNS if _is_chat(row.get(column))}


def _places(chats: dict[str, list[Any]]) -> dict[str, int]:
    return {column: sum(map(_num_places, messages)) for column, messages in chats.items()}


def with_images_placed(row: Row, images: list[RowImage], by_marker: bool, found: list[Finding]) -> Row:
    """The row whose conversations have all images of its image columns in their place; a finding where there is no telling.

    Places are image parts without a payload and, `by_marker`, every `<image>` of a text, in the order of the messages. Of a pair,
    both sides may show the same images. Without any place, images come before the text of the first user's turn.
    """
    chats = _chats(row, by_marker)
    counts = _places(chats)
    if not images and not any(counts.values()):
        return row
    if not any(counts.values()) and not _has_image(chats):
        placed = {column: _before_question(messages, images) for column, messages in chats.items() if _asks(messages)}
    else:
        firsts = _firsts(counts, len(images)) or {}
        placed = {column: _fill(chats[column], iter(images[first:])) for column, first in firsts.items()}
    if not placed:
        found.append(_miscounted(row, images, counts))
        return row
    return {**row, **chats, **placed}


def _is_chat(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))


def _chat(value: Any, by_marker: bool) -> list[Any]:
    messages = [value] if isinstance(value, Mapping) else value
    return [_marked(message) if by_marker else message for message in messages]


def _marked(message: Any) -> Any:
    """The message with an image part in the place of every marker."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list) or not any(MARKER in text for text in map(_text_of, parts)):
        return message
    split = (_split(part) if MARKER in _text_of(part) else [part] for part in parts)
    return {**message, "content": list(itertools.chain.from_iterable(split))}


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _split(part: Any) -> list[Message]:
    first, *others = _text_of(part).split(MARKER)
    pieces = [{"type": "text", "text": first}]
    for text in others:
        pieces += [{"type": "image"}, {"type": "text", "text": text}]
    return [piece for piece in pieces if piece.get("text") != ""]


def _num_places(message: Any) -> int:
    return sum(_is_place(part) for part in _parts(message) or ())


def _is_place(part: Any) -> bool:
    return is_image_part(part) and not isinstance(part.get("image"), RowImage)


def _has_image(chats: dict[str, list[Any]]) -> bool:
    messages = (message for chat in chats.values() for message in chat)
    return any(is_image_part(part) for message in messages for part in _parts(message) or ())


def _asks(messages: list[Any]) -> bool:
    """Whether a conversation begins with the user's turn: a prompt, or a side of a pair that repeats it."""
    roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
    return next((role for role in roles if role not in ("system", "developer")), None) == "user"


def _before_question(messages: list[Any], images: list[RowImage]) -> list[Any]:
    asked = next(
        i for i, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "user"
    )
    content = messages[asked].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = [{"type": "image", "image": image} for image in images]
    return [*messages[:asked], {**messages[asked], "content": [*shown, *parts]}, *messages[asked + 1 :]]


def _firsts(counts: dict[str, int], images: int) -> dict[str, int] | None:
    """The first image of each column's places, if places are as many as images: over all columns, or in each side of a pair, after
    its prompt, or in each column alone. No counts fit two of these in different ways; None where they fit none."""
    prompt = counts.get("prompt", 0)
    sides = {column: count for column, count in counts.items() if column != "prompt"}
    if sum(counts.values()) == images:
        return dict(zip(counts, itertools.accumulate(counts.values(), initial=0)))
    if sides and all(prompt + count == images for count in sides.values()):
        return {column: 0 if column == "prompt" else prompt for column in counts}
    if any(counts.values()) and all(count in (0, images) for count in counts.values()):
        return dict.fromkeys(counts, 0)
    return None


def _fill(messages: list[Any], images: Iterator[RowImage]) -> list[Any]:
    def filled(part: Any) -> Any:
        return {"type": "image", "image": next(images)} if _is_place(part) else part

    return [
        {**message, "content": [filled(part) for part in _parts(message)]} if _num_places(message) else message
        for message in messages
    ]


def _miscounted(row: Row, images: list[RowImage], counts: dict[str, int]) -> Finding:
    column = next((name for name in IMAGE_COLUMNS if row.get(name) is not None), None)
    places = ", ".join(f"{count} in {name!r}" for name, count in counts.items()) or "no conversation"
    plural = "" if len(images) == 1 else "s"
    if column is None:
        column = next(name for name, count in counts.items() if count)
        reason = (
            f"has image parts without an image, and the row has neither 'image' nor 'images' to fill them ({places})"
        )
        return Finding("image_count", column, reason)
    reason = (
        f"holds {len(images)} image{plural}, which must be as many as the places for images in the messages ({places})"
    )
    return Finding("image_count", column, reason)
