"""LazyPicture: an image for a user's function, opened where it is looked at.

Pickled it is its undecoded bytes, and what comes out in the other process is a PIL image whose header was read. It needs Pillow
alone: workers of rewards import this module.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from PIL import Image

from posttrain.data.images.strict_pillow import opened


class LazyPicture:
    """`read` gives undecoded bytes, or a picture that came decoded; it is called at the first look, and once."""

    def __init__(self, read: Callable[[], bytes | Image.Image]) -> None:
        self._read = read
        self._content: bytes | Image.Image | None = None
        self._opened: Image.Image | None = None

    @property
    def content(self) -> bytes | Image.Image:
        if self._content is None:
            self._content = self._read()
        return self._content

    def open(self) -> Image.Image:
        """The same object at every call."""
        if self._opened is None:
            self._opened = opened_picture(self.content)
        return self._opened

    def __reduce__(self) -> tuple[Any, ...]:
        return opened_picture, (self.content,)


def opened_picture(content: bytes | Image.Image) -> Image.Image:
    """As PIL has it: nothing is decoded before it is used."""
    return content if isinstance(content, Image.Image) else opened(io.BytesIO(content), "the image")


def with_pictures_opened(value: Any) -> Any:
    """Nested lists and dicts with PIL images in the places of LazyPictures."""
    if isinstance(value, LazyPicture):
        return value.open()
    if isinstance(value, list):
        return [with_pictures_opened(item) for item in value]
    if isinstance(value, dict):
        return {name: with_pictures_opened(item) for name, item in value.items()}
    return value


def has_pictures(value: Any) -> bool:
    """Anywhere in nested lists and dicts."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, LazyPicture | Image.Image) or any(map(has_pictures, items))
