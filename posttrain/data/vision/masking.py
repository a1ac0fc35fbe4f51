"""PictureMask: a picture parts of which are black, drawn from an integer alone.

Pictures are masked before the image processor, which is the same for every family, whatever its tiles and patches are. What is
hidden is a share of cells whose side is a share of the picture's shorter side: shrinking a photograph would average single pixels
away, and the mask with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

Chosen = Callable[[np.random.Generator, int, float], np.ndarray]


def _by_coins(rng: np.random.Generator, cells: int, ratio: float) -> np.ndarray:
    return rng.random(cells) < ratio


def _so_many(rng: np.random.Generator, cells: int, ratio: float) -> np.ndarray:
    return rng.permutation(cells) < max(round(ratio * cells), 1)


def _evenly(rng: np.random.Generator, cells: int, ratio: float) -> np.ndarray:
    """Every (1 / ratio)-th cell, row by row, from a place that is drawn."""
    return (rng.random() + ratio * np.arange(cells)) % 1 < ratio


MASKS: dict[str, tuple[int, Chosen]] = {"random": (224, _by_coins), "patch": (16, _so_many), "grid": (16, _evenly)}
"""Value of `mask_type` -> cells along the shorter side, and which of them are hidden."""


@dataclass(frozen=True)
class PictureMask:
    """In the place of an augmentation of PixelLoader: it is applied to spans that have a draw."""

    kind: str
    ratio: float

    def __call__(self, picture: Image.Image, draw: int) -> Image.Image:
        """A copy; what was given is left as it is."""
        pixels = np.array(picture.convert("RGB"))
        pixels[self.hidden(picture.height, picture.width, draw)] = 0
        return Image.fromarray(pixels)

    def hidden(self, height: int, width: int, draw: int) -> np.ndarray:
        """(height, width) bool."""
        along, chosen = MASKS[self.kind]
        side = max(round(min(height, width) / along), 1)
        rows, columns = -(-height // side), -(-width // side)
        cells = chosen(np.random.default_rng(draw), rows * columns, self.ratio).reshape(rows, columns)
        return cells.repeat(side, 0).repeat(side, 1)[:height, :width]
