"""VisionFamily: what must be known about an architecture that sees images. Values only: no tensor, no image, no processor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

TOWER, PROJECTOR, LANGUAGE_MODEL = "tower", "projector", "language_model"


@dataclass(frozen=True)
class VisionFamily:
    """One architecture of transformers, by its `model_type`.

    Features are matched to placeholders by order alone in every family, so what is said here of one image holds for the
    images of a whole batch, laid end to end in the order of their placeholders.
    """

    model_type: str
    processor_class: str
    forward_keys: tuple[str, ...]  # arguments of `forward` that hold images; the first has the pixels
    # What `ImageLayout.grid` counts: (t, rows, columns) of patches; (rows, columns) of tiles, (0, 0) where the image is not
    # split, and one view of the whole beside them; or (tiles,), the view of the whole included.
    grid_of: Literal["patches", "tile_rows", "tiles"]
    # What `get_image_features` returns: a list or tuple with an item per image, or one tensor with a row per tile.
    # "found": one of these, or one tensor with a row per feature, as it comes.
    features: Literal["per_image", "per_tile", "found"]
    tower: str  # names of modules and parameters, as `named_parameters` of the causal model has them
    projectors: tuple[str, ...]  # may lie inside of the tower
    language_models: tuple[str, ...]
    markers: tuple[str, ...]  # control texts around and between placeholders
    deepstack: bool = False  # features of several depths of the tower, each like `features`
    pixels_in_one_row: bool = False  # pixels are (1, tiles of all images, ...) instead of (tiles of all images, ...)
    three_axis_positions: bool = False  # M-RoPE: positions of time, row and column
    token_types_key: str | None = None  # argument of `forward` with one number per token, made from the spans
    images_see_themselves_whole: bool = False  # bidirectional attention inside of an image
    prefix_sees_itself_whole: bool = False  # a prefix-LM: bidirectional attention over the whole prompt
    is_found: bool = False  # in no table, but by transformers' conventions: its batches are padded

    # Of one checkpoint, read from its processor by `data.vision.families.vision_family`.
    written: str = ""  # what stands for an image in a rendered conversation, and is replaced
    written_id: int = -1
    placeholder: str = ""  # what stands in the replacement once for each feature
    placeholder_id: int = -1
    forbidden_ids: tuple[int, ...] = ()  # placeholders and markers: a model that writes one would refer to no image
    merge_size: int = 1  # patches along one side of a placeholder's square, where the grid is of patches

    def pixel_rows(self, grid: tuple[int, ...]) -> int:
        """How many rows of the pixels belong to an image of this grid: no family's batch says so for all of its images."""
        if self.grid_of == "tile_rows":
            return math.prod(grid) + 1
        return math.prod(grid)

    @property
    def tower_has_bounds(self) -> bool:
        """Whether its images lie end to end as patches, each attending to its own image or window only."""
        return self.grid_of == "patches"

    def part_of(self, parameter: str) -> str:
        """TOWER, PROJECTOR or LANGUAGE_MODEL: where a parameter of the model belongs, by its full name."""
        parts = ((PROJECTOR, self.projectors), (LANGUAGE_MODEL, self.language_models), (TOWER, (self.tower,)))
        for part, paths in parts:  # projectors first: some lie inside of the tower
            if any(parameter == path or parameter.startswith(path + ".") for path in paths):
                return part
        raise ValueError(
            f"The parameter {parameter!r} belongs to no part of {self.model_type!r} models that posttrain knows: "
            f"{', '.join((self.tower, *self.projectors, *self.language_models))}."
        )
