"""MediaFolder: pictures that a run made itself (a tool drew them), kept beside its checkpoints under their content keys.

Rows are asked for their images again; nobody can be asked for these. What is kept is what the model was shown, without loss.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from posttrain.data.images.lazy_picture import LazyPicture
from posttrain.data.images.limits import HEADER, BadImage, ImageLimits
from posttrain.data.images.opening import ImageSource, open_image
from posttrain.data.images.row_image import RowImage

FOLDER = "media"
"""In the output directory."""
KEPT = ImageLimits(check=HEADER, bomb_pixels=1 << 40)
"""They passed the limits of the run before they were written."""
FAST = (
    1  # of zlib's levels: an episode waits for the file, and level 6 takes five times as long for a tenth fewer bytes
)


class MediaNotWritten(RuntimeError):
    """A picture could not be kept. The run cannot continue: no checkpoint of it could be resumed."""


class MediaFolder:
    """`path`/KEY.png. Several processes may write to it: a file appears whole, and equal pictures are one file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def keep(self, payload: Any, limits: ImageLimits) -> RowImage:
        """The picture, checked, shrunk and written. BadImage where it is none, or none that `limits` allow.

        Its key is that of the pixels that are written, so that it can be checked whenever they are read.
        """
        picture = open_image(payload, replace(limits, check=HEADER)).rgb()
        source = open_image(picture, KEPT)
        path = self._file(source.key)
        if not path.exists():
            self._write(picture, path)
        return RowImage(source.key, source.size)

    def find(self, key: bytes) -> ImageSource | None:
        """The picture of this key; None where there is none, and image_changed where the file holds another one by now."""
        path = self._file(key)
        if not path.exists():
            return None
        source = open_image(open_image(path, KEPT).rgb(), KEPT)
        if source.key != key:
            raise BadImage("image_changed", f"{path} was changed after the run wrote it.")
        return source

    def picture(self, key: bytes) -> LazyPicture:
        """For somebody else's function."""
        return LazyPicture(self._file(key).read_bytes)

    def _file(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}.png"

    def _write(self, picture: Image.Image, path: Path) -> None:
        unfinished = self.path / f".{path.name}.{os.getpid()}-{threading.get_ident()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(unfinished, "wb") as file:
                picture.save(file, "PNG", compress_level=FAST)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise MediaNotWritten(
                f"An image that a tool or an environment returned could not be kept in {self.path} ({error.strerror or error}). "
                "Make room there: without it the run could not be resumed."
            ) from error
