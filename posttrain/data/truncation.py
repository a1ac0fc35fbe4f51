"""Which tokens of a sample are kept within max_length: an image is whole or absent.

One rule for stored datasets, streams and partners. The start is kept: the cut moves back to the start of the image that it would
split, so an image is never cut off while text that follows it stays. The end is kept: only where that cuts off no image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.core.sample import KEEP_END, ImageSpan, Sample, Unit


@dataclass(frozen=True)
class Windows:
    """Of each sample: the tokens that are kept, and what that does to its images."""

    starts: np.ndarray
    stops: np.ndarray
    cut_images: np.ndarray  # images that are cut off with the end
    refused: np.ndarray  # whether no window of that length keeps its images whole


def windows(
    lengths: np.ndarray,
    sample_of_span: np.ndarray,
    span_starts: np.ndarray,
    span_stops: np.ndarray,
    limit: int | None,
    mode: str,
) -> Windows:
    """Windows of samples of these lengths, whose images stand at these tokens."""
    lengths = lengths.astype(np.int64)
    kept = lengths if limit is None else np.minimum(lengths, limit)
    refused, cut = np.zeros(len(lengths), dtype=bool), np.zeros(len(lengths), dtype=np.int64)
    if mode == KEEP_END:
        refused[sample_of_span[span_starts < (lengths - kept)[sample_of_span]]] = True
        return Windows(lengths - kept, lengths, cut, refused)
    lost = span_stops > kept[sample_of_span]
    stops = kept.copy()
    np.minimum.at(stops, sample_of_span[lost], span_starts[lost])
    np.add.at(cut, sample_of_span[lost], 1)
    return Windows(np.zeros_like(lengths), stops, cut, refused)


def window_of(sample: Sample, limit: int | None, mode: str) -> tuple[int, int] | None:
    """The part of one sample that is kept; None where images would have to be cut off its beginning."""
    found = windows_of_unit((sample,), limit, mode)
    return None if found.refused[0] else (int(found.starts[0]), int(found.stops[0]))


def windows_of_unit(unit: Unit, limit: int | None, mode: str) -> Windows:
    """As for a stored dataset, for the samples of one unit, pairs evened out."""
    spans = [(number, image.start, image.stop) for number, sample in enumerate(unit) for image in sample.images]
    of_sample, starts, stops = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    found = windows(np.array([len(sample) for sample in unit]), of_sample, starts, stops, limit, mode)
    if len(unit) > 1 and found.cut_images.any():
        even_out(found, range(len(unit)), [sample.images for sample in unit])
    return found


def even_out(found: Windows, numbers: Sequence[int], images: Sequence[tuple[ImageSpan, ...]]) -> None:
    """Cut all sides of a pair at the same image, or refuse it: no answer with an image is compared with one without.

    `numbers` are those of the sides in `found`, `images` what stands in each.
    """
    kept = min(len(shown) - int(found.cut_images[number]) for number, shown in zip(numbers, images))
    next_images = {shown[kept].key if len(shown) > kept else None for shown in images}
    for number, shown in zip(numbers, images):
        found.refused[number] |= len(next_images) > 1
        if len(shown) > kept:
            found.stops[number] = min(found.stops[number], shown[kept].start)
            found.cut_images[number] = len(shown) - kept
