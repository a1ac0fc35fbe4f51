"""Thumbnails: small pictures of the images of rollouts, for people who look at a run. `posttrain view` serves this folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from posttrain.core.secrets import write_whole
from posttrain.data.images.conversion import to_bytes, to_rgb
from posttrain.data.images.lazy_picture import LazyPicture, opened_picture
from posttrain.data.images.strict_pillow import pillow_errors

logger = logging.getLogger(__name__)

FOLDER = "rollout_images"
"""In the output directory, beside the rollouts: readers of partitioned parquet take every file below a folder for theirs."""
SIDE, QUALITY = 512, 80
MOST_BYTES = 1 << 30
COUNTED_EVERY = 64
"""Files: other processes write to the folder as well."""


class Thumbnails:
    """`folder`/KEY.webp, once for each key. Used by one thread; a picture that cannot be made costs the run nothing but itself."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.left_out: set[bytes] = set()
        self._used, self._written = 0, 0

    def add(self, pictures: Mapping[bytes, Any]) -> None:
        for key, picture in pictures.items():
            path = self.folder / f"{key.hex()}.webp"
            if key not in self.left_out and not path.exists() and not self._write(path, picture):
                self.left_out.add(key)

    def _write(self, path: Path, picture: LazyPicture | Image.Image) -> bool:
        try:
            if self._written % COUNTED_EVERY == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._used = sum(entry.stat().st_size for entry in os.scandir(self.folder))
            data = thumbnail(picture)
            if self._used + len(data) > self.most_bytes:
                self._warn(f"{self.folder} has {self._used:,} bytes, and {self.most_bytes:,} are the most")
                return False
            write_whole(path, data, private=False)
        except (OSError, ValueError) as error:  # a full disk; a file that is gone, or another by now
            self._warn(f"{path.name} could not be made ({error})")
            return False
        self._used, self._written = self._used + len(data), self._written + 1
        return True

    def _warn(self, why: str) -> None:
        if not self.left_out:
            logger.warning(f"Images of rollouts are left out of those that `posttrain view` shows: {why}.")


def thumbnail(picture: LazyPicture | Image.Image) -> bytes:
    """WebP."""
    return to_bytes(small_picture(picture), "WEBP", QUALITY)


def small_picture(picture: LazyPicture | Image.Image) -> Image.Image:
    """Upright on white, longest side 512. The picture itself, which a reward may hold, is left as it is."""
    content = picture.content if isinstance(picture, LazyPicture) else picture.copy()
    with pillow_errors("the picture"):
        small = to_rgb(opened_picture(content))
        return ImageOps.contain(small, (SIDE, SIDE)) if max(small.size) > SIDE else small


def small_pictures(pictures: Mapping[bytes, Any]) -> dict[bytes, Image.Image]:
    """Of those that can still be read; the others are named, and cost nothing but themselves."""
    made: dict[bytes, Image.Image] = {}
    for key, picture in pictures.items():
        try:
            made[key] = small_picture(picture)
        except (OSError, ValueError) as error:
            logger.warning(f"The image {key.hex()} is not shown to trackers: {error}")
    return made
