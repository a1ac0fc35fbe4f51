"""Spans and positions of images as tensors: what a checkpoint keeps of the pictures of a window. Never a pixel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from posttrain.core.sample import ImageSpan, Sample

NOT_DRAWN = -1  # draws are never negative


def pack_spans(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """None where no sample has an image or positions of its own."""
    spans = [span for sample in samples for span in sample.images]
    if not spans and all(sample.positions is None for sample in samples):
        return None
    positions = [sample.positions for sample in samples if sample.positions is not None]
    numbers = [(s.start, s.stop, *s.size, NOT_DRAWN if s.draw is None else s.draw, len(s.grid)) for s in spans]
    grids = [side for span in spans for side in span.grid]
    return {
        "counts": torch.tensor([len(sample.images) for sample in samples], dtype=torch.int64),
        "numbers": torch.tensor(numbers, dtype=torch.int64).view(-1, 6),
        "grids": torch.tensor(grids, dtype=torch.int64),
        "keys": torch.tensor([[*span.key] for span in spans], dtype=torch.uint8).view(len(spans), -1),
        "has_positions": torch.tensor([sample.positions is not None for sample in samples], dtype=torch.uint8),
        "positions": torch.from_numpy(np.concatenate([np.zeros((3, 0), np.int32), *positions], axis=1)),
    }


def unpack_spans(packed: dict[str, Any] | None, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """`images` and `positions` of samples of these lengths, as arguments of Sample."""
    if packed is None:
        return [{} for _ in lengths]
    spans = iter(_spans(packed))
    found, start = [], 0
    for count, has_positions, length in zip(packed["counts"].tolist(), packed["has_positions"].tolist(), lengths):
        positions = packed["positions"][:, start : start + length].numpy() if has_positions else None
        start += length if has_positions else 0
        found.append({"images": tuple(itertools.islice(spans, count)), "positions": positions})
    return found


def _spans(packed: dict[str, Any]) -> list[ImageSpan]:
    grids, spans = iter(packed["grids"].tolist()), []
    for (start, stop, height, width, draw, sides), key in zip(packed["numbers"].tolist(), packed["keys"].tolist()):
        grid = tuple(itertools.islice(grids, sides))
        spans.append(ImageSpan(start, stop, bytes(key), (height, width), grid, None if draw == NOT_DRAWN else draw))
    return spans
