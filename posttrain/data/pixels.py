"""PixelLoader: spans of images -> what the model's image encoder takes, made from the rows just before a batch is used.

The only caller of an image processor on real pictures, which it is handed decoded: processors open any path and fetch any URL.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from posttrain.core.sample import ImageSpan
from posttrain.core.vision import VisionFamily
from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.media import MediaFolder
from posttrain.data.images.opening import ImageSource, reopen_image
from posttrain.data.images.streamed_span import StreamedSpan
from posttrain.data.rows.row_images import CHAT_COLUMNS, IMAGE_COLUMNS, placed_payloads
from posttrain.data.store.building import RowSource
from posttrain.data.store.token_store import TokenStore
from posttrain.data.vision.augmentation import Augmentation
from posttrain.data.vision.seen import seen_picture

Tensors = dict[str, torch.Tensor]
PER_TILE = {"pixel_values": 5, "pixel_attention_mask": 4}
"""Arguments with an entry for each tile -> their axes where the processor puts one for the samples of a batch before."""


@dataclass(frozen=True)
class _Registered:
    """A dataset whose images can be found: rows as they are, and the store that says where each image is."""

    name: str
    rows: RowSource
    store: TokenStore
    limits: ImageLimits

    def open(self, key: bytes, row: int, number: int) -> tuple[ImageSource, str]:
        """The image, and where it stands, for messages."""
        (found,) = self.rows.rows(row, row + 1)
        payloads = placed_payloads(found)
        if number >= len(payloads):
            reason = f"{self.name}, row {row} has lost images since preparation: prepare the dataset again."
            raise BadImage("image_changed", reason)
        payload, column, place = payloads[number]
        where = f"{self.name}, row {row}, column {column!r}: {place}"
        with named(where):
            return reopen_image(payload, self.limits, key), where


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Whatever is wrong with an image is said with its place."""
    try:
        yield
    except BadImage as error:
        raise BadImage(error.kind, f"{where}{error}") from error


class PixelLoader:
    """Implements `collate.Pixels`. Datasets are added under the stores that were made of them; copies go into loader workers."""

    def __init__(
        self,
        family: VisionFamily,
        processor: Any,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        cache_bytes: int = 0,
        augmentation: Augmentation | None = None,
        media: MediaFolder | None = None,
    ) -> None:
        """`options` are those of preparation's ImageLayouts. Images that come again are kept in `cache_bytes` of memory; those that
        have a draw, to which `augmentation` is applied, do not come again. `media` has the images that no dataset has."""
        self.augmentation, self.media = augmentation, media
        self.family, self.image_processor, self.dtype = family, processor.image_processor, dtype
        # The processor has defaults of its own for the images that it is given, which differ from its image processor's.
        defaults = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("images_kwargs") or {}
        self.options = {**defaults, **(options or {}), "return_tensors": "pt"}
        self.cache = _Cache(cache_bytes)
        self._datasets: list[_Registered] = []

    def add(self, dataset: Any, store: TokenStore, name: str = "train") -> None:
        """Images of `dataset`, from which `store` was made; stores of texts need not be added."""
        limits = store.facts.get("image_limits")
        if limits is not None:
            rows = RowSource(dataset, {*IMAGE_COLUMNS, *CHAT_COLUMNS})
            self._datasets.append(_Registered(name, rows, store, ImageLimits(**limits)))

    def share_datasets(self, other: PixelLoader) -> None:
        """Find images where another loader, of another model, finds them."""
        self._datasets = other._datasets

    def load(self, images: Sequence[ImageSpan]) -> Tensors:
        """Arguments of the model's image encoder for these images, end to end."""
        return self._joined([self._made(image) if image.draw is not None else self._kept(image) for image in images])

    def _kept(self, image: ImageSpan) -> Tensors:
        return self.cache.get(image.key) or self.cache.put(image.key, self._made(image))

    def _made(self, image: ImageSpan) -> Tensors:
        picture, where = self._opened(image)
        if image.draw is not None:
            picture = self.augmentation(picture, image.draw)
        given = [[picture]] if self.family.pixels_in_one_row else [picture]
        try:
            inputs = self.image_processor(given, **self.options)
        except ValueError as error:
            raise ValueError(f"{where}{type(self.image_processor).__name__} refuses the image: {error}") from error
        arguments = {key: inputs[key] for key in self.family.forward_keys}
        self._check(image, arguments, where)
        return arguments

    def picture(self, image: ImageSpan) -> Image.Image:
        """RGB, as the image processor is given it; for engines that have an image processor of their own."""
        return self._opened(image)[0]

    def _opened(self, image: ImageSpan) -> tuple[Image.Image, str]:
        source, where = self.source(image)
        with named(where):
            return source.rgb(), where

    def source(self, image: ImageSpan) -> tuple[ImageSource, str]:
        """The image, and where it stands, for messages."""
        if isinstance(image, StreamedSpan):
            with named(image.place):
                return reopen_image(image.payload, image.limits, image.key), image.place
        for dataset in self._datasets:
            place = dataset.store.find_image(image.key)
            if place is not None:
                return dataset.open(image.key, *place)
        kept = None if self.media is None else self.media.find(image.key)
        if kept is not None:
            return kept, f"{self.media.path}: "
        names = ", ".join(dataset.name for dataset in self._datasets) or "none"
        folder = "" if self.media is None else f", nor in {self.media.path}, where the run keeps images of tools"
        raise LookupError(
            f"The image {image.key.hex()} is in none of the datasets that pixels are made of ({names}){folder}."
        )

    def seen(self, image: ImageSpan) -> Image.Image:
        """The picture that the model is shown, with the grid of its tiles or tokens."""
        pixels = self._made(image)[self.family.forward_keys[0]]
        return seen_picture(self.family, self.image_processor, pixels, image.grid)

    def _check(self, image: ImageSpan, arguments: Tensors, where: str) -> None:
        """Unwrap what has an axis for rows of a batch, cast, and compare with what preparation counted on."""
        name = self.family.forward_keys[0]
        for key, value in arguments.items():
            value = value[0] if key in PER_TILE and value.ndim == PER_TILE[key] else value
            arguments[key] = value.to(self.dtype) if value.is_floating_point() else value
        rows, expected = len(arguments[name]), self.family.pixel_rows(image.grid)
        if rows != expected:
            raise RuntimeError(
                f"{where}the image processor makes {rows} rows of pixels of an image of {image.size[0]} x {image.size[1]}, and "
                f"preparation counted on {expected}: its options are not those of preparation."
            )

    def _joined(self, made: list[Tensors]) -> Tensors:
        if self.family.pixels_in_one_row:
            return {key: _in_one_row([tensors[key] for tensors in made]) for key in self.family.forward_keys}
        return {key: torch.cat([tensors[key] for tensors in made]) for key in self.family.forward_keys}


def _in_one_row(tiles: list[torch.Tensor]) -> torch.Tensor:
    """(1, all tiles, ..., height, width), filled up to the largest with zeros."""
    height, width = (max(part.shape[axis] for part in tiles) for axis in (-2, -1))
    filled = [torch.nn.functional.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2])) for t in tiles]
    return torch.cat(filled)[None]


class _Cache:
    """Tensors of the images that were used last, of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self._kept: OrderedDict[bytes, Tensors] = OrderedDict()

    def get(self, key: bytes) -> Tensors | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: bytes, tensors: Tensors) -> Tensors:
        size = _num_bytes(tensors)
        if size <= self.limit:
            self._kept[key] = tensors
            self.used += size
            while self.used > self.limit:
                self.used -= _num_bytes(self._kept.popitem(last=False)[1])
        return tensors

    def __len__(self) -> int:
        return len(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit, "used": 0, "_kept": OrderedDict()}  # a worker begins with an empty one


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
