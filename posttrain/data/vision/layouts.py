"""What an image becomes in the text: a function of its height and width, never of its pixels."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.vision import VisionFamily
from posttrain.data.vision.formulas import FORMULAS, ImageSizeError

logger = logging.getLogger(__name__)

# Height and width of the blank images that a formula is compared on: tiny, thin, square, just beside round numbers, large.
EXTREMES = (
    *((2, 2), (8, 300), (300, 8), (13, 57), (56, 56), (57, 56), (64, 2000), (2000, 64)),
    *((224, 224), (336, 337), (672, 335), (480, 1921), (1921, 480), (1000, 1000), (1365, 1024), (1500, 1501)),
)
USUAL = (336, 448)
_TILE_MARK = re.compile(r"<row_(\d+)_col_(\d+)>")


@dataclass(frozen=True)
class ImageLayout:
    """What the processor writes for an image of one size."""

    text: str  # takes the place of the mark that the template wrote
    placeholders: int  # how often the family's placeholder stands in it: one for each feature
    grid: tuple[int, ...]  # see `VisionFamily.grid_of`


def image_options(
    family: VisionFamily,
    processor: Any,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Options of the image processor for every call of it, checked: processors ignore what they do not know.

    `min_pixels` and `max_pixels` are handed over as the `size` that they have become: as arguments of a call they are
    deprecated, and transformers' helpers would write them into defaults that all processors of the class share.
    """
    options, image_processor = dict(others or {}), processor.image_processor
    known = sorted(image_processor.valid_kwargs.__annotations__)
    for name in options:
        if name not in known:
            raise ValueError(
                f"image_processor_kwargs has {name!r}, which {type(image_processor).__name__} does not have. "
                f"Its options: {', '.join(known)}."
            )
    limits = {
        "shortest_edge": options.pop("min_pixels", min_pixels),
        "longest_edge": options.pop("max_pixels", max_pixels),
    }
    limits = {edge: pixels for edge, pixels in limits.items() if pixels is not None}
    if limits and family.grid_of != "patches":
        raise ValueError(
            f"min_pixels and max_pixels do not exist for models of type {family.model_type!r}: their image processor does "
            "not choose a number of pixels. Use image_max_pixels, which shrinks images before it."
        )
    if limits:
        own = {edge: image_processor.size[edge] for edge in ("shortest_edge", "longest_edge")}
        options["size"] = {**own, **options.get("size", {}), **limits}
    return options


def with_options(processor: Any, options: Mapping[str, Any]) -> Any:
    """The processor to be saved with a model that was trained with these options, so that whoever loads it shows the model images
    as the training did. A copy, for the given one may be used elsewhere; their tokenizer is one."""
    made = copy.copy(processor)
    made.image_processor = copy.deepcopy(processor.image_processor)
    for name, value in options.items():
        setattr(made.image_processor, name, value)
    defaults = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("images_kwargs") or {}
    outranked = sorted(name for name in options if name in defaults and defaults[name] != options[name])
    if outranked:
        logger.warning(
            f"{type(processor).__name__} has a fixed default for {', '.join(outranked)}, which is stronger than what is saved with "
            f"the model: hand {options} over in every call (`images_kwargs`) where it is used."
        )
    return made


class ImageLayouts:
    """Layouts of one processor with one set of options, each size computed once.

    The family's formula is compared with the processor on 16 blank images of extreme sizes. Where they differ, or the
    options are beyond the formula, each new size costs a run of the processor on a blank image instead.
    """

    def __init__(self, family: VisionFamily, processor: Any, options: Mapping[str, Any] | None = None) -> None:
        self.family, self.processor, self.options = family, processor, dict(options or {})
        self._by_size: dict[tuple[int, int], ImageLayout] = {}
        self._distinct: dict[ImageLayout, ImageLayout] = {}
        if self.options:
            self._refuse_what_fails()
        self.why_measured = self._why_not_computed()
        if self.why_measured:
            logger.warning("%s Blank images are run through the processor instead, once per size.", self.why_measured)

    def layout(self, height: int, width: int) -> ImageLayout:
        """ImageSizeError: the processor refuses images of this size."""
        if (height, width) not in self._by_size:
            made = (None if self.why_measured else self.computed(height, width)) or self.measured(height, width)
            # Many sizes share a layout, whose text may have thousands of placeholders.
            self._by_size[height, width] = self._distinct.setdefault(made, made)
        return self._by_size[height, width]

    def computed(self, height: int, width: int) -> ImageLayout | None:
        """By the family's formula; None where it has none for these options."""
        formula = FORMULAS.get(self.family.model_type)
        divided = formula(height, width, self._read) if formula else None
        if divided is None:
            return None
        grid, read_by_processor = divided
        return self._of_text(self.processor.replace_image_token(read_by_processor, image_idx=0), grid)

    def measured(self, height: int, width: int) -> ImageLayout:
        """By the processor itself, on a blank image."""
        from PIL import Image

        blank = Image.new("RGB", (width, height), (127, 127, 127))
        try:
            shown = {"text": [self.family.written], "images": [[blank]], "images_kwargs": self.options}
            inputs = self.processor(**shown, return_text_replacement_offsets=True)
        except ValueError as error:
            raise ImageSizeError(
                f"{type(self.processor).__name__} refuses an image of {height} x {width} pixels (height x width): {error}"
            ) from error
        text = inputs["text_replacement_offsets"][0][0]["replacement"]
        return self._of_text(text, self._grid(inputs, text))

    def _of_text(self, text: str, grid: tuple[int, ...]) -> ImageLayout:
        return ImageLayout(text, text.count(self.family.placeholder), grid)

    def _refuse_what_fails(self) -> None:
        """Values of options that the processor cannot use fail in any way of its own."""
        try:
            self.measured(*USUAL)
        except ImageSizeError:
            return  # which is said of each image that it is refused for
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{type(self.processor).__name__} cannot use the options {self.options} of images: {reason}"
            ) from error

    def _grid(self, inputs: Mapping[str, Any], text: str) -> tuple[int, ...]:
        if self.family.grid_of == "patches":
            return tuple(int(number) for number in inputs["image_grid_thw"][0])
        if self.family.grid_of == "tile_rows":
            tiles = [(int(row), int(column)) for row, column in _TILE_MARK.findall(text)]
            return max(tiles, default=(0, 0))
        pixels = inputs["pixel_values"]
        return (len(pixels[0]) if pixels[0].ndim == 4 else len(pixels),)

    def _read(self, name: str) -> Any:
        """An option as the image processor gets it: of the call, else the processor's default, else its own."""
        if name in self.options:
            return self.options[name]
        defaults = getattr(self.processor.valid_processor_kwargs, "_defaults", {}).get("images_kwargs") or {}
        return defaults[name] if name in defaults else getattr(self.processor.image_processor, name, None)

    def _why_not_computed(self) -> str | None:
        name = type(self.processor).__name__
        for height, width in EXTREMES:
            computed = _outcome(self.computed, height, width)
            if computed is None:
                return f"There is no formula for what {name} writes for an image with the options {self.options}."
            measured = _outcome(self.measured, height, width)
            if computed != measured:
                return (
                    f"For an image of {height} x {width} pixels (height x width) {name} gives {_in_words(measured)}, and "
                    f"the formula for {self.family.model_type!r} gives {_in_words(computed)}."
                )
        return None


def _outcome(make: Callable[[int, int], ImageLayout | None], height: int, width: int) -> ImageLayout | str | None:
    try:
        return make(height, width)
    except ImageSizeError:
        return "an error"


def _in_words(outcome: ImageLayout | str) -> str:
    if isinstance(outcome, str):
        return outcome
    return f"{outcome.placeholders} placeholders in {len(outcome.text)} characters, grid {outcome.grid}"
