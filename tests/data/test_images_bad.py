"""Images that must be refused: each by its kind, with a sentence, before anything is decoded, fetched or waited for."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import threading
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile

from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.opening import open_image, reopen_image
from tests.data.picture_files import HEIC, SVG, chunk, encoded, noise, png

PICTURE = noise(64, 80)
JPEG, PNG = encoded(PICTURE, "JPEG"), encoded(PICTURE, "PNG")
ANY = ImageLimits()
HEADERS = ImageLimits(check="header")


def refusal(payload, limits=ANY):
    with pytest.raises(BadImage) as caught:
        open_image(payload, limits)
    sentence = str(caught.value)
    assert sentence[-1] == "."
    assert " " in sentence
    assert len(sentence) < 600
    return caught.value.kind, sentence


def kind_or_picture(payload, limits=ANY):
    try:
        return None, open_image(payload, limits).rgb()
    except BadImage as error:
        return error.kind, None


BAD = {
    "null": (None, "image_null", "null"),
    "null dict": ({"bytes": None, "path": None}, "image_null", "null"),
    "number": (3, "image_type", "given as int"),
    "list": ([[1, 2], [3, 4]], "image_type", "given as list"),
    "other dict": ({"url": "x"}, "image_type", "'url'"),
    "empty dict": ({}, "image_type", "dict"),
    "zero bytes": (b"", "image_empty", "no bytes"),
    "zero bytes in a dict": ({"bytes": b"", "path": "a.png"}, "image_empty", "no bytes"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "image_truncated", "cut off"),
    "half a PNG": (PNG[: len(PNG) // 2], "image_truncated", "cut off"),
    "start of a PNG": (PNG[:20], "image_truncated", "cut off"),
    "text": (b"This is not an image at all.", "image_format", "This is not an i"),
    "SVG": (SVG, "image_format", "an SVG file"),
    "HEIC": (HEIC, "image_format", "a HEIC file"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image_format", "begins with b'%!PS"),
    "PDF": (b"%PDF-1.7\n" + b" " * 100, "image_format", "begins with"),
    "PPM, which Pillow could read": (encoded(PICTURE, "PPM"), "image_format", "begins with b'P6"),
    "float TIFF": (encoded(Image.new("F", (8, 8)), "TIFF"), "image_mode", "float pixels"),
    "32-bit TIFF": (encoded(Image.new("I", (8, 8)), "TIFF"), "image_mode", "32-bit"),
    "LAB TIFF": (encoded(Image.new("LAB", (8, 8)), "TIFF"), "image_mode", "LAB"),
    "float array": (PICTURE / 255, "image_mode", "float64"),
    "float tensor": (torch.rand(3, 8, 8), "image_mode", "torch.float32"),
    "uint16 array": (PICTURE.astype(np.uint16), "image_mode", "uint16"),
    "float PIL image": (Image.new("F", (8, 8)), "image_mode", "float pixels"),
    "array of two channels": (noise(8, 8, 2), "image_type", "(8, 8, 2)"),
    "array of four axes": (PICTURE[None], "image_type", "(1, 64, 80, 3)"),
    "array that may lie either way": (noise(3, 100, 4), "image_type", "(channels, H, W) or (H, W, channels)"),
    "empty array": (np.zeros((0, 5, 3), np.uint8), "image_too_small", "0 x 5"),
    "empty PIL image": (Image.new("RGB", (5, 0)), "image_too_small", "0 x 5"),
    "1 x 4000": (encoded(noise(1, 4000)), "image_too_small", "1 x 4000"),
    "1 x 4000 array": (noise(1, 4000), "image_too_small", "1 x 4000"),
    "missing file": ("/nowhere/at/all.png", "image_missing", "/nowhere/at/all.png"),
    "NUL in a path": ("a\0b.png", "image_missing", "cannot be a path"),
    "half a character in a path": ("a\ud800.png", "image_missing", "cannot be a path"),
    "base64 without a URL": (base64.b64encode(PNG).decode(), "image_missing", "data URL"),
    "folder": ("/", "image_not_a_file", "plain file"),
    "device": ("/dev/zero", "image_not_a_file", "plain file"),
    "URL while off": ("https://me:secret@example.com/a.png?token=secret", "image_url", "`allow_image_urls`"),
    "file URL": ("file:///etc/passwd", "image_url", "not an http or https URL"),
    "data URL without a comma": ("data:image/png;base64", "image_url", "no comma"),
    "data URL of no base64": ("data:image/png;base64,####", "image_url", "cannot be read"),
    "data URL of text": ("data:text/plain,hello%20there", "image_format", "hello there"),
}


@pytest.mark.parametrize(("payload", "kind", "words"), BAD.values(), ids=BAD)
def test_bad_images_are_named(payload, kind, words):
    found, sentence = refusal(payload)
    assert (found, words in sentence) == (kind, True), sentence
    assert "secret" not in sentence


def huge(height, width):
    return png(height, width, 8, 2, b"\0")


def test_bombs_are_found_in_the_header():
    assert refusal(huge(50_000, 50_000), HEADERS)[0] == "image_bomb"  # where Pillow raises itself
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        kind, sentence = refusal(huge(10_000, 10_000), HEADERS)  # where Pillow warns
    assert kind == "image_bomb"
    assert "10,000 x 10,000" in sentence
    assert "64,000,000" in sentence
    with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
        assert refusal(huge(10_000, 10_000), HEADERS)[0] == "image_bomb"
    assert refusal(huge(8_001, 8_000), HEADERS)[0] == "image_bomb"  # where Pillow would say nothing
    assert open_image(huge(8_000, 8_000), HEADERS).size == (8_000, 8_000)
    assert refusal(np.broadcast_to(np.uint8(0), (9_000, 9_000)))[0] == "image_bomb"
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50 << 20)))
    assert refusal(png(2, 2, 8, 0, bytes(6), before=text))[0] == "image_truncated"


def test_limits_of_bytes_and_aspect(tmp_path):
    small = ImageLimits(max_bytes=len(PNG) - 1, max_aspect=3, check="header")
    (tmp_path / "a.png").write_bytes(PNG)
    for payload in (PNG, {"bytes": PNG}, tmp_path / "a.png", f"data:,{'a' * 20 * len(PNG)}"):
        assert refusal(payload, small)[0] == "image_too_large"
    assert open_image(encoded(np.zeros((10, 30, 3), np.uint8)), small).size == (10, 30)
    for shape in ((10, 31, 3), (31, 10, 3)):
        assert refusal(encoded(np.zeros(shape, np.uint8)), small)[0] == "image_aspect"
    assert refusal(encoded(np.zeros((2, 200, 3), np.uint8)), ImageLimits(max_pixels=100))[0] == "image_too_small"


# ------------------------------------------------------------------------------------------------------------------ paths


def test_nothing_outside_of_the_root_is_opened(tmp_path):
    root, outside = tmp_path / "images", tmp_path / "images_of_others"
    root.mkdir()
    outside.mkdir()
    (outside / "b.png").write_bytes(PNG)
    (root / "a.png").write_bytes(PNG)
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "link.png").symlink_to(outside / "b.png")
    (root / "folder").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    limits = ImageLimits(root=root)
    for path in ("a.png", root / "a.png", "inside.png", "./a.png"):
        assert open_image(path, limits).size == (64, 80)
    for path in ("../images_of_others/b.png", outside / "b.png", "link.png", "folder/b.png", "/etc/passwd", ".."):
        kind, sentence = refusal(path, limits)
        assert kind == "image_path_outside"
        assert "`image_root`" in sentence
        assert refusal({"bytes": None, "path": os.fspath(path)}, limits)[0] == "image_path_outside"
    assert refusal("loop", limits)[0] == "image_missing"
    assert open_image({"bytes": PNG, "path": "/etc/passwd"}, limits).format == "PNG"  # only a name
    assert open_image(outside / "b.png", ANY).size == (64, 80)  # a script's own path


def test_a_link_that_leads_to_the_root_is_the_root(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.png").write_bytes(PNG)
    (tmp_path / "name").symlink_to(tmp_path / "real")
    assert open_image("a.png", ImageLimits(root=tmp_path / "name")).size == (64, 80)


def test_pipes_and_sockets_are_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    assert refusal(tmp_path / "pipe.png")[0] == "image_not_a_file"
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        assert refusal("socket.png")[0] == "image_missing"


@pytest.mark.parametrize("check", ["header", "decode"])
def test_a_changed_file_is_not_another_picture(tmp_path, check):
    path, limits = tmp_path / "a.png", ImageLimits(root=tmp_path, check=check)
    path.write_bytes(PNG)
    os.utime(path, ns=(1, 1))
    source = open_image("a.png", limits)
    assert reopen_image("a.png", limits, source.key) == source
    path.write_bytes(encoded(255 - PICTURE))
    with pytest.raises(BadImage, match="prepare the dataset again") as caught:
        reopen_image("a.png", limits, source.key)
    assert caught.value.kind == "image_changed"
    if check == "header":  # read at every call
        with pytest.raises(BadImage, match="was changed after preparation"):
            source.rgb()
    else:
        assert np.array_equal(source.rgb(), PICTURE)


# ------------------------------------------------------------------------------------------------------- truncated files


def cut_files():
    for format, options in {
        "JPEG": {"quality": 80},
        "PNG": {},
        "WEBP": {"lossless": True},
        "GIF": {},
        "BMP": {},
        "TIFF": {"compression": "tiff_lzw"},
    }.items():
        yield format, encoded(PICTURE, format, **options)


FILES = dict(cut_files())


@given(st.sampled_from(sorted(FILES)), st.floats(0, 1), st.booleans())
def test_a_cut_file_is_refused_or_whole(format, share, repairs):
    """Whatever somebody set for the whole process; a file that only lacks its end mark still has all pixels."""
    data = FILES[format]
    whole = np.asarray(open_image(data, ANY).rgb())
    ImageFile.LOAD_TRUNCATED_IMAGES = repairs
    try:
        kind, found = kind_or_picture(data[: int(share * len(data))])
        assert kind in ("image_truncated", "image_empty", "image_format") or np.array_equal(found, whole)
        assert ImageFile.LOAD_TRUNCATED_IMAGES is repairs
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


@pytest.mark.parametrize("format", FILES)
def test_half_a_file_is_refused(format, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert refusal(FILES[format][: len(FILES[format]) // 2])[0] == "image_truncated"
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_headers_alone_do_not_find_a_cut_jpeg():
    """Which is why `check` decodes by default; so does `rgb`."""
    source = open_image(JPEG[: len(JPEG) // 2], HEADERS)
    assert source.size == (64, 80)
    with pytest.raises(BadImage, match="cut off"):
        source.rgb()


def test_repairs_stay_off_until_the_last_thread_has_decoded(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    half, kinds = JPEG[: len(JPEG) // 2], []

    def decode():
        for _ in range(50):
            kinds.append(refusal(half)[0])

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kinds == ["image_truncated"] * 200
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_bytes_are_a_picture_or_a_bad_image(format, data):
    damaged = bytearray(FILES[format])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[min(place, data.draw(st.sampled_from([place, place % 64])))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings(action="ignore"):
        kind, found = kind_or_picture(bytes(damaged), ImageLimits(bomb_pixels=10_000_000))
    assert (
        kind in ("image_truncated", "image_format", "image_mode", "image_bomb", "image_too_small")
        or found.mode == "RGB"
    )


def test_a_bad_image_travels_between_processes():
    error = pickle.loads(pickle.dumps(BadImage("image_bomb", "It is too large.")))
    assert (error.kind, str(error)) == ("image_bomb", "It is too large.")


@pytest.mark.parametrize(
    "wrong", [{"check": "all"}, {"allow_urls": True}, {"max_pixels": 0}, {"bomb_pixels": -1}, {"max_bytes": 0}]
)
def test_limits_must_make_sense(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        ImageLimits(**wrong)


def test_auto_decodes_small_datasets():
    assert ANY.for_images(20_000).check == "decode"
    assert ANY.for_images(20_001).check == "header"
    assert HEADERS.for_images(1).check == "header"
