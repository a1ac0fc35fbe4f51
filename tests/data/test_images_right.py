"""Images that must be decoded to the right pixels, compared with pictures made by hand, and with what naive decoding gives."""

from __future__ import annotations

import base64
import io
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, PngImagePlugin

from posttrain.data.images.limits import ImageLimits
from posttrain.data.images.opening import open_image
from tests.data.picture_files import chunk, encoded, exif, noise, png

ANY, HEADERS = ImageLimits(), ImageLimits(check="header")
RED, WHITE = [255, 0, 0], [255, 255, 255]


def pixels(payload, limits=ANY):
    source = open_image(payload, limits)
    picture = source.rgb()
    assert (picture.mode, picture.height, picture.width) == ("RGB", *source.size)
    assert source.size == open_image(payload, HEADERS).size
    return np.asarray(picture)


def naive(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def on_white(colour, alpha):
    colour, alpha = colour.astype(float), alpha.astype(float)[..., None] / 255
    return colour * alpha + 255 * (1 - alpha)


# ----------------------------------------------------------------------------------------------------------- transparency


@pytest.mark.parametrize("format", ["PNG", "WEBP", "TIFF"])
def test_transparent_pixels_show_white(format):
    picture = noise(16, 16, 4)
    picture[0, :, 3], picture[1, :, 3] = 0, 255
    data = encoded(picture, format, **({"lossless": True, "exact": True} if format == "WEBP" else {}))
    found = pixels(data)
    assert np.abs(found - on_white(picture[..., :3], picture[..., 3])).max() <= 1
    assert (found[0] == 255).all()
    assert np.array_equal(found[1], picture[1, :, :3])
    assert np.array_equal(naive(data)[0], picture[0, :, :3])  # whatever colour lies below
    assert np.array_equal(pixels(picture), found)


def test_grey_with_alpha():
    picture = np.array([[[0, 0], [0, 255]], [[100, 0], [200, 255]]], np.uint8)
    found = pixels(encoded(Image.fromarray(picture)))
    assert open_image(encoded(Image.fromarray(picture)), ANY).mode == "LA"
    assert found[..., 0].tolist() == [[255, 0], [255, 200]]
    assert (found[..., 0] == found[..., 1]).all()
    assert (found[..., 1] == found[..., 2]).all()


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_palette_with_transparency(format):
    picture = Image.new("P", (3, 2))
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    picture.putdata([0, 1, 2, 2, 1, 0])
    data = encoded(picture, format, transparency=1)
    assert pixels(data).tolist() == [[RED, WHITE, [0, 0, 255]], [[0, 0, 255], WHITE, RED]]
    assert naive(data)[0, 1].tolist() == [0, 255, 0]
    assert pixels(encoded(picture, format))[0, 1].tolist() == [0, 255, 0]


def test_palette_with_shares_of_transparency():
    rows = b"\0\0\1" * 2
    before = chunk(b"PLTE", bytes([0, 0, 0, 200, 0, 0])) + chunk(b"tRNS", bytes([51, 255]))
    assert pixels(png(2, 2, 8, 3, rows, before)).tolist() == [[[204] * 3, [200, 0, 0]]] * 2


def test_one_transparent_colour():
    grey = png(2, 2, 8, 0, b"\0\x10\x20" * 2, chunk(b"tRNS", struct.pack(">H", 0x10)))
    assert pixels(grey)[0, :, 0].tolist() == [255, 0x20]
    rgb = png(2, 2, 8, 2, (b"\0" + bytes(RED + [1, 2, 3])) * 2, chunk(b"tRNS", struct.pack(">HHH", *RED)))
    assert pixels(rgb)[0].tolist() == [WHITE, [1, 2, 3]]


# ------------------------------------------------------------------------------------------------------------------ depths


def test_sixteen_bits_are_scaled():
    values = np.array([[0, 256, 257], [32_768, 65_534, 65_535]], np.uint16)
    expected = np.round(values / 65_535 * 255)
    files = [encoded(values), encoded(values, "TIFF"), Image.fromarray(values)]
    files.append(encoded(Image.fromarray(values.astype(">u2")), "TIFF"))  # the other order of bytes
    for payload in files:
        found = pixels(payload)
        assert np.array_equal(found, np.repeat(expected[..., None], 3, axis=2))
    assert naive(files[0])[..., 0].tolist() != expected.tolist()
    rows = b"".join(b"\0" + struct.pack(">2H", 0, 40_000) for _ in range(2))
    transparent = png(2, 2, 16, 0, rows, chunk(b"tRNS", struct.pack(">H", 40_000)))
    assert pixels(transparent)[..., 0].tolist() == [[0, 255]] * 2


def test_twelve_bits_are_scaled():
    """A TIFF file of one row twice: 0, 4,095, 2,048, 16 in six bytes."""
    tags = [(256, 4), (257, 2), (258, 12), (259, 1), (262, 1), (273, 122), (277, 1), (278, 2), (279, 12)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + bytes.fromhex("000fff800010") * 2
    assert pixels(data)[..., 0].tolist() == [[0, 255, 128, 1]] * 2


def test_sixteen_bit_colour():
    rows = b"".join(b"\0" + struct.pack(">6H", 0, 256, 65_535, 0x8000, 0xFF00, 0x00FF) for _ in range(2))
    assert pixels(png(2, 2, 16, 2, rows))[0].tolist() == [[0, 1, 255], [128, 255, 0]]


def test_grey_and_black_and_white_are_repeated():
    grey = noise(5, 7, 0)
    for payload in (encoded(grey), encoded(grey, "BMP"), grey, torch.from_numpy(grey), Image.fromarray(grey)):
        assert np.array_equal(pixels(payload), np.repeat(grey[..., None], 3, axis=2))
    bits = Image.fromarray(grey > 127)
    assert np.array_equal(pixels(encoded(bits))[..., 1], np.where(grey > 127, 255, 0))


def test_cmyk():
    """Cyan, magenta, yellow, black: without a profile, red is (1 - cyan)(1 - black)."""
    inks = np.zeros((16, 32, 4), np.uint8)
    inks[:, 16:] = [255, 0, 0, 0]
    inks[8:, :16] = [0, 0, 0, 255]
    cmyk = Image.frombytes("CMYK", (32, 16), inks.tobytes())
    for data in (encoded(cmyk, "TIFF"), encoded(cmyk, "JPEG", quality=100), cmyk):
        found = pixels(data).astype(int)
        assert np.abs(found[4, 8] - WHITE).max() < 4
        assert np.abs(found[12, 8]).max() < 4
        assert np.abs(found[4, 24] - [0, 255, 255]).max() < 4
    plain, with_profile = encoded(cmyk, "TIFF"), encoded(cmyk, "TIFF", icc_profile=b"a profile")
    assert not open_image(plain, ANY).ignores_profile
    assert open_image(with_profile, ANY).ignores_profile
    assert np.array_equal(pixels(plain), pixels(with_profile))


# -------------------------------------------------------------------------------------------------------------- orientation

TURNS = {  # of the stored pixels, to stand upright
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "late PNG"])
def test_exif_orientation(format, orientation):
    stored = np.kron(noise(6, 8, seed=1) // 2, np.ones((8, 8, 1), np.uint8))
    tag = exif(orientation)
    if format == "late PNG":  # after the pixels, as some tools write it
        rows = b"".join(b"\0" + row.tobytes() for row in stored)
        data = png(48, 64, 8, 2, rows, after=chunk(b"eXIf", tag))
    else:
        options = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(format, {})
        data = encoded(stored, format, exif=tag if format == "TIFF" else b"Exif\0\0" + tag, **options)
    expected = TURNS[orientation](stored)
    found = pixels(data)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= (12 if format == "JPEG" else 0)
    assert open_image(data, HEADERS).size == ((64, 48) if orientation >= 5 else (48, 64))
    assert np.array_equal(pixels(Image.open(io.BytesIO(data))), found)  # a PIL image still has its orientation


def test_orientation_in_xmp():
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    assert pixels(encoded(noise(4, 6), "PNG", pnginfo=info)).shape == (6, 4, 3)


@pytest.mark.parametrize("tag", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0" + exif(9), b""])
def test_unreadable_exif_is_upright(tag):
    picture = noise(16, 24)
    assert np.array_equal(pixels(encoded(picture, "PNG", exif=tag)), picture)
    assert pixels(encoded(picture, "JPEG", exif=tag)).shape == (16, 24, 3)


# ------------------------------------------------------------------------------------------------- formats, frames, payloads


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_content_decides_and_not_the_name(format, tmp_path):
    data = encoded(noise(16, 24), format)
    wrong = tmp_path / ("a.png" if format != "PNG" else "a.jpg")
    wrong.write_bytes(data)
    for check in ("header", "decode"):
        source = open_image(wrong, ImageLimits(check=check))
        assert (source.format, source.height, source.width, source.num_bytes) == (format, 16, 24, len(data))
        assert np.array_equal(source.rgb(), naive(data))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation(format):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert open_image(data, HEADERS).has_more_frames
    assert (pixels(data) == RED).all()
    assert not open_image(encoded(frames[0], format, **options), HEADERS).has_more_frames


def test_a_jpeg_that_holds_others_is_a_jpeg():
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    source = open_image(encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]), ANY)
    assert source.format == "JPEG"
    assert source.has_more_frames
    assert np.abs(np.asarray(source.rgb())[0, 0] - RED).max() < 4


def test_all_kinds_of_payloads(tmp_path):
    picture = noise(12, 20)
    data = encoded(picture)
    (tmp_path / "a.png").write_bytes(data)
    channels_first = np.ascontiguousarray(picture.transpose(2, 0, 1))
    text = base64.b64encode(data).decode()
    escaped = "".join(f"%{byte:02x}" for byte in data)
    payloads = [
        Image.fromarray(picture), Image.open(tmp_path / "a.png"), {"bytes": data, "path": None}, {"bytes": data},
        {"bytes": None, "path": str(tmp_path / "a.png")}, {"path": str(tmp_path / "a.png")}, data, bytearray(data),
        memoryview(data), picture, channels_first, picture[:, ::-1][:, ::-1], torch.from_numpy(picture),
        torch.from_numpy(channels_first), torch.from_numpy(picture).permute(2, 0, 1), tmp_path / "a.png",
        str(tmp_path / "a.png"), f"data:image/png;base64,{text}", f"DATA:;base64,{text}", f"data:image/png,{escaped}",
    ]  # fmt: skip
    for payload in payloads:
        assert np.array_equal(pixels(payload), picture)
    with_alpha = np.concatenate([picture, np.full((12, 20, 1), 255, np.uint8)], axis=2)
    for payload in (with_alpha, with_alpha.transpose(2, 0, 1), torch.from_numpy(with_alpha)):
        assert np.array_equal(pixels(payload), picture)


@given(st.integers(2, 9), st.integers(2, 9))
def test_arrays_lie_as_they_are_given_or_are_refused(height, width):
    """(3, H, W) is never taken for (H, W, 3): where both could be meant, there is no picture."""
    picture = noise(height, width)
    for array, is_clear in ((picture, height not in (3, 4)), (picture.transpose(2, 0, 1), width not in (3, 4))):
        if is_clear:
            assert np.array_equal(pixels(array), picture)
        else:
            with pytest.raises(ValueError, match="give a PIL image"):
                open_image(array, ANY)


def test_a_source_hands_out_its_own_pixels():
    theirs = Image.fromarray(noise(4, 6))
    source = open_image(theirs, ANY)
    first = np.array(source.rgb())
    theirs.paste("black", (0, 0, 6, 4))
    source.rgb().paste("black", (0, 0, 6, 4))
    assert np.array_equal(source.rgb(), first)


@pytest.mark.parametrize("form", ["bytes", "file", "pixels"])
def test_a_source_travels_between_processes(form, tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(noise()))
    payload = {"bytes": encoded(noise()), "file": tmp_path / "a.png", "pixels": noise()}[form]
    source = open_image(payload, ImageLimits(check="header", max_pixels=100))
    copied = pickle.loads(pickle.dumps(source))
    assert copied.key == source.key
    assert np.array_equal(copied.rgb(), source.rgb())


def test_headers_decode_nothing(monkeypatch):
    files = [encoded(noise(), format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail(f"{image.format} was decoded"))
    for data in files:
        assert open_image(data, HEADERS).size == (12, 20)
