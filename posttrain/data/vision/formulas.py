"""How each family's image processor divides an image, computed from its height and width alone.

A formula returns the grid of the image and what the processor's `replace_image_token` reads of the processed image, or None
where the options at hand are beyond it. None of them is trusted before `ImageLayouts` has compared it with the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

Read = Callable[[str], Any]  # an option of the image processor, by its name
Divided = tuple[tuple[int, ...], dict[str, Any]]
Formula = Callable[[int, int, Read], Divided | None]


class ImageSizeError(ValueError):
    """An image whose size its processor refuses."""


def _edge(size: Any, name: str) -> int | None:
    return size.get(name) if isinstance(size, Mapping) else getattr(size, name, None)


def _qwen(height: int, width: int, read: Read) -> Divided | None:
    """Both sides to multiples of a merged patch, their product within [shortest_edge, longest_edge] pixels."""
    least, most = _edge(read("size"), "shortest_edge"), _edge(read("size"), "longest_edge")
    if not read("do_resize") or not least or not most:
        return None
    if max(height, width) > 200 * min(height, width):
        raise ImageSizeError(
            f"An image of {height} x {width} pixels (height x width) is more than 200 times as long as it is wide."
        )
    merge = read("merge_size")
    side = read("patch_size") * merge
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
    elif rows * columns * side**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(length * grow / side) for length in (height, width))
    grid = (1, rows * merge, columns * merge)
    return grid, {"image_grid_thw": np.array([grid])}


def _cell(read: Read) -> tuple[int, int] | None:
    """Height and width of what the tower gets, where they are the same for every image."""
    size = read("crop_size") if read("do_center_crop") else read("size")
    height, width = _edge(size, "height"), _edge(size, "width")
    return (height, width) if height and width and read("do_resize") else None


def _llava(height: int, width: int, read: Read) -> Divided | None:
    cell = _cell(read)
    return cell and ((1,), {"pixel_values": np.empty((1, 3, *cell), np.uint8)})


def _llava_next(height: int, width: int, read: Read) -> Divided | None:
    """Tiles of the resolution that keeps most of the image's pixels and, among those, wastes fewest; and the whole image."""
    cell = _cell(read)
    if not cell:
        return None

    def kept_and_spare(resolution: list[int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    best = max(read("image_grid_pinpoints"), key=kept_and_spare)
    tiles = math.ceil(best[0] / cell[0]) * math.ceil(best[1] / cell[0])
    return (tiles + 1,), {"image_sizes": [(height, width)], "pixel_values": np.empty((1, 1, 3, *cell), np.uint8)}


def _gemma3(height: int, width: int, read: Read) -> Divided | None:
    """Pan and scan: a long image is also shown in crops along its longer side."""
    crops, least = 0, read("pan_and_scan_min_crop_size")
    longer, shorter = max(height, width), min(height, width)
    if read("do_pan_and_scan") and longer / shorter >= read("pan_and_scan_min_ratio_to_activate"):
        crops = max(2, min(longer // least, math.floor(longer / shorter + 0.5)))
        crops = min(crops, read("pan_and_scan_max_num_crops"))
        if min(math.ceil(longer / crops), shorter) < least:
            crops = 0
    return (1 + crops,), {"num_crops": [crops]}


def _idefics(height: int, width: int, read: Read) -> Divided | None:
    """The longer side to `longest_edge`, at most 4096, then both to multiples of a tile."""
    longest, tile = _edge(read("size"), "longest_edge"), _edge(read("max_image_size"), "longest_edge")
    if read("do_image_splitting") and not (read("do_resize") and longest and tile):
        return None
    grid = (0, 0)
    if read("do_image_splitting"):
        wide, ratio = width >= height, width / height
        shorter = _shorter(longest, ratio, wide)
        longer, shorter = longest, max(shorter + shorter % 2, 1)
        # The rounded sides are scaled again: their ratio is not the image's any more.
        if longer > 4096:
            shorter = max(_shorter(4096, longer / shorter if wide else shorter / longer, wide), 1)
            longer = 4096
        ratio = longer / shorter if wide else shorter / longer
        along = math.ceil(longer / tile)
        across = math.ceil(_shorter(along * tile, ratio, wide) / tile)
        grid = (across, along) if wide else (along, across)
    if grid == (1, 1):
        grid = (0, 0)
    return grid, {"rows": [[grid[0]]], "cols": [[grid[1]]]}


def _shorter(longer: int, ratio: float, wide: bool) -> int:
    """The shorter side for a ratio of width to height."""
    return int(longer / ratio) if wide else int(longer * ratio)


@cache
def _canvases(least: int, most: int) -> list[tuple[int, int]]:
    """(columns, rows) of tiles, few tiles first."""
    sides = range(1, most + 1)
    pairs = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return sorted(pairs, key=math.prod)


def _internvl(height: int, width: int, read: Read) -> Divided | None:
    """The canvas of tiles whose ratio is nearest; among equals the largest that the image fills by half."""
    tile_height, tile_width = _edge(read("size"), "height"), _edge(read("size"), "width")
    if not tile_height or not tile_width:
        return None
    tiles, nearest = 1, math.inf
    for columns, rows in _canvases(read("min_patches"), read("max_patches")) if read("crop_to_patches") else ():
        distance, area = abs(width / height - columns / rows), columns * rows * tile_height * tile_width
        if distance < nearest or (distance == nearest and height * width > 0.5 * area):
            tiles, nearest = columns * rows, distance
    tiles += tiles > 1  # the whole image beside its tiles
    return (tiles,), {"num_patches": [tiles]}


def _paligemma(height: int, width: int, read: Read) -> Divided | None:
    return (1,), {}


FORMULAS: dict[str, Formula] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "idefics3": _idefics,
    "smolvlm": _idefics,
    "internvl": _internvl,
    "paligemma": _paligemma,
}
