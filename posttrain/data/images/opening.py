"""Payload of a row -> ImageSource: what is known of an image without decoding it, and its pixels when asked.

`open_image` is the only way to Pillow's readers, `ImageSource.rgb` the only one to decoded pixels. Image processors, which open any
path and fetch any URL that they are given, are only ever handed what `rgb` returns.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import xxhash
from PIL import ExifTags, Image

from posttrain.data.images.conversion import check_mode, exif_orientation, shrink, size_within, to_rgb
from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.payloads import Content, StoredFile, content_of
from posttrain.data.images.strict_pillow import has_late_metadata, opened, pillow_errors

KEY_VERSION = 1
"""Part of every content key; it rises when the same bytes would be decoded to other pixels."""
PIXELS = "pixels"
"""The format of images that arrive decoded."""


@dataclass(frozen=True)
class ImageSource:
    """An image that has not been decoded yet, or need not be."""

    key: bytes
    """16 bytes: xxh3-128 of what the image is and of what changes how it is decoded."""
    format: str
    """By content: one of FORMATS, or `pixels`."""
    mode: str
    """Pillow's word for the pixels of the file."""
    height: int
    """After EXIF rotation, before shrinking."""
    width: int
    num_bytes: int
    """Undecoded; of images that arrive decoded, of their RGB pixels."""
    has_more_frames: bool
    """An animation, or a file of several pages: only the first is read."""
    ignores_profile: bool
    """CMYK with a colour profile, which is not applied."""
    name: str
    content: Content
    limits: ImageLimits

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of `rgb()`."""
        return size_within(self.height, self.width, self.limits.max_pixels)

    def carried(self) -> ImageSource:
        """With the bytes of its file, for a process that may not have it."""
        if not isinstance(self.content, StoredFile):
            return self
        with self.content.open() as file:
            return replace(self, content=file.read())

    def rgb(self) -> Image.Image:
        """Upright, RGB, what is transparent on white, shrunk to `max_pixels`; a new image at every call."""
        if isinstance(self.content, Image.Image):
            return shrink(self.content.copy(), self.limits.max_pixels)
        with _file(self.content) as file, pillow_errors(self.name):
            decoded = to_rgb(opened(file, self.name), self.name)
        if (decoded.height, decoded.width) != (self.height, self.width):
            raise BadImage(
                "image_format",
                f"{self.name}: by its header it is {self.height} x {self.width}, decoded {decoded.height} x {decoded.width}.",
            )
        return shrink(decoded, self.limits.max_pixels)


def open_image(payload: Any, limits: ImageLimits) -> ImageSource:
    """Facts about an image, from its header; with `limits.check` other than "header" it is decoded once to see that it can be.

    `payload`: a PIL image, {"bytes", "path"} as `datasets` has it, bytes, a uint8 array or tensor of (H, W), (H, W, 3 or 4) or
    (3 or 4, H, W), a path, or a data, http or https URL. Raises BadImage for everything that is wrong with it.
    """
    source = _source(payload, limits, may_download=True)
    if limits.decodes:
        source.rgb()
    return source


def reopen_image(payload: Any, limits: ImageLimits, key: bytes) -> ImageSource:
    """What `open_image` found at preparation under the same limits, without the network and without a decode check.

    image_changed where it is another image by now. `payload` may be what was found, `carried` from another process.
    """
    source = payload if isinstance(payload, ImageSource) else _source(payload, limits, may_download=False)
    if source.key != key:
        raise BadImage("image_changed", f"{source.name} is not what it was at preparation: prepare the dataset again.")
    return source


def _source(payload: Any, limits: ImageLimits, may_download: bool) -> ImageSource:
    content, name = content_of(payload, limits, may_download)
    if isinstance(content, Image.Image):
        return _decoded_source(content, name, limits)
    if isinstance(content, bytes):
        key, num_bytes = _key(limits, "bytes", len(content), data=content), len(content)
    else:  # reading a million files to hash them would take longer than the rest of the preparation
        key, num_bytes = _key(limits, "file", content.path, content.num_bytes, content.mtime_ns), content.num_bytes
    with _file(content) as file:
        image = opened(file, name)
        _check_size(image.height, image.width, name, limits)
        check_mode(image, name)
        with pillow_errors(name):
            height, width = _upright_size(image, file)
            more = getattr(image, "is_animated", False)  # `n_frames` would read a file of a million frames to its end
    format = "JPEG" if image.format == "MPO" else image.format  # a JPEG file that holds further ones
    profile = image.mode == "CMYK" and "icc_profile" in image.info
    return ImageSource(key, format, image.mode, height, width, num_bytes, more, profile, name, content, limits)


def _decoded_source(image: Image.Image, name: str, limits: ImageLimits) -> ImageSource:
    """Pixels are hashed with their shape: those of 30 x 150 and 150 x 30 can be the same bytes."""
    _check_size(image.height, image.width, name, limits)
    with pillow_errors(name):
        picture = to_rgb(image, name)
    height, width, data = picture.height, picture.width, picture.tobytes()
    key = _key(limits, PIXELS, picture.mode, height, width, data=data)
    return ImageSource(key, PIXELS, image.mode, height, width, len(data), False, False, name, picture, limits)


def _upright_size(image: Image.Image, file: BinaryIO) -> tuple[int, int]:
    if image.format == "PNG" and has_late_metadata(file):
        image.load()
    is_swapped = ExifTags.Base.Orientation in getattr(image, "tag_v2", {})  # by Pillow, in the header of TIFF files
    if exif_orientation(image) >= 5 and not is_swapped:
        return image.width, image.height
    return image.height, image.width


def _key(limits: ImageLimits, *facts: Any, data: bytes = b"") -> bytes:
    digest = xxhash.xxh3_128(ascii((KEY_VERSION, limits.max_pixels, *facts)).encode())
    digest.update(data)
    return digest.digest()


def _file(content: bytes | StoredFile) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open()


def _check_size(height: int, width: int, name: str, limits: ImageLimits) -> None:
    if height * width > limits.bomb_pixels:
        raise BadImage(
            "image_bomb",
            f"{name} says it has {height:,} x {width:,} pixels, and `image_bomb_pixels` allows {limits.bomb_pixels:,} in "
            "all: it was not decoded.",
        )
    if min(size_within(height, width, limits.max_pixels)) < 2:
        shrunk = "" if min(height, width) < 2 else f", too thin to be shrunk to {limits.max_pixels:,} pixels"
        raise BadImage("image_too_small", f"{name} is {height} x {width}{shrunk}: both sides need two pixels or more.")
    if limits.max_aspect is not None and max(height, width) > limits.max_aspect * min(height, width):
        raise BadImage(
            "image_aspect",
            f"{name} is {height} x {width}; one side may be {limits.max_aspect:g} times the other at most: crop it.",
        )
