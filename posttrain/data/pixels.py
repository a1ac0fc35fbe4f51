"""PixelLoader: spans of images -> what the model's image encoder takes, made from the rows just before a batch is used.

The only caller of an image processor on real pictures, which it is handed decoded: processors open any path and fetch any URL.
"""

from __future__ import annotations

import contextlib
import copy
import math
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
from posttrain.data.vision.augmentation import Augmentation, AugmentationError
from posttrain.data.vision.seen import seen_picture

Tensors = dict[str, torch.Tensor]
PIXELS_AT_ONCE = 1 << 20
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
    """Whatever is wrong with an image, or cannot be done to it, is said with its place."""
    try:
        yield
    except BadImage as error:
        raise BadImage(error.kind, f"{where}{error}") from error
    except AugmentationError as error:
        raise AugmentationError(f"{where}{error}") from error


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

    def without_datasets(self) -> PixelLoader:
        """For a process that is sent spans as `carrying` makes them."""
        made = copy.copy(self)
        made._datasets = []
        return made

    def carrying(self, images: Sequence[ImageSpan]) -> tuple[StreamedSpan, ...]:
        """The spans with their images, undecoded; one that is shown twice is one object, which pickle sends once."""
        found = {image.key: self.source(image) for image in images}
        found = {key: (source.carried(), where) for key, (source, where) in found.items()}
        return tuple(StreamedSpan.of(i, found[i.key][0], found[i.key][0].limits, found[i.key][1]) for i in images)

    def load(self, images: Sequence[ImageSpan]) -> Tensors:
        """Arguments of the model's image encoder for these images, end to end."""
        wanted = {(image.key, image.draw): image for image in images}
        known = {what: self.cache.get(what[0]) for what, image in wanted.items() if image.draw is None}
        for run in self._runs([image for what, image in wanted.items() if known.get(what) is None]):
            for image, made in zip(run, self._made(run), strict=True):
                known[image.key, image.draw] = made if image.draw is not None else self.cache.put(image.key, made)
        return self._joined([known[image.key, image.draw] for image in images])

    def _runs(self, images: Sequence[ImageSpan]) -> list[list[ImageSpan]]:
        """Images that the image processor is given together: a call costs as much as a small picture. Large ones come alone, as do
        those of families that fill pictures up to the tiles of others."""
        runs: list[list[ImageSpan]] = []
        pixels = 0
        for image in images:
            pixels += math.prod(image.size)
            if not runs or pixels > PIXELS_AT_ONCE or not self.family.tower_has_bounds:
                runs.append([])
                pixels = math.prod(image.size)
            runs[-1].append(image)
        return runs

    def _made(self, images: Sequence[ImageSpan]) -> list[Tensors]:
        pictures, where = zip(*map(self._opened, images))
        drawn = [self._drawn(*one) for one in zip(images, pictures, where)]
        name, rows = self.family.forward_keys[0], [self.family.pixel_rows(image.grid) for image in images]
        try:
            inputs = self.image_processor([drawn] if self.family.pixels_in_one_row else drawn, **self.options)
        except ValueError as error:
            if len(images) == 1:
                raise ValueError(
                    f"{where[0]}{type(self.image_processor).__name__} refuses the image: {error}"
                ) from error
            inputs = {name: ()}
        if len(images) == 1:
            return [self._checked(images[0], {key: inputs[key] for key in self.family.forward_keys}, where[0])]
        if len(inputs[name]) != sum(rows):  # something is wrong with one of them, which says so by itself
            return [one for image in images for one in self._made([image])]
        apart = [inputs[key].split(rows if key == name else 1) for key in self.family.forward_keys]
        parts = (dict(zip(self.family.forward_keys, map(torch.clone, part))) for part in zip(*apart, strict=True))
        return [self._checked(*one) for one in zip(images, parts, where, strict=True)]

    def _drawn(self, image: ImageSpan, picture: Image.Image, where: str) -> Image.Image:
        with named(where):
            return picture if image.draw is None else self.augmentation(picture, image.draw)

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
        pixels = self._made([image])[0][self.family.forward_keys[0]]
        return seen_picture(self.family, self.image_processor, pixels, image.grid)

    def _checked(self, image: ImageSpan, arguments: Tensors, where: str) -> Tensors:
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
        return arguments

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
