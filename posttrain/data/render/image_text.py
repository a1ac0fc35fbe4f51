"""Images in rendered text: what a processor writes takes the place of the template's marks, and everything behind them moves.

The text is expanded and not the tokens: what a processor writes around placeholders (blank lines, row and column marks) may
merge with its neighbours. A run of placeholders is written once here and repeated in the ids: n control tokens in a row are n
ids to every tokenizer, and thousands of them need not be parsed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import numpy as np

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.conversation import RenderError
from posttrain.data.render.special_tokens import ControlTokens
from posttrain.data.vision.formulas import ImageSizeError
from posttrain.data.vision.layouts import ImageLayout, ImageLayouts
from posttrain.data.vision.positions import image_positions

Span = tuple[int, int]


@dataclass(frozen=True)
class Replacement:
    """What is written for the images of one layout, with each run of placeholders as one."""

    text: str
    runs: tuple[int, ...]  # how many placeholders each stands for
    control_tokens: list[Span]
    grid: tuple[int, ...]


@dataclass(frozen=True)
class PlacedImage:
    """An image and the characters that stand for it."""

    image: RowImage
    replacement: Replacement
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.replacement.text)


@dataclass(frozen=True)
class ExpandedText:
    text: str
    images: list[PlacedImage]
    marks: list[Span]  # where the marks stood before
    _growth: list[int]  # by how much the text had grown before the n-th mark

    def moved(self, spans: list[Span]) -> list[Span]:
        """Spans of the text before; none of them has an edge inside of a mark."""
        starts = [start for start, _ in self.marks]
        return [(a + self._growth[bisect_left(starts, a)], b + self._growth[bisect_left(starts, b)]) for a, b in spans]

    def control_tokens(self, owned: list[Span]) -> list[Span]:
        """The template's control tokens of the text before, and those that stand for images now."""
        marks = set(self.marks)
        kept = self.moved([span for span in owned if span not in marks])
        new = [(i.start + a, i.start + b) for i in self.images for a, b in i.replacement.control_tokens]
        return sorted(kept + new)


class ImageText:
    """Expansion with the layouts of one processor."""

    def __init__(self, layouts: ImageLayouts, control: ControlTokens, train_images: bool) -> None:
        self.layouts, self._control, self.train_images = layouts, control, train_images
        self._runs = re.compile(f"(?:{re.escape(layouts.family.placeholder)})+")
        self._mark = re.compile(re.escape(layouts.family.written))
        self._replacements: dict[ImageLayout, Replacement] = {}

    def fingerprint_state(self) -> list[Any]:
        """All that decides what an image becomes, for `Renderer.fingerprint`."""
        processor = self.layouts.processor
        kinds = [f"{type(one).__module__}.{type(one).__qualname__}" for one in (processor, processor.image_processor)]
        return [
            kinds,
            json.loads(processor.to_json_string()),
            getattr(processor.image_processor, "backend", None),
            self.layouts.options,
            dataclasses.asdict(self.layouts.family),
            version("transformers"),
            self.train_images,
        ]

    def marks_in(self, text: str) -> list[Span]:
        return [match.span() for match in self._mark.finditer(text)]

    def expand(self, text: str, marks: list[Span], images: Sequence[RowImage]) -> ExpandedText:
        """`text` with the images in the places of `marks`. RenderError: their numbers differ, or an image has no layout."""
        if len(marks) != len(images):
            mark = self.layouts.family.written
            raise RenderError(
                f"The text has {len(marks)} placeholders of images ({mark}), and there are {len(images)} images.", text
            )
        replacements = [self._replacement(number, len(images), image) for number, image in enumerate(images)]
        longer = [len(new.text) - (b - a) for new, (a, b) in zip(replacements, marks)]
        growth = list(accumulate(longer, initial=0))
        placed = [PlacedImage(i, new, a + by) for i, new, (a, _), by in zip(images, replacements, marks, growth)]
        pieces, position = [], 0
        for new, (start, end) in zip(replacements, marks):
            pieces += [text[position:start], new.text]
            position = end
        return ExpandedText("".join([*pieces, text[position:]]), placed, marks, growth)

    def _replacement(self, number: int, count: int, image: RowImage) -> Replacement:
        height, width = image.size
        try:
            layout = self.layouts.layout(height, width)
        except ImageSizeError as error:
            raise RenderError(
                f"Image {number + 1} of {count}, of {height} x {width} pixels (height x width), cannot be used: {error}"
            ) from error
        if layout not in self._replacements:
            self._replacements[layout] = self._collapsed(layout)
        return self._replacements[layout]

    def _collapsed(self, layout: ImageLayout) -> Replacement:
        placeholder = self.layouts.family.placeholder
        runs = tuple(len(run) // len(placeholder) for run in self._runs.findall(layout.text))
        text = self._runs.sub(lambda _: placeholder, layout.text)
        return Replacement(text, runs, self._control.find(text), layout.grid)

    def sample(
        self, ids: np.ndarray, trained: np.ndarray, placed: list[PlacedImage], ranges: list[Span], text: str
    ) -> Sample:
        """Runs of placeholders repeated, in the ids and in the mask; `ranges` are the tokens that hold each image's characters.

        A token across the edge of an image belongs to the image; one across the edges of two belongs to the first.
        """
        family = self.layouts.family
        runs = [run for image in placed for run in image.replacement.runs]
        tokens = np.flatnonzero(ids == family.placeholder_id)
        if len(tokens) != len(runs):
            raise RenderError(
                f"The text gives {len(tokens)} placeholders of images ({family.placeholder}) where {len(runs)} were written for "
                f"{len(placed)} images. A text that was typed must not hold any.",
                text,
            )
        if not placed:
            return Sample(ids, trained)
        counts = np.ones(len(ids), np.int64)
        counts[tokens] = runs
        places = np.concatenate([[0], np.cumsum(counts)])  # of each token, once runs are repeated
        spans, stop = [], 0
        for one, (first, last) in zip(placed, ranges):
            start, stop = max(int(places[first]), stop), int(places[last])
            spans.append(ImageSpan(start, stop, one.image.key, one.image.size, one.replacement.grid))
            if not self.train_images:
                trained[first:last] = False
        positions = None
        if family.three_axis_positions:
            grids = [one.replacement.grid for one in placed]
            positions = image_positions(int(places[-1]), places[tokens].tolist(), grids, family.merge_size)
        ids, trained = np.repeat(ids, counts), np.repeat(trained, counts)
        return Sample(ids, trained, images=tuple(spans), positions=positions)
