"""How an image travels: as its pixels, named by their sha-256.

The trainer has opened the file, under its own limits, and sends height, width and RGB bytes. So the server decodes no format at
all, shows exactly the pixels that the trainer trains on, and a name cannot stand for another image than the one that was meant.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

from ..errors import PayloadError
from .payload import Buffer

if TYPE_CHECKING:
    from PIL import Image

_HEAD = struct.Struct(">II")  # height, width
CHANNELS = 3
MAX_IMAGE_BYTES = _HEAD.size + CHANNELS * (64 << 20)
"""64 million pixels: what trainers decode at most (`image_bomb_pixels`)."""
KEY = r"^[0-9a-f]{64}$"


def encode_image(picture: Image.Image) -> bytes:
    """`picture` is RGB."""
    return _HEAD.pack(picture.height, picture.width) + picture.tobytes()


def image_key(data: Buffer) -> str:
    return hashlib.sha256(data).hexdigest()


def decode_image(data: bytes) -> Image.Image:
    """Over the same memory."""
    from PIL import Image

    check_image(data)
    height, width = _HEAD.unpack_from(data)
    return Image.frombuffer("RGB", (width, height), memoryview(data)[_HEAD.size :], "raw", "RGB", 0, 1)


def check_image(data: Buffer) -> None:
    """PayloadError unless it is one image."""
    if len(data) < _HEAD.size:
        raise PayloadError(f"An image has a head of {_HEAD.size} bytes and its pixels; {len(data)} bytes came.")
    height, width = _HEAD.unpack_from(data)
    if not height or not width or len(data) != _HEAD.size + CHANNELS * height * width:
        raise PayloadError(
            f"An image of {height} x {width} (height x width) has {CHANNELS * height * width} bytes of RGB pixels; "
            f"{len(data) - _HEAD.size} came."
        )
