"""StreamedSpan: the span of an image whose row cannot be asked for: of a stream, or in a process that has no dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.core.sample import ImageSpan
from posttrain.data.images.limits import ImageLimits


@dataclass(frozen=True)
class StreamedSpan(ImageSpan):
    """An ImageSpan with the undecoded image itself, until the batch is made."""

    payload: Any = field(default=None, compare=False, repr=False)
    limits: ImageLimits = field(default_factory=ImageLimits, compare=False, repr=False)
    place: str = field(default="", compare=False)  # for messages: dataset, row, column

    @classmethod
    def of(cls, span: ImageSpan, payload: Any, limits: ImageLimits, place: str) -> StreamedSpan:
        return cls(span.start, span.stop, span.key, span.size, span.grid, span.draw, payload, limits, place)


def as_carried(spans: Iterable[ImageSpan], known: Iterable[ImageSpan]) -> tuple[ImageSpan, ...]:
    """`spans`, each as the one of `known` that shows the same image and may carry it, in its own place."""
    by_key = {span.key: span for span in known}
    return tuple(replace(by_key.get(one.key, one), start=one.start, stop=one.stop, grid=one.grid) for one in spans)
