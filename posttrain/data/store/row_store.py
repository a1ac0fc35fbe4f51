"""Numbers about the tokens of rows, kept on disk under a hash of the row: append-only, checksummed, safe for many processes.

A store is a folder of segments. A segment is written beside its place and renamed, never changed afterwards, and carries a
checksum of all of its bytes; so a killed writer leaves nothing half-made, several processes write at once without a lock, and a
damaged segment is noticed and put aside: its rows count as never seen.

    "PTROWS1\n"  rows (u64)  values (u64)  keys (16 bytes each)  sizes (i32 each)  values (f32 each)  xxh3-128 of all before it
"""

from __future__ import annotations

import contextlib
import logging
import struct
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import Dataset

from posttrain.core.sample import Sample, Unit
from posttrain.core.secrets import write_whole

logger = logging.getLogger(__name__)

MAGIC = b"PTROWS1\n"
HEADER = struct.Struct("<8sQQ")
KEY_BYTES = 16
SUFFIX = ".rows"


def row_key(sample: Sample) -> bytes:
    """128 bits of what the model is shown and asked: token ids, trained mask, images. Dataset, place and epoch do not matter."""
    digest = xxhash.xxh3_128(struct.pack("<q", len(sample)))
    digest.update(np.ascontiguousarray(sample.input_ids, dtype="<i4").tobytes())
    digest.update(np.packbits(sample.trained).tobytes())
    for image in sample.images:
        digest.update(struct.pack("<ii", image.start, image.stop) + image.key + repr(image.grid).encode())
    return digest.digest()


class RowStore:
    """key -> float32 numbers. `refresh` reads what others have written since."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._known: set[str] = set()
        self._index: dict[bytes, tuple[Path, int, int]] = {}  # key -> (segment, first value, values)
        self._maps: dict[Path, np.ndarray] = {}
        self.refresh()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a worker opens the files itself; pickled maps would be copies of them

    def refresh(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path.name not in self._known:
                self._known.add(path.name)
                self._open(path)

    def read(self, key: bytes) -> np.ndarray:
        path, start, size = self._index[key]
        if path not in self._maps:
            with open(path, "rb") as file:
                _, rows, values = HEADER.unpack(file.read(HEADER.size))
            offset = HEADER.size + (KEY_BYTES + 4) * rows
            self._maps[path] = np.memmap(path, dtype="<f4", mode="r", offset=offset, shape=(values,))
        return self._maps[path][start : start + size]

    def add(self, rows: Iterable[tuple[bytes, np.ndarray]]) -> None:
        """Write rows as one new segment, on the disk before this returns."""
        rows = list(rows)
        if not rows:
            return
        sizes = np.array([len(values) for _, values in rows], dtype="<i4")
        values = np.concatenate([np.asarray(values, dtype="<f4") for _, values in rows])
        content = HEADER.pack(MAGIC, len(rows), len(values)) + b"".join(key for key, _ in rows)
        content += sizes.tobytes() + values.tobytes()
        path = self.folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content + xxhash.xxh3_128_digest(content), private=False, durable=True)
        self._known.add(path.name)
        self._remember(path, [key for key, _ in rows], sizes)

    def _remember(self, path: Path, keys: list[bytes], sizes: np.ndarray) -> None:
        ends = np.cumsum(sizes, dtype=np.int64)
        for key, end, size in zip(keys, ends.tolist(), sizes.tolist()):
            self._index.setdefault(key, (path, end - size, size))

    def _open(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # another process has put it aside
            return
        reason = _damage(content)
        if reason is not None:
            logger.warning(f"{path} is damaged ({reason}): it is put aside, and its rows will be computed again.")
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                path.rename(path.with_suffix(".damaged"))
            return
        _, rows, _ = HEADER.unpack_from(content)
        keys_end = HEADER.size + KEY_BYTES * rows
        keys = [content[at : at + KEY_BYTES] for at in range(HEADER.size, keys_end, KEY_BYTES)]
        self._remember(path, keys, np.frombuffer(content, dtype="<i4", count=rows, offset=keys_end))


def _damage(content: bytes) -> str | None:
    if len(content) < HEADER.size + KEY_BYTES:
        return f"it has {len(content)} bytes"
    magic, rows, values = HEADER.unpack_from(content)
    if magic != MAGIC:
        return "it does not begin like a segment"
    expected = HEADER.size + (KEY_BYTES + 4) * rows + 4 * values + KEY_BYTES
    if len(content) != expected:
        return f"it has {len(content)} bytes instead of {expected}"
    if xxhash.xxh3_128_digest(memoryview(content)[:-KEY_BYTES]) != content[-KEY_BYTES:]:
        return "its checksum does not hold"
    return None


class DatasetView(Dataset):
    """A dataset of units seen in another way; what it does not say itself is the dataset's."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataset":  # copying and pickling look for these before __init__ has run
            raise AttributeError(name)
        return getattr(self.dataset, name)


class AnnotatedDataset(DatasetView):
    """`dataset` whose Samples also carry `per_token[name]`, looked up in a store by what the sample is.

    Nothing is read before its unit is; rows may come in any order, and twice.
    """

    def __init__(self, dataset: Any, name: str, store: RowStore) -> None:
        super().__init__(dataset)
        self.name, self.store = name, store

    def __getitem__(self, index: int) -> Unit:
        return tuple(self._with_numbers(sample) for sample in self.dataset[index])

    def _with_numbers(self, sample: Sample) -> Sample:
        numbers = np.zeros(len(sample), dtype=np.float32)
        if sample.num_trained:
            numbers[1:][sample.trained[1:]] = self.store.read(row_key(sample))
        twin = None if sample.twin is None else self._with_numbers(sample.twin)
        return replace(sample, per_token={**sample.per_token, self.name: numbers}, twin=twin)
