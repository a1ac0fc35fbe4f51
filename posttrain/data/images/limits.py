"""What may be opened as an image, and the error for everything else."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

AUTO, DECODE, HEADER = "auto", "decode", "header"
DECODED_IN_AUTO = 20_000
"""Up to this many images, `check="auto"` decodes all of them at preparation (about 10 ms each)."""


class BadImage(ValueError):
    """An image that is not trained on. `kind` says what is wrong in one word, for counts; the message is a sentence.

    Not there: image_null, image_missing, image_empty. Not allowed: image_path_outside, image_not_a_file, image_url. Not downloaded:
    image_download. Too much or too little: image_too_large (bytes), image_bomb (pixels), image_too_small, image_aspect.
    Not readable: image_type (of the value), image_format (of the file), image_mode (of the pixels), image_truncated.
    Not what it was at preparation: image_changed.
    """

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(kind, sentence)  # both, so that it can be pickled: workers of the loader raise it, too
        self.kind = kind

    def __str__(self) -> str:
        return self.args[1]


def shown(url: str) -> str:
    """A URL for messages: without its query, which may hold a signature, and without a password."""
    return re.sub(r"//[^/]*@", "//", url.partition("?")[0])[:200]


@dataclass(frozen=True)
class ImageLimits:
    """What images of a dataset may be."""

    root: str | os.PathLike[str] | None = None
    """Folder to which relative paths are relative; nothing outside of it is opened. None: any path, as a script may open."""
    allow_urls: bool = False
    """Download http and https URLs."""
    download_folder: str | os.PathLike[str] | None = None
    """Where downloaded images are kept; needed with `allow_urls`."""
    bomb_pixels: int = 64_000_000
    """Most pixels (height x width) that an image may say it has; checked before it is decoded."""
    max_bytes: int = 32 << 20
    """Most bytes of an undecoded image."""
    max_pixels: int | None = None
    """Images with more pixels are shrunk to at most this many, aspect kept."""
    max_aspect: float | None = None
    """Most of longer over shorter side, where a family's image processor has a limit."""
    check: str = AUTO
    """decode: every image is decoded when it is opened; header: only its header is read; auto: see `for_images`."""

    def __post_init__(self) -> None:
        if self.check not in (AUTO, DECODE, HEADER):
            raise ValueError(f"`check` is {self.check!r}; it must be one of {AUTO}, {DECODE}, {HEADER}.")
        if self.allow_urls and self.download_folder is None:
            raise ValueError("`allow_urls` needs `download_folder`, a folder in which downloaded images are kept.")
        for name in ("bomb_pixels", "max_bytes", "max_pixels", "max_aspect"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it must be at least 1.")

    def for_images(self, count: int) -> ImageLimits:
        """These limits with `auto` decided for a dataset of `count` images: decode up to 20,000 of them, else headers only."""
        return replace(self, check=DECODE if count <= DECODED_IN_AUTO else HEADER) if self.check == AUTO else self

    @property
    def decodes(self) -> bool:
        return self.check != HEADER
