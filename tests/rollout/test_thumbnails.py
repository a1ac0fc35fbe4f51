"""Small pictures of what rollouts show: each once, within bounds, and never at the cost of a run."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
from PIL import Image

from posttrain.data.images.conversion import to_bytes
from posttrain.data.images.lazy_picture import LazyPicture
from posttrain.rollout.thumbnails import SIDE, Thumbnails, thumbnail
from tests.tiny_vision import images


def lazily(picture: Image.Image, reads: list[str] | None = None) -> LazyPicture:
    def read() -> bytes:
        if reads is not None:
            reads.append("read")
        return to_bytes(picture, "PNG")

    return LazyPicture(read)


@pytest.mark.parametrize(("size", "expected"), [((40, 60), (60, 40)), ((600, 1200), (512, 256)), ((1100, 2), (1, 512))])
def test_the_longest_side_is_bounded(size, expected):
    (picture,) = images(size)
    for one in (picture, lazily(picture)):
        found = Image.open(io.BytesIO(thumbnail(one)))
        assert (found.format, found.size) == ("WEBP", expected)
        assert max(found.size) <= SIDE


def test_a_picture_is_written_once(tmp_path):
    reads: list[str] = []
    made = Thumbnails(tmp_path / "images")
    (picture,) = images((30, 40))
    for _ in range(3):
        made.add({b"k" * 16: lazily(picture, reads)})
    assert [path.name for path in made.folder.iterdir()] == [f"{(b'k' * 16).hex()}.webp"]
    assert reads == ["read"]
    assert not made.left_out


def test_beyond_the_bound_pictures_are_counted_and_left_out(tmp_path, caplog):
    pictures = {bytes([i]) * 16: one for i, one in enumerate(images(*[(64, 64)] * 6))}
    size = len(thumbnail(pictures[bytes(16)]))
    made = Thumbnails(tmp_path / "images", most_bytes=3 * size + size // 2)
    with caplog.at_level(logging.WARNING):
        made.add(pictures)
        made.add(pictures)
    kept = len(list(made.folder.iterdir()))
    assert 0 < kept < 6
    assert len(made.left_out) == 6 - kept
    assert len(caplog.records) == 1  # the first; how many there are is said at the end
    again = Thumbnails(made.folder, most_bytes=3 * size + size // 2)  # of a resumed run
    again.add(pictures)
    assert len(list(made.folder.iterdir())) == kept


def broken() -> Any:
    raise FileNotFoundError(2, "No such file or directory")


def test_a_picture_that_cannot_be_made_costs_nothing_but_itself(tmp_path, caplog):
    (picture,) = images((30, 40))
    pictures = {b"a" * 16: LazyPicture(broken), b"b" * 16: LazyPicture(lambda: b"no picture"), b"c" * 16: picture}
    made = Thumbnails(tmp_path / "images")
    made.add(pictures)
    assert made.left_out == {b"a" * 16, b"b" * 16}
    assert [path.stem for path in made.folder.iterdir()] == [(b"c" * 16).hex()]
    assert "left out" in caplog.text
