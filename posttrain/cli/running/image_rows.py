"""The images of a dataset, row by row, for `posttrain images`: opened as training opens them, looked at, and written anew."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.cli.errors import UsageError
from posttrain.core.secrets import write_whole
from posttrain.data.images.conversion import to_bytes
from posttrain.data.images.limits import BadImage, ImageLimits
from posttrain.data.images.opening import ImageSource, open_image
from posttrain.data.rows.foreign_formats import parsed_messages
from posttrain.data.rows.row_images import placed_payloads, with_images_used
from posttrain.data.store.building import RowSource

SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
ROWS_FILE, IMAGES_FOLDER = "rows.jsonl", "images"


@dataclass(frozen=True)
class FoundImage:
    """An image of a row, or what is wrong with it."""

    row: int
    place: str  # column, and where in it
    source: ImageSource | BadImage

    def __str__(self) -> str:
        return f"row {self.row}, {self.place}{self.source}"


@dataclass
class ImageRows:
    """Rows of a dataset, and how their images may be opened."""

    rows: RowSource
    limits: ImageLimits

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[list[tuple[int, dict[str, Any]]]]:
        """Some (number, row) at a time: as many as are held in memory together."""
        stop = len(self.rows) if stop is None else min(stop, len(self.rows))
        for first, rows in self.rows.batches(start, stop):
            yield [(number, parsed_messages(row)) for number, row in enumerate(rows, first)]

    def images(self, start: int = 0, stop: int | None = None) -> Iterator[FoundImage]:
        """Every image, in order; several are opened at a time, since Pillow decodes without Python's lock."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for batch in self.batches(start, stop):
                for found in threads.map(self._found, batch):
                    yield from found

    def _found(self, numbered: tuple[int, dict[str, Any]]) -> list[FoundImage]:
        number, row = numbered
        return [
            FoundImage(number, f"column {column!r}: {place}", self._opened(payload))
            for payload, column, place in placed_payloads(row)
        ]

    def _opened(self, payload: Any) -> ImageSource | BadImage:
        try:
            return open_image(payload, self.limits)
        except BadImage as error:
            return error


@dataclass
class ImageSurvey:
    """Counts of a dataset's images."""

    rows: int = 0
    images: int = 0
    keys: set[bytes] = field(default_factory=set)
    rows_with_images: set[int] = field(default_factory=set)
    formats: Counter[str] = field(default_factory=Counter)
    pixels: list[int] = field(default_factory=list)
    largest: tuple[int, int] = (0, 0)  # height, width
    num_bytes: int = 0
    bad: list[FoundImage] = field(default_factory=list)

    def add(self, image: FoundImage) -> None:
        self.images += 1
        self.rows_with_images.add(image.row)
        source = image.source
        if isinstance(source, BadImage):
            self.bad.append(image)
            return
        self.keys.add(source.key)
        self.formats[source.format] += 1
        self.pixels.append(source.height * source.width)
        self.largest = max(self.largest, (source.height, source.width), key=lambda size: size[0] * size[1])
        self.num_bytes += source.num_bytes

    def as_json(self) -> dict[str, Any]:
        ordered = sorted(self.pixels)
        return {
            "rows": self.rows,
            "rows_with_images": len(self.rows_with_images),
            "images": self.images,
            "distinct": len(self.keys),
            "formats": dict(self.formats),
            "bytes": self.num_bytes,
            "pixels": {"median": ordered[len(ordered) // 2], "largest": ordered[-1]} if ordered else {},
            "largest": list(self.largest),
            "bad": [{"row": one.row, "kind": one.source.kind, "what": str(one)} for one in self.bad],
        }


# ---- written anew ----------------------------------------------------------------------------------------------------------


@dataclass
class Conversion:
    """Images of rows in another format and size, in a folder of their own; the dataset itself is only read.

    Rows name images by paths relative to the folder. A file is named by what it was made of, so a run that was ended is continued.
    """

    data: ImageRows
    folder: Path
    format: str
    quality: int
    skips_bad_rows: bool = False
    rows: int = 0
    skipped: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    def run(self) -> None:
        target, unfinished = self.folder / ROWS_FILE, self.folder / f"{ROWS_FILE}.unfinished"
        if target.exists():
            raise UsageError(f"--out: {target} is there already; name another folder, nothing is overwritten.")
        (self.folder / IMAGES_FOLDER).mkdir(parents=True, exist_ok=True)
        with open(unfinished, "w", encoding="utf-8") as lines, ThreadPoolExecutor(os.cpu_count()) as threads:
            for batch in self.data.batches():
                for line in threads.map(self._line, batch):
                    self._add(line, lines)
        os.replace(unfinished, target)

    def _add(self, line: str | FoundImage, lines: Any) -> None:
        if isinstance(line, str):
            self.rows += 1
            lines.write(line)
        elif self.skips_bad_rows:
            self.skipped.append(str(line))
        else:
            raise UsageError(
                f"{line} `--skip-bad-rows` leaves such rows out; `posttrain images check` lists all of them."
            )

    def _line(self, numbered: tuple[int, dict[str, Any]]) -> str | FoundImage:
        """The row as a line of JSON, or its first bad image."""
        number, row = numbered
        place = ""

        def written(payload: Any, column: str, where: str) -> str:
            nonlocal place
            place = f"column {column!r}: {where}"
            return self._written(open_image(payload, self.data.limits))

        try:
            converted = with_images_used(row, written)
        except BadImage as error:
            return FoundImage(number, place, error)
        try:
            return json.dumps(converted, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise UsageError(f"Row {number} cannot be written as JSON: {error}.") from error

    def _written(self, source: ImageSource) -> str:
        """The path of the new file, relative to the folder."""
        name = f"{IMAGES_FOLDER}/{source.key.hex()}-{self.quality}.{SUFFIXES[self.format]}"
        file = self.folder / name
        if not file.exists():
            write_whole(file, to_bytes(source.rgb(), self.format, self.quality), private=False)
        self.files.add(name)
        return name
