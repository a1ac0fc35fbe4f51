"""The parts of a version as they come over the wire, read: exactly what was encoded (`payload`), or a PayloadError."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from ..bodies import Header, PieceEntry, read, read_json, refuse_twice
from ..errors import PayloadError
from ..wire.payload import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Buffer,
    TensorSpec,
    block_digests,
    combined,
    header_digest,
)


@dataclass(frozen=True)
class Piece:
    """Bytes of one tensor: all of them where `offset` is 0 and `data` is as long as the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str
    data: memoryview
    digests: tuple[str, ...]  # of the blocks of the data, as they were found

    @property
    def is_whole(self) -> bool:
        return len(self.data) == TensorSpec(self.name, self.dtype, self.shape).nbytes


@dataclass(frozen=True)
class Part:
    version: int
    part: int  # counted from 0
    parts: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class PartHead:
    """What a part says of itself before its data: read first, where the data comes on another way."""

    version: int
    part: int
    parts: int
    entries: tuple[PieceEntry, ...]
    nbytes: int  # of the data
    digest: str  # of the head: with the checksums in it, that of the whole part

    def with_data(self, data: Buffer) -> Part:
        """The whole part; `PayloadError` where the data is not what the head says."""
        view = memoryview(data).toreadonly()
        if view.format != "B":
            view = view.cast("B")
        pieces, end = [], 0
        for entry in self.entries:
            piece, end = _piece(entry, view, end)
            pieces.append(piece)
        if end != len(view):
            raise PayloadError(f"The header describes {end} bytes of data; the body has {len(view)}.")
        refuse_twice([piece.name for piece in pieces])
        return Part(self.version, self.part, self.parts, tuple(pieces))


def parse_head(body: Buffer) -> tuple[PartHead, memoryview]:
    """(the head that these bytes begin with, what follows it); `PayloadError` for anything that is none."""
    view = memoryview(body).toreadonly()
    if len(view) < PREFIX_BYTES or view[: len(MAGIC)] != MAGIC:
        raise PayloadError(f"The body ({len(view)} bytes) does not begin like a weight payload of this format.")
    length = int.from_bytes(view[len(MAGIC) : len(MAGIC) + 4], "little")
    if length > MAX_HEADER_BYTES:
        raise PayloadError(f"The header is announced with {length} bytes; at most {MAX_HEADER_BYTES} are taken.")
    header, data = view[PREFIX_BYTES : PREFIX_BYTES + length], view[PREFIX_BYTES + length :]
    if len(header) < length:
        raise PayloadError(
            f"The header is announced with {length} bytes and the body ends after {len(header)} of them."
        )
    digest = header_digest(header)
    if not hmac.compare_digest(digest, bytes(view[len(MAGIC) + 4 : PREFIX_BYTES])):
        raise PayloadError("The header does not have the checksum that stands before it: it was changed on the way.")
    found = read(read_json(header), Header, "the header", PayloadError)
    if found.part >= found.parts:
        raise PayloadError(f"`part` of the header is {found.part}, and there are {found.parts} parts.")
    entries = tuple(found.tensors)
    return PartHead(found.version, found.part, found.parts, entries, entries[-1].end, digest.hex()), data


def _piece(entry: PieceEntry, data: memoryview, expected_begin: int) -> tuple[Piece, int]:
    spec, begin, end = entry.spec(), entry.begin, entry.end
    if begin != expected_begin:
        raise PayloadError(f"{spec.name} begins at byte {begin}; the tensor before it ends at {expected_begin}.")
    if end > len(data):
        raise PayloadError(f"{spec.name} ends at byte {end}; the body has {len(data)} bytes of data.")
    if end < begin or entry.offset + end - begin > spec.nbytes or (end == begin and spec.nbytes):
        raise PayloadError(
            f"{spec.name} ({spec.dtype} {list(spec.shape)}, {spec.nbytes} bytes) cannot hold the {end - begin} bytes "
            f"sent for offset {entry.offset}."
        )
    if spec.checksum is None:
        raise PayloadError(f"{spec.name} has no checksum.")
    kind = spec.checksum.partition(":")[0]
    digests = block_digests(data[begin:end], kind)
    if not hmac.compare_digest(combined(digests, kind), spec.checksum):
        raise PayloadError(f"The bytes of {spec.name} do not have their checksum: they were changed on the way.")
    return Piece(spec.name, spec.dtype, spec.shape, entry.offset, spec.checksum, data[begin:end], digests), end
