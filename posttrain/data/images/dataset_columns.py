"""Columns of images of a `datasets.Dataset`: from a folder, from paths, into the rows, cut by boxes.

Rows of LLaVA and ShareGPT4V ({"image": path, "conversations": [{"from": "human", "value": "<image>..."}]}) need no conversion:
every method reads them as they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import datasets

from posttrain.data.images.conversion import to_bytes
from posttrain.data.images.limits import DECODE, HEADER, BadImage, ImageLimits
from posttrain.data.images.opening import ImageSource, open_image
from posttrain.data.images.payloads import StoredFile

Root = str | os.PathLike[str] | None


def images_from_folder(folder: str | os.PathLike[str]) -> datasets.Dataset:
    """A row for each image file at any depth: `image`, what `metadata.jsonl` or `metadata.csv` says of its `file_name`, and else
    the name of its folder as `label` where there are several. Pictures stay in their files.

    All of them, where `load_dataset` would take `coco/train2017` for a split and leave out what is beside it.
    """
    return datasets.load_dataset("imagefolder", data_dir=os.fspath(folder), data_files="**", split="train")


def paths_to_images(dataset: datasets.Dataset, column: str = "image", root: Root = None) -> datasets.Dataset:
    """Paths, one or a list of them in a row, as images that `datasets` opens where they are; nothing outside of `root` is.

    Every file is looked for now. A folder that is moved later takes them along no more: see `embed_images`.
    """
    return _with_images(dataset, column, ImageLimits(root=root, check=HEADER), _stored)


def embed_images(dataset: datasets.Dataset, column: str = "image", root: Root = None) -> datasets.Dataset:
    """The bytes of the files that rows name, in the rows: a dataset that can be moved. Every image is decoded once, to be sure."""
    return _with_images(dataset, column, ImageLimits(root=root, check=DECODE), lambda source: _stored(source.carried()))


def crop_by_boxes(
    dataset: datasets.Dataset,
    boxes: str = "boxes",
    column: str = "image",
    *,
    form: str = "xyxy",
    beside: Sequence[str] = (),
) -> datasets.Dataset:
    """A row for each box of a row, with what is inside of it as the image and the box alone in `boxes`.

    Boxes are in pixels of the upright picture, (left, top, right, bottom), or `form="xywh"`: (left, top, width, height), as COCO
    has them; broken pixels count whole, and what is outside of the picture is cut off. Columns `beside` have an entry for each box.
    Of nested columns, `dataset.flatten()` makes columns such as `objects.bbox`.
    """
    if form not in ("xyxy", "xywh"):
        raise ValueError(f"`form` is {form!r}; it must be xyxy or xywh.")
    limits, split = ImageLimits(check=DECODE), (boxes, *beside)

    def cropped(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {name: [] for name in rows}
        for number, *values in zip(numbers, *rows.values()):
            row = dict(zip(rows, values))
            if any(len(row[name]) != len(row[boxes]) for name in beside):
                raise ValueError(f"Row {number}: {', '.join(map(repr, split))} are not equally long.")
            picture = _opened(row[column], limits, f"Row {number}, column {column!r}: ").rgb()
            for i, box in enumerate(row[boxes]):
                edges = _edges(box, form, picture.size, f"Row {number}, box {i}")
                one = {name: value[i] if name in split else value for name, value in row.items()}
                one[column] = {"bytes": to_bytes(picture.crop(edges)), "path": None}
                for name, value in one.items():
                    made[name].append(value)
        return made

    features = dataset.features | {name: dataset.features[name].feature for name in split} | {column: datasets.Image()}
    raw = dataset.cast_column(column, datasets.Image(decode=False))
    return raw.map(cropped, batched=True, batch_size=16, with_indices=True, features=datasets.Features(features))


def _edges(box: Sequence[float], form: str, size: tuple[int, int], place: str) -> tuple[int, int, int, int]:
    """Of whole pixels, inside of a picture of this (width, height)."""
    left, top, right, bottom = box
    if form == "xywh":
        right, bottom = left + right, top + bottom
    edges = (
        max(math.floor(left), 0),
        max(math.floor(top), 0),
        min(math.ceil(right), size[0]),
        min(math.ceil(bottom), size[1]),
    )
    if edges[0] >= edges[2] or edges[1] >= edges[3]:
        raise ValueError(
            f"{place} is {[*box]} ({form}), which has nothing of a picture of {size[0]} x {size[1]} (width x height)."
        )
    return edges


def _stored(source: ImageSource) -> dict[str, Any]:
    """As `datasets` stores an image."""
    if isinstance(source.content, StoredFile):
        return {"bytes": None, "path": source.content.path}
    return {"bytes": source.content if isinstance(source.content, bytes) else to_bytes(source.content), "path": None}


def _opened(payload: Any, limits: ImageLimits, place: str) -> ImageSource:
    try:
        return open_image(payload, limits)
    except BadImage as error:
        raise BadImage(error.kind, f"{place}{error}") from error


def _with_images(
    dataset: datasets.Dataset, column: str, limits: ImageLimits, stored: Callable[[ImageSource], dict[str, Any]]
) -> datasets.Dataset:
    """The dataset with `stored` of every image of a column of images, of lists of them, or of nulls."""
    has_lists = isinstance(dataset.features[column], datasets.List | datasets.LargeList)

    def feature(decode: bool) -> Any:
        return datasets.List(datasets.Image(decode=decode)) if has_lists else datasets.Image(decode=decode)

    def changed(row: dict[str, Any], number: int) -> dict[str, Any]:
        place = f"Row {number}, column {column!r}: "
        payloads = row[column] if has_lists else [row[column]]
        made = [None if one is None else stored(_opened(one, limits, place)) for one in payloads or ()]
        return {column: made if has_lists else made[0]}

    features = datasets.Features(dataset.features | {column: feature(decode=True)})
    return dataset.cast_column(column, feature(decode=False)).map(changed, with_indices=True, features=features)
