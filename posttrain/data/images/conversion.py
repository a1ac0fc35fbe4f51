"""Conversions of Pillow images: to RGB, smaller, in tiles, to bytes, side by side."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Sequence

import numpy as np
from PIL import ExifTags, Image, ImageOps

from posttrain.data.images.limits import BadImage

PLAIN_MODES = ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "RGBX", "LA", "La", "PA", "RGBA", "RGBa")
WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
ENCODINGS = ("JPEG", "PNG", "WEBP")


def exif_orientation(image: Image.Image) -> int:
    """1 to 8; 1 (upright) also where the EXIF data cannot be read, as every viewer shows such files."""
    try:
        # PNG's own `getexif` would decode the image
        value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, EOFError, struct.error):
        return 1
    return value if value in range(1, 9) else 1


def check_mode(image: Image.Image, name: str = "the image") -> None:
    if image.mode in PLAIN_MODES or image.mode in WIDE_MODES:
        return
    what = {"F": "float pixels", "I": "32-bit integer pixels"}.get(image.mode, f"pixels of mode {image.mode}")
    raise BadImage(
        "image_mode", f"{name} has {what}, whose range is not known: convert it to 8-bit RGB or greyscale first."
    )


def to_rgb(image: Image.Image, name: str = "the image") -> Image.Image:
    """Upright, 8 bits, three channels; what is transparent shows white.

    Pillow's own `convert("RGB")` would show the colour below transparent pixels, clip 16-bit values at 255, and ignore EXIF.
    """
    check_mode(image, name)
    image.load()
    if exif_orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in WIDE_MODES:
        return _scaled_to_8_bits(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":  # Pillow has no direct conversion
        image = image.convert("LA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _scaled_to_8_bits(image: Image.Image) -> Image.Image:
    """0 to 65,535 (12-bit TIFF files: 4,095) becomes 0 to 255, rounded."""
    bits = getattr(image, "tag_v2", {}).get(ExifTags.Base.BitsPerSample, (16,))[0]
    largest = 2**bits - 1
    values = np.asarray(image).astype(np.uint32)
    scaled = ((values * 255 + largest // 2) // largest).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        scaled[values == transparent] = 255
    return Image.fromarray(scaled)


def size_within(height: int, width: int, max_pixels: int | None) -> tuple[int, int]:
    """The largest (height, width) of at most `max_pixels` with the same aspect, sides rounded down; never larger than it was."""
    if max_pixels is None or height * width <= max_pixels:
        return height, width
    sides = math.isqrt(max_pixels * height // width), math.isqrt(max_pixels * width // height)
    return tuple(min(max(side, 1), max_pixels) for side in sides)


def shrink(image: Image.Image, max_pixels: int | None) -> Image.Image:
    """At most `max_pixels`, aspect kept; the image itself where it is not larger."""
    height, width = size_within(image.height, image.width, max_pixels)
    if (height, width) == (image.height, image.width):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def tile(image: Image.Image, side: int) -> list[Image.Image]:
    """The image in squares of `side`, row by row from the upper left; those at the right and lower edges have what is left."""
    if side < 1:
        raise ValueError(f"`side` is {side}; it must be at least 1.")
    corners = ((left, top) for top in range(0, image.height, side) for left in range(0, image.width, side))
    ends = image.width, image.height
    return [image.crop((left, top, min(left + side, ends[0]), min(top + side, ends[1]))) for left, top in corners]


def to_bytes(image: Image.Image, format: str = "PNG", quality: int = 90) -> bytes:
    """The image as RGB in a file of `format`: PNG (lossless, `quality` is not used), JPEG or WEBP."""
    if format.upper() not in ENCODINGS:
        raise ValueError(f"`format` is {format!r}; images are written as one of {', '.join(ENCODINGS)}.")
    if not 1 <= quality <= 100:
        raise ValueError(f"`quality` is {quality}; it must be between 1 and 100.")
    options = {} if format.upper() == "PNG" else {"quality": quality}
    written = io.BytesIO()
    to_rgb(image).save(written, format.upper(), **options)
    return written.getvalue()


def contact_sheet(images: Sequence[Image.Image], columns: int = 4, side: int = 256, gap: int = 4) -> Image.Image:
    """All images as thumbnails of at most `side` x `side`, row by row on white."""
    if not images:
        raise ValueError("A contact sheet needs at least one image.")
    columns, cell = min(columns, len(images)), side + gap
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * cell + gap, rows * cell + gap), "white")
    for place, image in enumerate(images):
        small = ImageOps.contain(to_rgb(image), (side, side))
        row, column = divmod(place, columns)
        left, top = gap + column * cell + (side - small.width) // 2, gap + row * cell + (side - small.height) // 2
        sheet.paste(small, (left, top))
    return sheet
