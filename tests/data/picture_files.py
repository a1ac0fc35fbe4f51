"""Image files made by hand, byte by byte where Pillow would not write them."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def noise(height=12, width=20, channels=3, seed=0):
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image, format="PNG", **options):
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind, data=b""):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(height, width, bits, colour, rows, before=b"", after=b""):
    """`rows`: raw pixels, a filter byte of 0 before each row; chunks before and after the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", zlib.compress(rows)) + after + chunk(b"IEND")


def exif(orientation):
    """The smallest EXIF data: one tag."""
    return b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0) + b"\0\0\0\0"


SVG = b'<?xml version="1.0"?>\n<!-- a dot -->\n<svg xmlns="http://www.w3.org/2000/svg"><circle r="1"/></svg>'
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64
