"""MediaFolder: pictures that no source can give again, kept beside a run's checkpoints under their keys.

Tools draw some, others came with a row of a stream. What is kept is what the model was shown, without loss.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from posttrain.core.secrets import write_whole
from posttrain.data.images.lazy_picture import LazyPicture
from posttrain.data.images.limits import HEADER, BadImage, ImageLimits
from posttrain.data.images.opening import ImageSource, open_image, reopen_image
from posttrain.data.images.row_image import RowImage
from posttrain.data.images.streamed_span import StreamedSpan

FOLDER = "media"
"""In the output directory."""
KEPT = ImageLimits(check=HEADER, bomb_pixels=1 << 40, max_bytes=1 << 40)
"""They passed the limits of the run before they were written."""
# of zlib's levels: an episode waits for the file, and level 6 takes five times as long for a tenth fewer bytes
FAST = 1


class MediaNotWritten(RuntimeError):
    """A picture could not be kept. The run cannot continue: no checkpoint of it could be resumed."""


class MediaFolder:
    """`path`/KEY.png, and KEY-PIXELS.png of streams. Several processes may write to it: a file appears whole, and equal pictures
    are one file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def keep(self, payload: Any, limits: ImageLimits) -> RowImage:
        """The picture, checked, shrunk and written. BadImage where it is none, or none that `limits` allow.

        Its key is that of the pixels that are written, so that it can be checked whenever they are read.
        """
        picture = open_image(payload, replace(limits, check=HEADER)).rgb()
        source = open_image(picture, KEPT)
        self._write_once(picture, self._file(source.key))
        return RowImage(source.key, source.size)

    def keep_streamed(self, span: StreamedSpan) -> None:
        """Under the key that the stream gave it, which is not one of pixels: the name of the file has both."""
        if next(self._named(span.key), None) is None:
            picture = reopen_image(span.payload, span.limits, span.key).rgb()
            pixels = open_image(picture, KEPT).key
            self._write_once(picture, self.path / f"{span.key.hex()}-{pixels.hex()}.png")

    def find(self, key: bytes) -> ImageSource | None:
        """The picture of this key; None where there is none, and image_changed where the file holds another one by now."""
        path = next(self._named(key), None)
        if path is None:
            return None
        # Bytes, not the path: another thread may just put an equal file in its place, which is not the file that it was.
        source = open_image(open_image(path.read_bytes(), KEPT).rgb(), KEPT)
        if source.key.hex() != path.stem.rpartition("-")[2]:
            raise BadImage("image_changed", f"{path} was changed after the run wrote it.")
        return source

    def has(self, key: bytes) -> bool:
        return self._file(key).exists()

    def _named(self, key: bytes) -> Iterator[Path]:
        plain = self._file(key)
        return iter([plain]) if plain.exists() else self.path.glob(f"{key.hex()}-*.png")

    def picture(self, key: bytes) -> LazyPicture:
        """For a user's function."""
        return LazyPicture(self._file(key).read_bytes)

    def _file(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}.png"

    def _write_once(self, picture: Image.Image, path: Path) -> None:
        if not path.exists():
            self._write(picture, path)

    def _write(self, picture: Image.Image, path: Path) -> None:
        try:
            picture.save(written := io.BytesIO(), "PNG", compress_level=FAST)
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(path, written.getbuffer(), private=False, durable=True)
        except OSError as error:
            raise MediaNotWritten(
                f"An image of a tool, an environment or a stream could not be kept in {self.path} ({error.strerror or error}). "
                "Make room there: without it the run could not be resumed."
            ) from error
