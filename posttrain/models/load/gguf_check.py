"""The description of a GGUF file is checked from end to end before the file is loaded; faults are reported in a sentence.

Loaders trust the counts and offsets of a file: one that was cut or made up ends in a KeyError, in gigabytes of memory or in
weights of the wrong place. The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC, VERSIONS = b"GGUF", (2, 3)
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TEXT, LIST = 8, 9
MAX_ENTRIES, MAX_NAME, MAX_DIMENSIONS, ALIGNMENT = 1 << 20, 1 << 16, 4, "general.alignment"
NEEDED = "general.architecture"


class BadGGUF(ValueError):
    """A file that is no GGUF, or a damaged one; the message names it and the place."""


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.size = path, file, path.stat().st_size

    def refuse(self, why: str) -> BadGGUF:
        return BadGGUF(f"{self.path}, byte {self.file.tell():,}: {why}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.file.tell():
            left = self.size - self.file.tell()
            raise self.refuse(
                f"{what} takes {count:,} bytes, and the file ends after {left:,}: it was cut, or is damaged."
            )
        return self.file.read(count)

    def number(self, kind: str, what: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind), what))[0]

    def count(self, what: str, most: int) -> int:
        found = self.number("<Q", what)
        if found > most:
            raise self.refuse(f"{what} is {found:,}; {most:,} is the most that makes sense.")
        return found

    def text(self, what: str, most: int) -> str:
        content = self.take(self.count(f"the length of {what}", most), what)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what} is not UTF-8 text ({error.reason}).") from error

    def value(self, kind: int, what: str, deep: int = 0) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind], what)
        if kind == TEXT:
            return self.text(what, self.size)
        if kind != LIST or deep > 3:
            raise self.refuse(f"{what} has the unknown type {kind}.")
        inner, length = self.number("<I", f"the type of {what}"), self.count(f"the length of {what}", self.size)
        if inner in NUMBERS:
            self.take(length * struct.calcsize(NUMBERS[inner]), what)
        else:
            for _ in range(length):
                self.value(inner, f"an entry of {what}", deep + 1)
        return length


def check_gguf_file(path: Path) -> None:
    """BadGGUF unless header, metadata and tensors are whole, known and inside of the file."""
    with open(path, "rb") as file:
        reader = _Reader(path, file)
        magic = reader.take(4, "the magic number")
        if magic != MAGIC:
            raise reader.refuse(f"the file begins with {magic!r}, and a GGUF file with {MAGIC!r}.")
        version = reader.number("<I", "the version")
        if version not in VERSIONS:
            raise reader.refuse(
                f"version {version} of the format is not read here; {VERSIONS[0]} and {VERSIONS[1]} are."
            )
        tensors = reader.count("the number of tensors", MAX_ENTRIES)
        facts = _facts(reader, reader.count("the number of metadata entries", MAX_ENTRIES))
        described = [_tensor(reader) for _ in range(tensors)]
        _check_places(reader, facts.get(ALIGNMENT, 32), described)


def _facts(reader: _Reader, count: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _ in range(count):
        name = reader.text("the name of a metadata entry", MAX_NAME)
        if name in facts:
            raise reader.refuse(f"the metadata has {name!r} twice.")
        facts[name] = reader.value(reader.number("<I", f"the type of {name!r}"), f"the metadata {name!r}")
    if not isinstance(facts.get(NEEDED), str):
        raise reader.refuse(f"the metadata does not name the model's architecture ({NEEDED!r}).")
    return facts


def _tensor(reader: _Reader) -> tuple[str, int, int]:
    """(name, offset, bytes)."""
    import gguf

    name = reader.text("the name of a tensor", MAX_NAME)
    dimensions = reader.number("<I", f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise reader.refuse(f"the tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible.")
    shape = [reader.number("<Q", f"the shape of {name!r}") for _ in range(dimensions)]
    kind, offset = reader.number("<I", f"the type of {name!r}"), reader.number("<Q", f"the place of {name!r}")
    sizes = {int(known): size for known, size in gguf.GGML_QUANT_SIZES.items()}
    if kind not in sizes:
        raise reader.refuse(f"the tensor {name!r} has the unknown type {kind}.")
    block, nbytes = sizes[kind]
    if shape[0] % block or not all(shape):
        raise reader.refuse(
            f"the tensor {name!r} has the shape {shape}, which its type (blocks of {block}) cannot have."
        )
    return name, offset, math.prod(shape) // block * nbytes


def _check_places(reader: _Reader, alignment: Any, tensors: list[tuple[str, int, int]]) -> None:
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise reader.refuse(f"{ALIGNMENT!r} is {alignment!r}; it is a power of 2, 8 at least.")
    start, end = -(-reader.file.tell() // alignment) * alignment, 0
    if not tensors:
        raise reader.refuse("the file holds no tensors.")
    if len({name for name, *_ in tensors}) < len(tensors):
        raise reader.refuse("two tensors have the same name.")
    for name, offset, nbytes in sorted(tensors, key=lambda tensor: tensor[1]):
        if offset % alignment or offset < end:
            raise reader.refuse(
                f"the tensor {name!r} lies at {offset:,}, inside of another one or not on a multiple of {alignment}."
            )
        end = offset + nbytes
        if start + end > reader.size:
            raise reader.refuse(
                f"the tensor {name!r} ends at byte {start + end:,}, and the file has {reader.size:,}: it was cut, or is damaged."
            )
