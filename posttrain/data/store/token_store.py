"""Tokenised units on disk: flat arrays that are memory-mapped, so that a Sample is a view and nothing is read twice.

Every file holds counts, never offsets, so that the stores of several workers are joined by writing their files one after
the other. `manifest.json` is written last and names the size and checksum of every file; a store without a manifest, or
one that does not agree with it, is damaged and is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.data.vision.positions import image_positions

STORE_VERSION = 3  # 1 had no seal, 2 no images
MANIFEST = "manifest.json"
PROBLEMS = "problems.jsonl"
DTYPES = {
    "tokens": np.int32,  # the ids of all samples
    "lengths": np.int32,  # tokens of each sample
    "ranges": np.int32,  # start, stop of each run of trained tokens, within its sample
    "range_counts": np.int32,  # runs of each sample
    "unit_sizes": np.int32,  # samples of each unit
    "rows": np.int64,  # source row of each unit
}
SPANS = np.dtype(
    [("start", "<i4"), ("stop", "<i4"), ("height", "<i4"), ("width", "<i4"), ("grid", "<i4", 3), ("key", "V16")]
)
"""An ImageSpan; a grid of fewer than three numbers ends in -1."""
IMAGE_KEYS = np.dtype("S16")
IMAGE_PLACES = np.dtype([("row", "<i8"), ("number", "<i4")])
IMAGE_DTYPES = {
    "spans": SPANS,  # images of all samples
    "span_counts": np.int32,  # images of each sample
    "image_keys": IMAGE_KEYS,  # of the images of all rows, in ascending order once the store is whole
    "image_places": IMAGE_PLACES,  # where each of them is: its row, and its number in `row_images(row)`
}
"""Further files of a store whose rows may have images."""
SCALAR, PER_TOKEN = "scalar.", "token."


class DamagedStoreError(RuntimeError):
    """A token store is incomplete, or its files are not the ones that were written."""


def _dtype_of(file: str) -> Any:
    if file.startswith(SCALAR):
        return np.float64
    return np.float32 if file.startswith(PER_TOKEN) else (DTYPES | IMAGE_DTYPES)[file]


class StoreWriter:
    """Appends units to the files of a store, or of a part of one. `close` before reading it or joining it with others."""

    def __init__(self, folder: Path, part: str = "", with_images: bool = False) -> None:
        """`part` begins the names of the files of a part of a store (see `join_part`). `with_images`: rows may have some."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.part = folder, part
        self.files: dict[str, BinaryIO] = {}
        self.extra_names: tuple[str, ...] | None = None
        self._open_files = contextlib.ExitStack()
        self.with_images = with_images
        self._open(DTYPES | IMAGE_DTYPES if with_images else DTYPES)

    def _open(self, names: Iterable[str]) -> None:
        for name in names:
            file = open(self.folder / f"{self.part}{name}.bin", "wb")  # noqa: SIM115 - `close` closes it
            self.files[name] = self._open_files.enter_context(file)

    def add(self, units: list[Unit], images: Iterable[tuple[bytes, int, int]] = ()) -> None:
        """Write units whose samples carry their `row`, and of each image of their rows its key, row and number in the row."""
        samples = [sample for unit in units for sample in unit]
        if not samples:
            return
        ranges, range_counts = trained_ranges([sample.trained for sample in samples])
        self._write("tokens", np.concatenate([sample.input_ids for sample in samples]))
        self._write("lengths", [len(sample) for sample in samples])
        self._write("ranges", ranges)
        self._write("range_counts", range_counts)
        self._write("unit_sizes", [len(unit) for unit in units])
        self._write("rows", [unit[0].row for unit in units])
        if self.with_images:
            self._write("spans", np.array([_stored_span(i) for s in samples for i in s.images], dtype=SPANS))
            self._write("span_counts", [len(sample.images) for sample in samples])
            images = list(images)
            self._write("image_keys", np.array([key for key, _, _ in images], dtype=IMAGE_KEYS))
            self._write("image_places", np.array([(row, number) for _, row, number in images], dtype=IMAGE_PLACES))
        for name in self._extras(samples):
            key = name.split(".", 1)[1]
            if name.startswith(SCALAR):
                self._write(name, [sample.scalars[key] for sample in samples])
            else:
                self._write(name, np.concatenate([sample.per_token[key] for sample in samples]))

    def _extras(self, samples: list[Sample]) -> tuple[str, ...]:
        """Names of the scalars and per-token numbers; the same for every sample, as a batch stacks them."""
        for sample in samples:
            names = (*(SCALAR + n for n in sorted(sample.scalars)), *(PER_TOKEN + n for n in sorted(sample.per_token)))
            if self.extra_names is None:
                self.extra_names = names
                self._open(names)
            elif names != self.extra_names:
                raise ValueError(
                    f"The sample of row {sample.row} has {names}, those before it have {self.extra_names}."
                )
        return self.extra_names or ()

    def _write(self, name: str, values: Any) -> None:
        self.files[name].write(np.ascontiguousarray(values, dtype=_dtype_of(name)).tobytes())

    def close(self) -> None:
        self._open_files.close()


def _stored_span(span: ImageSpan) -> tuple[Any, ...]:
    return span.start, span.stop, *span.size, (*span.grid, -1, -1)[:3], span.key


def _read_span(stored: np.void) -> ImageSpan:
    start, stop, height, width, grid, key = stored.tolist()
    return ImageSpan(start, stop, key, (height, width), tuple(number for number in grid.tolist() if number >= 0))


def trained_ranges(masks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """((runs, 2) start and stop of each run of True within its mask, (masks,) number of runs of each mask)."""
    trained = np.concatenate(masks)
    stops = np.cumsum([len(mask) for mask in masks])
    starts = stops - [len(mask) for mask in masks]
    before, after = np.zeros_like(trained), np.zeros_like(trained)
    before[1:], after[:-1] = trained[:-1], trained[1:]
    before[starts[starts < stops]] = after[stops[starts < stops] - 1] = False  # runs end where masks do
    begins, ends = np.flatnonzero(trained & ~before), np.flatnonzero(trained & ~after) + 1
    mask_of = np.searchsorted(stops, begins, side="right")
    return np.stack([begins, ends], axis=1) - starts[mask_of, None], np.bincount(mask_of, minlength=len(masks))


def join_part(folder: Path, part: str) -> None:
    """Put the files whose names begin with `part` at the end of those without that beginning.

    Parts are not folders: to remove a folder takes a hundred times as long as to remove a file.
    """
    for source in sorted(folder.glob(f"{part}*")):
        target = folder / source.name.removeprefix(part)
        if not target.exists():
            source.rename(target)
            continue
        with open(source, "rb") as read, open(target, "ab") as write:
            shutil.copyfileobj(read, write, 1 << 22)
        source.unlink()


def sort_images(folder: Path) -> None:
    """Put the image table in the order of its keys, so that an image is found in the mapped files without an index."""
    keys, places = folder / "image_keys.bin", folder / "image_places.bin"
    if keys.exists():
        order = np.argsort(unsorted := np.fromfile(keys, IMAGE_KEYS), kind="stable")
        np.fromfile(places, IMAGE_PLACES)[order].tofile(places)
        unsorted[order].tofile(keys)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Write the manifest: from now on the store is whole."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3": _checksum(path)}
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".jsonl")
    }
    manifest = {"version": STORE_VERSION, "files": files, "facts": facts}
    manifest["seal"] = _seal(manifest)
    with open(folder / MANIFEST, "w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _seal(manifest: dict[str, Any]) -> str:
    """A checksum of what the manifest says: one that was changed is noticed, too."""
    sealed = {name: value for name, value in manifest.items() if name != "seal"}
    return xxhash.xxh3_128_hexdigest(json.dumps(sealed, sort_keys=True).encode())


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class TokenStore:
    """A sealed store. Opening it checks every file against the manifest."""

    def __init__(self, folder: str | os.PathLike[str], verify: bool = True) -> None:
        self.folder = Path(folder)
        manifest = self._read_manifest()
        self.facts: dict[str, Any] = manifest["facts"]
        for name, expected in manifest["files"].items():
            self._check_file(name, expected, verify)
        names = [name.removesuffix(".bin") for name in manifest["files"] if name.endswith(".bin")]
        self._arrays = {name: _map_file(self.folder / f"{name}.bin", _dtype_of(name)) for name in names}
        self.lengths = self._arrays["lengths"]
        self.rows = self._arrays["rows"]
        self.unit_offsets = _offsets(self._arrays["unit_sizes"])
        self._starts = _offsets(self.lengths)
        self._range_starts = _offsets(self._arrays["range_counts"])
        self._ranges = self._arrays["ranges"].reshape(-1, 2)
        self.spans: np.ndarray = self._arrays.get("spans", np.zeros(0, SPANS))
        self.span_counts: np.ndarray = self._arrays.get("span_counts", np.zeros(0, np.int32))
        self.image_keys: np.ndarray = self._arrays.get("image_keys", np.zeros(0, IMAGE_KEYS))
        self.image_places: np.ndarray = self._arrays.get("image_places", np.zeros(0, IMAGE_PLACES))
        self._span_starts = _offsets(self.span_counts) if len(self.spans) else None
        self._scalars = {n.removeprefix(SCALAR): a for n, a in self._arrays.items() if n.startswith(SCALAR)}
        self._per_token = {n.removeprefix(PER_TOKEN): a for n, a in self._arrays.items() if n.startswith(PER_TOKEN)}

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            if manifest["version"] != STORE_VERSION:
                raise DamagedStoreError(f"{self.folder} has version {manifest['version']}, not {STORE_VERSION}.")
            if manifest["seal"] != _seal(manifest):
                raise DamagedStoreError(f"{self.folder / MANIFEST} is not what was written.")
            return manifest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedStoreError(f"{self.folder} has no readable {MANIFEST}: {error}") from error

    def _check_file(self, name: str, expected: dict[str, Any], verify: bool) -> None:
        path = self.folder / name
        size = path.stat().st_size if path.exists() else -1
        if size != expected["bytes"]:
            raise DamagedStoreError(f"{path} has {max(size, 0)} bytes, {expected['bytes']} were written.")
        if verify and _checksum(path) != expected["xxh3"]:
            raise DamagedStoreError(f"The content of {path} is not what was written.")

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}  # workers that are spawned map the files themselves

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"], verify=False)

    @property
    def num_units(self) -> int:
        return len(self.rows)

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def tokens_of(self, index: int) -> np.ndarray:
        """The tokens of a sample, a view into the file."""
        return self._arrays["tokens"][self._starts[index] : self._starts[index + 1]]

    def sample(self, index: int, row: int) -> Sample:
        """A Sample whose tokens are a view into the file."""
        start, stop = self._starts[index], self._starts[index + 1]
        trained = np.zeros(stop - start, dtype=bool)
        for first, last in self._ranges[self._range_starts[index] : self._range_starts[index + 1]]:
            trained[first:last] = True
        return Sample(
            self._arrays["tokens"][start:stop],
            trained,
            per_token={name: values[start:stop] for name, values in self._per_token.items()},
            scalars={name: float(values[index]) for name, values in self._scalars.items()},
            images=(images := self.images_of(index)),
            positions=self._positions(self._arrays["tokens"][start:stop], images),
            row=row,
        )

    def images_of(self, index: int) -> tuple[ImageSpan, ...]:
        if self._span_starts is None:
            return ()
        return tuple(map(_read_span, self.spans[self._span_starts[index] : self._span_starts[index + 1]]))

    @property
    def sample_of_span(self) -> np.ndarray:
        """(spans,) the sample that each image stands in."""
        return np.repeat(np.arange(self.num_samples), self.span_counts) if len(self.spans) else np.zeros(0, np.int64)

    def _positions(self, tokens: np.ndarray, images: tuple[ImageSpan, ...]) -> np.ndarray | None:
        """Positions of three axes follow from the spans, and are not stored."""
        placeholder, merge_size = self.facts.get("three_axis_positions") or (None, 1)
        if placeholder is None or not images:
            return None
        starts = [image.start + int((tokens[image.start : image.stop] == placeholder).argmax()) for image in images]
        return image_positions(len(tokens), starts, [image.grid for image in images], merge_size)

    def unit(self, index: int) -> Unit:
        row = int(self.rows[index])
        return tuple(self.sample(i, row) for i in range(self.unit_offsets[index], self.unit_offsets[index + 1]))

    def find_image(self, key: bytes) -> tuple[int, int] | None:
        """(row, number in `row_images(row)`) of an image, the first where it is in several rows; None where it is in none."""
        at = int(np.searchsorted(self.image_keys, wanted := np.array(key, IMAGE_KEYS)))
        if at == len(self.image_keys) or self.image_keys[at] != wanted:
            return None
        row, number = self.image_places[at].tolist()
        return row, number

    def trained_within(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """(samples,) trained tokens in a window of each sample; its first token has nothing that predicts it."""
        sample_of_range = np.repeat(np.arange(self.num_samples), self._arrays["range_counts"])
        first = np.maximum(self._ranges[:, 0], starts[sample_of_range] + 1)
        last = np.minimum(self._ranges[:, 1], stops[sample_of_range])
        counts = np.bincount(sample_of_range, weights=np.maximum(last - first, 0), minlength=self.num_samples)
        return counts.astype(np.int64)

    def first_trained(self, index: int) -> int:
        """Where the trained part of a sample begins; its length when nothing is trained."""
        ranges = self._ranges[self._range_starts[index] : self._range_starts[index + 1]]
        return int(ranges[0, 0]) if len(ranges) else int(self.lengths[index])


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _map_file(path: Path, dtype: Any) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def remove_folder(folder: Path) -> None:
    """Remove a folder that may be gone already, or be removed by another process at the same time."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
