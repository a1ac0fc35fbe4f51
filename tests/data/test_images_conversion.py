"""Content keys, shrinking, tiles, encoding, contact sheets."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from posttrain.data.images.conversion import contact_sheet, shrink, size_within, to_bytes
from posttrain.data.images.limits import ImageLimits
from posttrain.data.images.opening import open_image
from tests.data.picture_files import encoded, noise

ANY = ImageLimits(check="header")
SIDES = st.integers(1, 5000)


def key(payload, **limits):
    return open_image(payload, ImageLimits(**{"check": "header", **limits})).key


# ------------------------------------------------------------------------------------------------------------------- keys


@given(st.integers(2, 40), st.integers(2, 40))
def test_the_shape_of_pixels_is_part_of_their_key(height, width):
    """30 x 150 and 150 x 30 of the same bytes are two pictures."""
    grey = np.full((height, width), 7, np.uint8)
    assert (key(grey) == key(grey.reshape(width, height))) == (height == width)


def test_equal_pixels_have_one_key_however_they_arrive():
    picture = noise(30, 150)
    assert len(key(picture)) == 16
    assert (
        key(picture)
        == key(picture.transpose(2, 0, 1))
        == key(Image.fromarray(picture))
        == key(picture[:, ::-1][:, ::-1])
    )
    assert key(picture) != key(picture.reshape(150, 30, 3))
    changed = picture.copy()
    changed[-1, -1, -1] ^= 1
    assert key(picture) != key(changed)


def test_what_changes_the_decoded_picture_changes_the_key():
    red, green = Image.new("P", (4, 4)), Image.new("P", (4, 4))
    red.putpalette([255, 0, 0])
    green.putpalette([0, 255, 0])
    assert red.tobytes() == green.tobytes()
    assert key(red) != key(green)
    data = encoded(noise())
    assert key(data) == key({"bytes": data, "path": "any.png"}) == key(bytearray(data)) == key(data, check="decode")
    assert len({key(data), key(data + b"\0"), key(data, max_pixels=100), key(data, max_pixels=101)}) == 4


def test_files_are_known_by_path_size_and_time(tmp_path):
    data = encoded(noise())
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(data)
        os.utime(tmp_path / name, ns=(1, 1))
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    first = key(tmp_path / "a.png")
    assert first == key("a.png", root=tmp_path) == key(tmp_path / "link.png")
    assert first != key(tmp_path / "b.png")
    assert key(tmp_path / "a.png", check="decode") == key(tmp_path / "b.png", check="decode") == key(data)
    os.utime(tmp_path / "a.png", ns=(1, 2))
    assert first != key(tmp_path / "a.png")


# -------------------------------------------------------------------------------------------------------------- shrinking


@given(SIDES, SIDES, st.integers(1, 10_000_000))
def test_shrinking_keeps_the_aspect(height, width, most):
    small = size_within(height, width, most)
    assert small[0] * small[1] <= most
    assert 1 <= small[0] <= height
    assert 1 <= small[1] <= width
    assert size_within(*small, most) == small
    assert size_within(width, height, most) == small[::-1]
    if height * width <= most:
        assert small == (height, width)
    elif min(small) > 1:  # each side is within a pixel of the exact one, and larger by a pixel there are too many
        scale = (most / (height * width)) ** 0.5
        assert height * scale - 1 < small[0] <= height * scale + 1e-6
        assert width * scale - 1 < small[1] <= width * scale + 1e-6
        assert (small[0] + 1) * (small[1] + 1) > most


def test_shrinking():
    assert size_within(100, 200, 5_000) == (50, 100)
    assert size_within(3024, 4032, 1_000_000) == (866, 1154)
    assert size_within(3024, 4032, None) == (3024, 4032)
    whole = Image.fromarray(np.kron(noise(4, 6), np.ones((8, 8, 1), np.uint8)))
    assert shrink(whole, 32 * 48) is whole
    assert shrink(whole, 12 * 18).size == (18, 12)
    flat = np.full((40, 60, 3), 99, np.uint8)
    source = open_image(encoded(flat), ImageLimits(max_pixels=600))
    assert (source.height, source.width, source.size) == (40, 60, (20, 30))
    assert np.array_equal(source.rgb(), flat[:20, :30])
    assert np.array_equal(open_image(flat, ImageLimits(max_pixels=600)).rgb(), flat[:20, :30])


# ------------------------------------------------------------------------------------------------------------------ sheets


@pytest.mark.parametrize("format", ["png", "JPEG", "webp"])
def test_bytes_can_be_opened_again(format):
    picture = np.full((16, 16, 4), [200, 100, 0, 255], np.uint8)
    source = open_image(to_bytes(Image.fromarray(picture), format), ANY)
    assert source.format == format.upper()
    assert np.abs(np.asarray(source.rgb()).astype(int) - picture[..., :3]).max() <= (0 if format == "png" else 6)
    detailed = Image.fromarray(noise(64, 64))
    assert format == "png" or len(to_bytes(detailed, format, 20)) < len(to_bytes(detailed, format, 95))
    for wrong in ({"format": "EPS"}, {"format": format, "quality": 0}):
        with pytest.raises(ValueError, match=r"must be|one of"):
            to_bytes(detailed, **wrong)


def test_a_contact_sheet_shows_all_in_order():
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [Image.new("RGB", size, colour) for size, colour in zip([(80, 40), (10, 10), (20, 90)], colours)]
    sheet = contact_sheet(images, columns=2, side=40, gap=4)
    assert sheet.size == (2 * 44 + 4, 2 * 44 + 4)
    assert [sheet.getpixel(centre) for centre in ((24, 24), (68, 24), (24, 68), (68, 68))] == [
        *colours,
        (255, 255, 255),
    ]
    assert sheet.getpixel((24, 8)) == (255, 255, 255)  # above a wide one
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet([])
