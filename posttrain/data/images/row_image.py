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


def named_by_key(messages: Any, with_sizes: bool = False) -> Any:
    """A conversation whose image parts say which image they are: {"type": "image", "key": 32 hexadecimal digits}."""
    return with_images_as(
        messages,
        lambda image: {"type": "image", "key": image.key.hex(), **({"size": [*image.size]} if with_sizes else {})},
    )


def with_images_as(messages: Any, part_of: Callable[[RowImage], dict[str, Any]]) -> Any:
    """A conversation with another part in the place of every image; anything else as it is."""

    def replaced(part: Any) -> Any:
        image = part.get("image") if isinstance(part, dict) else None
        return part_of(image) if isinstance(image, RowImage) else part

    return _with_parts(messages, replaced)


def found_by_key(messages: Any, images: Mapping[bytes, RowImage] | None = None) -> Any:
    """What `named_by_key` was given, the images being among `images`; None: it was asked for their sizes."""

    def found(part: Any) -> Any:
        is_named = isinstance(part, dict) and part.get("type") == "image" and "key" in part
        if not is_named:
            return part
        key = bytes.fromhex(part["key"])
        return {"type": "image", "image": RowImage(key, tuple(part["size"])) if images is None else images[key]}

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
