"""Images of prompts for vLLM: opened here, by the trainer's own rules, and shown as the pixels that the trainer trains on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from posttrain.core.sample import ImageSpan
from posttrain.core.vision import VisionFamily
from posttrain.rollout.engines.protocol import WROTE_PLACEHOLDER, Prompt
from posttrain.serve.engine.shown_images import ShownImage, ShownImages
from posttrain.serve.recent import Recent
from posttrain.serve.wire.images import encode_image, image_key

KEPT_BYTES = 256 << 20
KEPT_KEYS = 100_000


class OpensPictures(Protocol):
    """What is asked of a PixelLoader."""

    family: VisionFamily

    def picture(self, image: ImageSpan) -> Image.Image:
        """RGB, upright, as the image processor is given it."""


@dataclass(frozen=True)
class SentImages:
    """The images of one prompt as they are sent to a server: their places, and their content when it is asked for."""

    entries: list[dict[str, Any]]  # key, start, stop
    mark: tuple[int, ...]
    options: Mapping[str, Any]
    read: Callable[[str], bytes]  # by key: what is sent where the server does not have it

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(entry["key"] for entry in self.entries))


class Pictures:
    """Opens one image at a time, in any thread; those that were used last are kept, as all samples of a group show them."""

    def __init__(
        self, source: OpensPictures, options: Mapping[str, Any] | None = None, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`options` are those that the trainer's image processor is called with."""
        self.family, self.options = source.family, dict(options or {})
        self.mark = (source.family.written_id,)
        self._source, self._opening = source, threading.Lock()
        self._pictures: Recent[bytes, Image.Image] = Recent(kept_bytes, KEPT_KEYS)
        self._keys: Recent[bytes, str] = Recent(KEPT_KEYS, KEPT_KEYS)

    def shown(self, prompt: Prompt) -> ShownImages | None:
        """For a vLLM in this process; None: the prompt has no images."""
        images = tuple(
            ShownImage(image.key.hex(), image.start, image.stop, self.open(image)) for image in prompt.images
        )
        return ShownImages(images, self.mark, self.options) if images else None

    def sent(self, prompt: Prompt) -> SentImages | None:
        """For a server."""
        if not prompt.images:
            return None
        spans = {self._key(image): image for image in prompt.images}
        entries = [{"key": self._key(image), "start": image.start, "stop": image.stop} for image in prompt.images]
        return SentImages(entries, self.mark, self.options, lambda key: encode_image(self.open(spans[key])))

    def open(self, image: ImageSpan) -> Image.Image:
        with self._opening:
            picture = self._pictures.get(image.key)
            if picture is None:
                picture = self._source.picture(image)
                self._pictures.put(image.key, picture, 3 * picture.height * picture.width)
            return picture

    def _key(self, image: ImageSpan) -> str:
        key = self._keys.get(image.key)
        if key is None:
            key = image_key(encode_image(self.open(image)))
            self._keys.put(image.key, key, 1)
        return key


def placeholder_in(ids: Sequence[int], forbidden: frozenset[int]) -> int | None:
    """Place of the first token that only an image may bring: vLLM draws it like any other, and the trainer has no image for it."""
    if forbidden.isdisjoint(ids):
        return None
    return next(place for place, token in enumerate(ids) if token in forbidden)


def placeholder_sentence(prompt: Prompt, token: int) -> str:
    return f"{WROTE_PLACEHOLDER} (id {token}) after prompt {prompt.key}: the completion ends before it."
