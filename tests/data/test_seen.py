"""The picture that is drawn of what a model sees is the picture that was stored, resized: no patch and no tile is misplaced."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from posttrain.core.sample import ImageSpan
from posttrain.data.images.limits import HEADER, ImageLimits
from posttrain.data.images.opening import open_image
from posttrain.data.images.streamed_span import StreamedSpan
from posttrain.data.pixels import PixelLoader
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts
from posttrain.data.vision.seen import GAP, LINE
from tests.tiny_vision import FAMILIES, tiny_processor


def smooth(height: int, width: int) -> Image.Image:
    """Every place has a colour of its own."""
    rows, columns = np.mgrid[0:height, 0:width]
    colours = np.stack([255 * rows / height, 255 * columns / width, 127 + 0 * rows], axis=-1)
    return Image.fromarray(colours.astype(np.uint8))


def seen(family_name: str, picture: Image.Image) -> tuple[Image.Image, tuple[int, ...], PixelLoader]:
    processor = tiny_processor(family_name)
    family = vision_family(family_name, processor)
    limits = ImageLimits(check=HEADER)
    source = open_image(picture, limits)
    layout = ImageLayouts(family, processor).layout(*source.size)
    loader = PixelLoader(family, processor)
    span = ImageSpan(0, 1, source.key, source.size, layout.grid)
    return loader.seen(StreamedSpan.of(span, picture, limits, "")), layout.grid, loader


def apart(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of values from 0 to 255, red lines left out."""
    one, other = np.asarray(one).astype(float), np.asarray(other.resize(one.size)).astype(float)
    return float(np.abs(one - other)[(one != LINE).any(-1)].mean())


@pytest.mark.parametrize("family_name", [name for name in FAMILIES if name.startswith("qwen")])
def test_patches_are_put_back_into_their_places(family_name):
    picture = smooth(56, 84)
    made, grid, loader = seen(family_name, picture)
    cells = [math.prod(grid) // loader.family.merge_size**2, grid[1] // loader.family.merge_size]
    assert apart(made, picture) < 4
    side = made.height // cells[1]
    lines = (np.asarray(made) == LINE).all(-1)
    assert lines[side].all()
    assert lines[:, side].all()
    assert not lines[side - 1].all()


@pytest.mark.parametrize("family_name", ["smolvlm", "idefics3"])
def test_tiles_lie_as_they_were_cut(family_name):
    picture = smooth(60, 120)
    made, (rows, columns), _ = seen(family_name, picture)
    assert rows * columns > 1
    side = (made.width + GAP) // columns - GAP
    corners = [(column * (side + GAP), row * (side + GAP)) for row in range(rows) for column in range(columns)]
    joined = Image.new("RGB", (columns * side, rows * side))
    for place, (left, top) in enumerate(corners):
        tile = made.crop((left, top, left + side, top + side))
        joined.paste(tile, (place % columns * side, place // columns * side))
    assert apart(joined, picture) < 4
    whole = made.crop((0, rows * (side + GAP), side, rows * (side + GAP) + side))
    colours = np.asarray(whole)[np.asarray(whole).any(-1)]  # the rest of the tile is empty
    assert colours[:, 0].max() > 200


@pytest.mark.parametrize("family_name", ["llava", "gemma3", "paligemma"])
def test_an_image_in_one_piece_is_the_image(family_name):
    picture = smooth(64, 64)
    assert apart(seen(family_name, picture)[0], picture) < 6


@pytest.mark.parametrize("family_name", ["llava_next", "internvl"])
def test_all_tiles_and_the_whole_are_drawn(family_name):
    made, (tiles,), _ = seen(family_name, smooth(40, 120))
    columns = math.ceil(math.sqrt(tiles))
    assert tiles > 1
    assert (made.width + GAP) % columns == 0
    assert np.asarray(made).std() > 20
