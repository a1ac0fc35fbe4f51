"""Pictures of rollouts: files of one folder of a run, asked for by the keys of their content and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.view.errors import NotFound, ViewError

FOLDER = "rollout_images"
"""Of a run; `rollout/thumbnails.py` writes to it."""
PICTURE_TYPE = "image/webp"
KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)
MAGIC = re.compile(rb"RIFF....WEBP", re.DOTALL)
MAX_BYTES = 4 << 20


def stored_picture(run: Path, key: str) -> bytes:
    """The bytes of a picture. A link, or a file that holds something else under this name, is not served."""
    if not KEY.fullmatch(key):
        raise ViewError("The key of a picture has 32 hexadecimal digits.")
    path = run / FOLDER / f"{key}.webp"
    if path.is_symlink() or not path.is_file():
        raise NotFound("There is no picture of this image: none was kept, or no longer.")
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES or not MAGIC.match(data):
        raise NotFound("The file of this image is not a picture that the run wrote.")
    return data
