"""Arrow arrays as numpy arrays, from their memory. `to_numpy` does the same, but imports pandas, which takes half a second."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def whole(column: pa.ChunkedArray) -> Any:
    """A column in one piece."""
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def floats(array: pa.Array) -> np.ndarray:
    """Numbers or booleans as float64; null is NaN."""
    if pa.types.is_boolean(array.type):
        array = pc.cast(array, pa.uint8())
    array = pc.cast(array, pa.float64())
    if not len(array):
        return np.zeros(0)
    validity, values = array.buffers()
    numbers = np.frombuffer(values, np.float64, len(array), array.offset * 8)
    return numbers if not array.null_count else np.where(_bits(validity, array), numbers, np.nan)


def valid(array: pa.Array) -> np.ndarray:
    """(values,) float64: 1 where there is a value, 0 where it is null."""
    return floats(pc.is_valid(array))


def _bits(buffer: pa.Buffer, array: pa.Array) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(bool)


class Lists:
    """Lists of any kind: how long they are, and the values of all of them, one after the other."""

    def __init__(self, array: Any) -> None:
        self.size = len(array)
        if not self.size:
            self.starts, self.lengths = np.zeros(1, np.int64), np.zeros(0, np.int64)
        else:
            ends = np.frombuffer(array.buffers()[1], np.int32, self.size + 1, array.offset * 4).astype(np.int64)
            self.starts, self.lengths = ends, np.diff(ends)
        self._array = array

    @property
    def values(self) -> Any:
        return self._part(self._array.values)

    @property
    def keys(self) -> Any:
        """Of maps."""
        return self._part(self._array.keys)

    @property
    def items(self) -> Any:
        return self._part(self._array.items)

    def _part(self, values: Any) -> Any:
        return values.slice(int(self.starts[0]), int(self.starts[-1] - self.starts[0]))

    def owners(self) -> np.ndarray:
        """For each value, the number of its list."""
        return np.repeat(np.arange(self.size), self.lengths)

    def sums(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.owners(), values, self.size).astype(np.float64)
