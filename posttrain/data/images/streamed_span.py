"""StreamedSpan: the span of an image that comes from a stream, which nobody can ask for a row again."""

from __future__ import annotations

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

    def moved(self, by: int) -> StreamedSpan:
        return replace(self, start=self.start + by, stop=self.stop + by)
