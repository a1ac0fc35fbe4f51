"""Pillow with a short list of formats, no repairs of truncated files, and one error for everything it says about a bad file."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import threading
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError

from posttrain.data.images.limits import BadImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""All that Pillow may try. Its other decoders are out of reach; that of EPS runs Ghostscript."""
MAGIC = re.compile(rb"\xff\xd8\xff|\x89PNG|GIF8|BM|II\*\0|MM\0\*|RIFF....WEBP", re.DOTALL)
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")


class _StrictDecoding:
    """`ImageFile.LOAD_TRUNCATED_IMAGES` is off while any thread of ours decodes. Libraries switch it on for the whole process, and
    Pillow then fills what is missing with grey."""

    def __init__(self) -> None:
        self._lock, self._inside, self._found = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._found = ImageFile.LOAD_TRUNCATED_IMAGES
            ImageFile.LOAD_TRUNCATED_IMAGES = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._found


STRICT = _StrictDecoding()
os.register_at_fork(after_in_child=STRICT.__init__)  # a thread that held the lock does not exist in a forked worker


@contextlib.contextmanager
def pillow_errors(name: str) -> Iterator[None]:
    """Whatever Pillow raises in here is a BadImage; truncated files are errors."""
    try:
        with STRICT:
            yield
    except (BadImage, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage("image_bomb", f"{name} was not decoded: {error}") from error
    except Exception as error:  # its decoders raise a dozen types about damaged files
        raise BadImage("image_truncated", f"{name} is damaged or cut off ({type(error).__name__}: {error}).") from error


def opened(file: BinaryIO, name: str) -> Image.Image:
    """The header is read, nothing is decoded."""
    with pillow_errors(name):
        try:
            return Image.open(file, formats=FORMATS)
        except UnidentifiedImageError:
            file.seek(0)
            start = file.read(2048)
            if MAGIC.match(start):
                raise
    if start[4:8] == b"ftyp" and start[8:12] in HEIC_BRANDS:
        what = "a HEIC file, which is not read"
    elif b"<svg" in start.lower():
        what = "an SVG file, which is not read"
    else:
        what = f"not an image that can be read (it begins with {start[:16]!r})"
    raise BadImage("image_format", f"{name} is {what}: convert it to PNG or JPEG. Read are {', '.join(FORMATS)}.")


def has_late_metadata(file: BinaryIO) -> bool:
    """Whether a PNG file has EXIF or XMP after its pixels, where Pillow finds it only by decoding them."""
    place, kind, seen_pixels, found = file.tell(), b"", False, False
    file.seek(8)
    while not found and kind != b"IEND" and len(start := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", start)
        seen_pixels |= kind == b"IDAT"
        found = seen_pixels and kind in (b"eXIf", b"iTXt")
        file.seek(length + 4, os.SEEK_CUR)
    file.seek(place)
    return found
