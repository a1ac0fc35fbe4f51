"""What tools return, as the model reads it: texts as ever, images checked, shrunk and kept."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.media import MediaFolder
from posttrain.rollout.episodes.tool_results import MAX_IMAGES, ShownImages, UnexpectedImage, content_of, says_images
from tests.tiny_vision import images

(PICTURE,) = images((40, 60))
PIXELS = np.asarray(PICTURE)


def as_bytes(picture: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


@pytest.fixture
def shown(tmp_path) -> ShownImages:
    return ShownImages(MediaFolder(tmp_path / "media"), ImageLimits(max_pixels=100 * 100))


FORMS = {
    "PIL": PICTURE,
    "bytes": as_bytes(PICTURE),
    "array": PIXELS,
    "tensor": torch.from_numpy(PIXELS.copy()).permute(2, 0, 1),
    "part": [{"type": "image", "image": PICTURE}],
    "undecoded": [{"type": "image", "image": {"bytes": as_bytes(PICTURE), "path": None}}],
    "list": [PICTURE],
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_one_file_whatever_its_form(form, shown):
    (part,) = content_of(FORMS[form], 100, shown)
    assert part["type"] == "image"
    assert part["image"].size == (40, 60)
    assert np.array_equal(np.asarray(shown.media.find(part["image"].key).rgb()), PIXELS)
    content_of(PICTURE, 100, shown)
    assert [path.name for path in shown.media.path.iterdir()] == [f"{part['image'].key.hex()}.png"]


def test_texts_between_images_stay_between_them_and_are_cut_together(shown):
    parts = ["Look: ", "here ", PICTURE, {"type": "text", "text": "and here " * 3}, PICTURE]
    content = content_of(parts, 20, shown)
    assert [part["type"] for part in content] == ["text", "image", "text", "image"]
    assert content[0]["text"] == "Look: here "
    assert content[2]["text"].startswith("and here \n[cut: 27 characters, of which the first 9")


def test_what_is_no_image_is_shown_as_ever(shown):
    plain = {"a": [1, 2], "b": None}
    for result in (plain, ["a", "b"], [1, 2], "x" * 50, np.arange(6, dtype=np.uint8).reshape(2, 3)):
        assert content_of(result, 30, shown) == content_of(result, 30, None)
        assert isinstance(content_of(result, 30, shown), str)
    assert content_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], 30, shown) == "ab"
    assert not shown.media.path.exists()


def test_large_images_are_shrunk(shown):
    (large,) = images((300, 200))
    (part,) = content_of(large, 100, shown)
    height, width = part["image"].size
    assert height * width <= 100 * 100
    assert abs(height / width - 1.5) < 0.05
    assert shown.media.find(part["image"].key).rgb().size == (width, height)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "too many": ([PICTURE] * (MAX_IMAGES + 1), ValueError, "5 images; a result may have 4 at most"),
    "path": ([{"type": "image", "path": "/etc/passwd"}], BadImage, "not opened: return the image itself"),
    "url": ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}], BadImage, "not opened"),
    "no payload": ([{"type": "image"}], BadImage, "null"),
    "half a file": (as_bytes(PICTURE)[:400], BadImage, "damaged or cut off"),
    "text": (b"hello", BadImage, "not an image"),
    "float": ([{"type": "image", "image": PIXELS / 255}], BadImage, "uint8"),
    "other things": ([PICTURE, 3], TypeError, "neither text nor image"),
    "inside of data": ({"screen": PICTURE}, TypeError, "inside of other data"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_image_is_a_mistake_of_the_tool(case, shown):
    result, error, told = BAD[case]
    with pytest.raises(error, match=told):
        content_of(result, 100, shown)
    assert not shown.media.path.exists()


def test_a_bomb_is_not_decoded(shown):
    with pytest.raises(BadImage, match="was not decoded"):
        content_of(PICTURE, 100, ShownImages(shown.media, ImageLimits(bomb_pixels=100)))


def test_a_run_that_shows_no_images_is_ended_by_one():
    for result in (PICTURE, ["a", PICTURE], [{"type": "image", "image": as_bytes(PICTURE)}]):
        with pytest.raises(UnexpectedImage, match="`tool_image_role`"):
            content_of(result, 100, None)


def test_a_file_that_was_changed_is_never_another_picture(shown):
    (part,) = content_of(PICTURE, 100, shown)
    (file,) = shown.media.path.iterdir()
    images((40, 60), seed=1)[0].save(file)
    with pytest.raises(BadImage, match="was changed"):
        shown.media.find(part["image"].key)
    assert shown.media.find(bytes(16)) is None


def test_equal_pictures_may_be_written_and_read_at_once(shown):
    """Each call of a tool runs on a thread of its own, and many draw the same."""
    (part,) = content_of(PICTURE, 100, shown)
    key, is_over = part["image"].key, threading.Event()

    def write() -> None:
        while not is_over.is_set():
            shown.media._write(PICTURE, shown.media._file(key))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            assert shown.media.find(key).key == key
    finally:
        is_over.set()
        writer.join()


def plain() -> str: ...
def one() -> Image.Image: ...
def perhaps() -> Image.Image | None: ...
def several() -> list[str | Image.Image]: ...
def parts() -> list[dict[str, Any]]: ...
def nothing(): ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [(plain, False), (one, True), (perhaps, True), (several, True), (parts, False), (nothing, False)],
)
def test_annotations_announce_images(function, expected):
    assert says_images(function) == expected
