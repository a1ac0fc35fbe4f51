"""The parts of one update: read as exactly what was encoded (`payload`) or refused, and kept until all are there and right."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bodies import Header, PieceEntry, read, read_json, refuse_duplicates
from ..engine.protocol import DTYPES
from ..errors import Conflict, PayloadError
from ..wire.host_memory import HostMemory, copy_bytes
from ..wire.payload import (
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Buffer,
    Manifest,
    TensorSpec,
    block_digests,
    blocks_between,
    combined,
    header_digest,
    matches,
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
    """What a part says of itself before its data: read first, where the data comes by another transport."""

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
        refuse_duplicates([piece.name for piece in pieces])
        return Part(self.version, self.part, self.parts, tuple(pieces))


def parse_head(body: Buffer) -> tuple[PartHead, memoryview]:
    """(the head that these bytes begin with, what follows it); `PayloadError` for anything that is none."""
    view = memoryview(body).toreadonly()
    if len(view) < PREFIX_BYTES or view[: len(MAGIC)] != MAGIC:
        raise PayloadError(f"The body ({len(view)} bytes) does not begin like a weight payload of this format.")
    length = int.from_bytes(view[len(MAGIC) : len(MAGIC) + 4], "little")
    if length > MAX_HEADER_BYTES:
        raise PayloadError(f"The header is announced with {length} bytes; at most {MAX_HEADER_BYTES} are accepted.")
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
    kind = spec.checksum.partition(":")[0]
    digests = block_digests(data[begin:end], kind)
    if not hmac.compare_digest(combined(digests, kind), spec.checksum):
        raise PayloadError(f"The bytes of {spec.name} do not have their checksum: they were changed on the way.")
    return Piece(spec.name, spec.dtype, spec.shape, entry.offset, spec.checksum, data[begin:end], digests), end


class Staging:
    """One version that arrives. Parts may come in any order, side by side and twice; one that contradicts is refused whole."""

    def __init__(self, manifest: Manifest, memory: HostMemory) -> None:
        self.manifest = manifest
        self.received: dict[int, str] = {}  # part -> digest of its head, which has the checksums of the rest
        self._memory = memory
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._bytes: dict[str, memoryview] = {}
        self._places: dict[int, str] = {}  # part -> digest, from when its bytes have a place of their own
        self._filled: dict[str, list[tuple[int, int]]] = {name: [] for name in self._specs}
        self._digests: dict[str, dict[tuple[str, int], str]] = {name: {} for name in self._specs}  # of (kind, block)
        self._lock = threading.Lock()

    def add(self, part: Part, digest: str) -> None:
        """Take a part whose pieces have their checksums. `digest`: of its head, to know it again.

        Bytes are copied outside of the lock. Where a part comes twice at the same time, both write the same bytes.
        """
        with self._lock:
            self._make_room(part, digest)
        if part.part in self.received:
            return  # sent again after a lost answer
        for piece in part.pieces:
            begin, end = piece.offset, piece.offset + len(piece.data)
            copy_bytes(piece.data, self._bytes[piece.name][begin:end])
        self.received[part.part] = digest

    def _make_room(self, part: Part, digest: str) -> None:
        if (part.version, part.parts) != (self.manifest.version, self.manifest.parts):
            raise Conflict(
                f"The part is of version {part.version} in {part.parts} parts; the update that was begun is version "
                f"{self.manifest.version} in {self.manifest.parts}."
            )
        if self._places.get(part.part, digest) != digest:
            raise PayloadError(f"Part {part.part} was received before with other bytes.")
        if part.part in self._places:
            return
        for piece in part.pieces:
            self._check(piece)
        for name in {piece.name for piece in part.pieces} - self._bytes.keys():
            self._bytes[name] = self._memory.take(self._specs[name].nbytes)
        for piece in part.pieces:
            self._note(piece)
        self._places[part.part] = digest

    def _check(self, piece: Piece) -> None:
        spec = self._specs.get(piece.name)
        if spec is None:
            raise PayloadError(f"{piece.name} is not in the manifest of this update.")
        if (piece.dtype, piece.shape) != (spec.dtype, spec.shape):
            raise PayloadError(
                f"{piece.name} comes as {piece.dtype} {list(piece.shape)}; the manifest says {spec.dtype} {list(spec.shape)}."
            )
        same_kind = spec.checksum.partition(":")[0] == piece.checksum.partition(":")[0]
        if piece.is_whole and same_kind and piece.checksum != spec.checksum:
            raise PayloadError(f"{piece.name} does not have the checksum of the manifest.")
        begin, end = piece.offset, piece.offset + len(piece.data)
        if any(begin < other_end and other_begin < end for other_begin, other_end in self._filled[piece.name]):
            raise PayloadError(f"{piece.name}: bytes {begin} to {end} were received before in another part.")
        if spec.nbytes == 0 and self._filled[piece.name]:
            raise PayloadError(f"{piece.name} was received before in another part.")

    def _note(self, piece: Piece) -> None:
        begin, end = piece.offset, piece.offset + len(piece.data)
        self._filled[piece.name].append((begin, end))
        kind, blocks = piece.checksum.partition(":")[0], blocks_between(begin, end, self._specs[piece.name].nbytes)
        for block, digest in zip(blocks or (), piece.digests):
            self._digests[piece.name][kind, block] = digest

    def missing_parts(self) -> list[int]:
        return [part for part in range(self.manifest.parts) if part not in self.received]

    def verify(self) -> None:
        """Raises unless every byte is there and has its checksum."""
        if missing := self.missing_parts():
            raise Conflict(
                f"{len(missing)} of {self.manifest.parts} parts are missing, the first is part {missing[0]}."
            )
        for spec in self.manifest.tensors:
            filled = sum(end - begin for begin, end in self._filled[spec.name])  # no two overlap
            if filled != spec.nbytes or not self._filled[spec.name]:
                raise PayloadError(f"{spec.name}: {filled} of its {spec.nbytes} bytes were received.")
            if not self._has_checksum(spec):
                raise PayloadError(f"{spec.name} does not have its checksum once its pieces are put together.")

    def _has_checksum(self, spec: TensorSpec) -> bool:
        """From the digests of its blocks, which were made of these bytes as they came; else all of it is hashed now."""
        kind, known = spec.checksum.partition(":")[0], self._digests[spec.name]
        digests = [known.get((kind, block)) for block in blocks_between(0, spec.nbytes, spec.nbytes)]
        if None in digests:
            return matches(self._bytes[spec.name], spec.checksum)
        return combined(digests, kind) == spec.checksum

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the manifest; views of the staged bytes."""
        for spec in self.manifest.tensors:
            data = self._bytes[spec.name]
            flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
            yield spec.name, flat.view(DTYPES[spec.dtype]).view(spec.shape)
