"""The picture that a model is shown, drawn from the very pixels that its tower is given: resized, cut into tiles, with a grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from posttrain.core.vision import VisionFamily

GAP = 4  # white pixels between tiles
LINE = (255, 0, 0)


def seen_picture(
    family: VisionFamily, image_processor: Any, pixels: torch.Tensor, grid: tuple[int, ...]
) -> Image.Image:
    """`pixels`: the first of the encoder's arguments for one image, of this `grid`.

    Where the tower takes patches, red lines part what becomes one token each. Else tiles lie apart as they are cut, and the view of
    the whole image, which most families show beside its tiles, comes after them.
    """
    pixels = pixels.detach().float().cpu()
    if family.grid_of == "patches":
        picture, cell = _of_patches(pixels, grid, family.merge_size)
        made = _as_picture(picture, image_processor)
        return _with_lines(made, cell)
    tiles = pixels.reshape(-1, *pixels.shape[-3:])[: family.pixel_rows(grid)]
    pictures = [_as_picture(tile, image_processor) for tile in tiles]
    if family.grid_of == "tile_rows" and math.prod(grid):
        return _sheet(pictures, grid[1])
    return _sheet(pictures, math.ceil(math.sqrt(len(pictures))))


def _of_patches(pixels: torch.Tensor, grid: tuple[int, ...], merge: int) -> tuple[torch.Tensor, int]:
    """((channels, height, width), side of a token's square): patches lie square by square, each with its moments in time."""
    _, rows, columns = grid
    # A still image is every moment of its patches; channels come first, then moments.
    side = next(side for side in range(math.isqrt(pixels.shape[1] // 3), 0, -1) if pixels.shape[1] % (3 * side**2) == 0)
    patches = pixels.reshape(
        -1, rows // merge, columns // merge, merge, merge, 3, pixels.shape[1] // (3 * side**2), side, side
    )
    first = patches[0, ..., 0, :, :]  # (rows, columns, merge, merge, channels, side, side)
    return first.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * side, columns * side), side * merge


def _as_picture(pixels: torch.Tensor, image_processor: Any) -> Image.Image:
    """What normalising and rescaling made of values from 0 to 255, undone."""
    if getattr(image_processor, "do_normalize", False):
        mean, std = (
            torch.tensor(getattr(image_processor, name)).reshape(-1, 1, 1) for name in ("image_mean", "image_std")
        )
        pixels = pixels * std + mean
    if getattr(image_processor, "do_rescale", True):
        pixels = pixels / (getattr(image_processor, "rescale_factor", None) or 1 / 255)
    values = pixels.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(values))


def _with_lines(picture: Image.Image, cell: int) -> Image.Image:
    draw = ImageDraw.Draw(picture)
    for left in range(cell, picture.width, cell):
        draw.line((left, 0, left, picture.height), LINE)
    for top in range(cell, picture.height, cell):
        draw.line((0, top, picture.width, top), LINE)
    return picture


def _sheet(tiles: list[Image.Image], columns: int) -> Image.Image:
    """Tiles in their own size, row by row."""
    width, height = (max(tile.size[axis] for tile in tiles) + GAP for axis in (0, 1))
    sheet = Image.new("RGB", (columns * width - GAP, math.ceil(len(tiles) / columns) * height - GAP), "white")
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (place % columns * width, place // columns * height))
    return sheet
