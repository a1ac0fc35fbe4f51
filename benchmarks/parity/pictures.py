"""Images of rows, made from their recipes: both sides draw the same noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image


def drawn(row: dict[str, Any]) -> dict[str, Any]:
    """The row with PIL images in the place of recipes."""
    return {**row, "images": [draw(**recipe) for recipe in row["images"]]} if "images" in row else row


def draw(height: int, width: int, seed: int, ground: str) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    if ground == "none":
        return Image.fromarray(noise[..., :3])
    noise[..., 3] = np.where(noise[..., 3] < 128, 0, 255)  # all or nothing: the composition has no rounding
    if ground == "white":
        return Image.fromarray(np.where(noise[..., 3:] == 0, np.uint8(255), noise[..., :3]))
    return Image.fromarray(noise)
