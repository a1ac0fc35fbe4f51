"""M-RoPE: positions of time, row and column for the tokens of a row with images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def image_positions(
    tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, ...]], merge_size: int
) -> np.ndarray:
    """(3, tokens) int32 positions of a row whose images' placeholders begin at `starts`, in ascending order.

    Text advances all three axes by one. An image of (t, h, w) patches whose first placeholder follows position s - 1 has
    (s + time, s + row, s + column) over its grid of h / merge_size rows and w / merge_size columns, and what follows it
    begins at s + max(rows, columns), not at s + placeholders (Qwen2-VL, Wang et al. 2024, section 2.1).
    """
    positions = np.empty((3, tokens), np.int32)
    token, position = 0, 0
    for start, (times, height, width) in zip(starts, grids, strict=True):
        rows, columns = height // merge_size, width // merge_size
        stop = start + times * rows * columns
        if start < token or stop > tokens:
            raise ValueError(
                f"The image at tokens {start} to {stop} does not lie between the image before it, which ends at {token}, "
                f"and the end of the row at {tokens}."
            )
        positions[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        positions[:, start:stop] = np.indices((times, rows, columns), np.int32).reshape(3, -1) + position
        token, position = stop, position + max(rows, columns)
    positions[:, token:] = np.arange(position, position + tokens - token)
    return positions
