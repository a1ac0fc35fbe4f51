"""RowImage: an image of a row as conversations carry it, from the check of the row to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RowImage:
    """What is known of an image once its header was read; pixels are made later, from where `key` is found."""

    key: bytes  # 16 bytes, see `ImageSource.key`
    size: tuple[int, int]  # height, width of what the image processor is given


def named_by_key(messages: Any) -> Any:
    """A conversation whose image parts say which image they are: {"type": "image", "key": 32 hexadecimal digits}."""
    return with_images_as(messages, lambda image: {"type": "image", "key": image.key.hex()})


def with_images_as(messages: Any, part_of: Callable[[RowImage], dict[str, Any]]) -> Any:
    """A conversation with another part in the place of every image; anything else as it is."""

    def replaced(part: Any) -> Any:
        image = part.get("image") if isinstance(part, dict) else None
        return part_of(image) if isinstance(image, RowImage) else part

    return _with_parts(messages, replaced)


def found_by_key(messages: Any, images: Mapping[bytes, RowImage]) -> Any:
    """What `named_by_key` was given, the images being among `images`."""

    def found(part: Any) -> Any:
        is_named = isinstance(part, dict) and part.get("type") == "image" and "key" in part
        return {"type": "image", "image": images[bytes.fromhex(part["key"])]} if is_named else part

    return _with_parts(messages, found)


def _with_parts(messages: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(messages, list):
        return messages
    return [
        {**message, "content": [change(part) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
