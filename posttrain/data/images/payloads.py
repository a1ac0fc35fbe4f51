"""What a row has for an image -> a picture, bytes, or a file that may be opened.

A dataset is text from elsewhere: nothing that it names is opened or fetched unless `ImageLimits` allow it.
"""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
from PIL import Image

from posttrain.data.images.limits import DECODE, BadImage, ImageLimits, shown

LONGEST_PATH = 4096
SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was first opened."""

    path: str
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, file: BinaryIO) -> StoredFile:
        found = os.fstat(file.fileno())
        return cls(path, found.st_size, found.st_mtime_ns)

    def open(self) -> BinaryIO:
        file = open_regular(self.path)
        if StoredFile.of(self.path, file) != self:
            file.close()
            raise BadImage("image_changed", f"{self.path} was changed after preparation: prepare the dataset again.")
        return file


Content = bytes | StoredFile | Image.Image


def content_of(payload: Any, limits: ImageLimits, may_download: bool) -> tuple[Content, str]:
    """The image behind a payload, and how messages name it."""
    if isinstance(payload, Mapping):
        payload = _of_dict(payload)
    if payload is None:
        raise BadImage("image_null", "There is null where an image should be.")
    if isinstance(payload, Image.Image):
        return payload, "the PIL image"
    if isinstance(payload, np.ndarray | torch.Tensor):
        return _of_array(payload), f"the array of shape {tuple(payload.shape)}"
    if isinstance(payload, bytes | bytearray | memoryview):
        return _within_limit(bytes(payload), name := "the image in bytes", limits), name
    if isinstance(payload, str) and payload[:5].lower() == "data:":
        return _within_limit(_of_data_url(payload, limits), name := "the image in a data URL", limits), name
    if isinstance(payload, str) and SCHEME.match(payload):
        return _within_limit(_of_url(payload, limits, may_download), name := shown(payload), limits), name
    if isinstance(payload, str | os.PathLike):
        return _of_path(os.fsdecode(payload), limits)
    raise BadImage(
        "image_type",
        f"An image is given as {type(payload).__name__}; it must be a PIL image, bytes, a dict of bytes and path, "
        "a uint8 array or tensor, a path or a URL.",
    )


def undecoded(payload: Any, limits: ImageLimits) -> bytes | Image.Image:
    """The bytes of an image, or the picture where it came decoded, for who is not handed what the model is shown."""
    content, _ = content_of(payload, replace(limits, check=DECODE), may_download=False)
    return content.open().read() if isinstance(content, StoredFile) else content


def _of_dict(payload: Mapping[str, Any]) -> Any:
    """As `datasets` has images that it did not decode: the bytes, or else the path."""
    if not payload or not set(payload) <= {"bytes", "path"}:
        raise BadImage("image_type", f'An image is a dict of {sorted(payload)}; it must have "bytes" or "path".')
    return payload.get("path") if payload.get("bytes") is None else payload["bytes"]


def _of_array(pixels: np.ndarray | torch.Tensor) -> Image.Image:
    if pixels.dtype not in (np.uint8, torch.uint8):
        raise BadImage("image_mode", f"An array of pixels has dtype {pixels.dtype}; it must be uint8, from 0 to 255.")
    array = pixels.detach().cpu().numpy() if isinstance(pixels, torch.Tensor) else pixels
    first, last = (array.ndim == 3 and array.shape[axis] in (3, 4) for axis in (0, 2))
    if first and last:
        which = "(channels, H, W) or (H, W, channels)"
        raise BadImage("image_type", f"An array of shape {array.shape} may be {which}: give a PIL image instead.")
    if array.ndim != 2 and not first and not last:
        known = "(H, W), (H, W, 3) or (3, H, W)"
        raise BadImage("image_type", f"An array of pixels has shape {array.shape}; it must be {known}.")
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0) if first else array))


def _of_data_url(url: str, limits: ImageLimits) -> bytes:
    kind, comma, text = url.partition(",")
    if len(text) > 4 * limits.max_bytes:  # longer than base64 or percent signs can make it
        raise _too_large("the image in a data URL", len(text) // 4, limits)
    try:
        if not comma:
            raise ValueError("it has no comma")
        data = unquote_to_bytes(text)
        return base64.b64decode(data, validate=True) if kind.lower().endswith(";base64") else data
    except ValueError as error:
        raise BadImage("image_url", f"A data URL ({url[:40]}...) cannot be read: {error}.") from error


def _of_url(url: str, limits: ImageLimits, may_download: bool) -> bytes:
    if url.partition(":")[0].lower() not in ("http", "https"):
        raise BadImage("image_url", f"{shown(url)} is not an http or https URL: no other is downloaded.")
    if not limits.allow_urls:
        raise BadImage(
            "image_url", f"{shown(url)} is a URL: images are not downloaded unless `allow_image_urls` is set."
        )
    from posttrain.data.images.downloads import downloaded  # brings the HTTP client

    return downloaded(url, limits, may_download)


def _of_path(path: str, limits: ImageLimits) -> tuple[Content, str]:
    try:
        is_possible = len(os.fsencode(path)) <= LONGEST_PATH and "\0" not in path
    except UnicodeError:
        is_possible = False
    if not is_possible:
        raise BadImage(
            "image_missing", f"{path[:40]!r}... cannot be a path; base64 is given as a data URL, or as bytes."
        )
    root = os.path.realpath(limits.root or ".")
    real = os.path.realpath(os.path.join(root, path))
    if limits.root is not None and os.path.commonpath([root, real]) != root:
        raise BadImage(
            "image_path_outside",
            f"{path} is outside of {root}, the folder of the images: name a folder that holds it with `image_root`.",
        )
    try:
        with open_regular(real) as file:
            stored = StoredFile.of(real, file)
            if stored.num_bytes > limits.max_bytes:
                raise _too_large(real, stored.num_bytes, limits)
            if limits.decodes or not stored.num_bytes:  # it is read anyway
                return _within_limit(file.read(limits.max_bytes + 1), real, limits), real
    except OSError as error:  # of a disk or a network
        raise BadImage("image_missing", f"{real} cannot be read ({error.strerror}).") from error
    return stored, real


def open_regular(path: str) -> BinaryIO:
    """Only a plain file: opening a FIFO would wait for a writer, and a device may have no end."""
    try:  # `path` is real, so there is no link to follow
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        raise BadImage("image_missing", f"{path} cannot be opened ({error.strerror}).") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadImage("image_not_a_file", f"{path} is not a plain file, but a folder, a pipe or a device.")
    return open(descriptor, "rb")


def _within_limit(data: bytes, name: str, limits: ImageLimits) -> bytes:
    if not data:
        raise BadImage("image_empty", f"{name} is empty: it has no bytes.")
    if len(data) > limits.max_bytes:
        raise _too_large(name, len(data), limits)
    return data


def _too_large(name: str, count: int, limits: ImageLimits) -> BadImage:
    return BadImage(
        "image_too_large",
        f"{name} has {count:,} bytes or more; `max_image_bytes` allows {limits.max_bytes:,}: shrink it or raise that.",
    )
