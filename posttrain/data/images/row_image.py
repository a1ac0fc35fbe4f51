"""RowImage: an image of a row as conversations carry it, from the check of the row to its tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowImage:
    """What is known of an image once its header was read; pixels are made later, from where `key` is found."""

    key: bytes  # 16 bytes, see `ImageSource.key`
    size: tuple[int, int]  # height, width of what the image processor is given
