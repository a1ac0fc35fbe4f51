"""The parts of one update in host memory, until all of them are there and right."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..engine.protocol import DTYPES
from ..errors import Conflict, PayloadError
from ..wire.host_memory import HostMemory, copy_bytes
from ..wire.payload import Manifest, TensorSpec, blocks_between, combined, matches
from .parts import Part, Piece


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
            raise PayloadError(f"Part {part.part} came before with other bytes.")
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
        same_kind = spec.checksum is not None and spec.checksum.partition(":")[0] == piece.checksum.partition(":")[0]
        if piece.is_whole and same_kind and piece.checksum != spec.checksum:
            raise PayloadError(f"{piece.name} does not have the checksum of the manifest.")
        begin, end = piece.offset, piece.offset + len(piece.data)
        if any(begin < other_end and other_begin < end for other_begin, other_end in self._filled[piece.name]):
            raise PayloadError(f"{piece.name}: bytes {begin} to {end} came before in another part.")
        if spec.nbytes == 0 and self._filled[piece.name]:
            raise PayloadError(f"{piece.name} came before in another part.")

    def _note(self, piece: Piece) -> None:
        begin, end = piece.offset, piece.offset + len(piece.data)
        self._filled[piece.name].append((begin, end))
        kind, blocks = piece.checksum.partition(":")[0], blocks_between(begin, end, self._specs[piece.name].nbytes)
        for block, digest in zip(blocks or (), piece.digests):
            self._digests[piece.name][kind, block] = digest

    def missing_parts(self) -> list[int]:
        return [part for part in range(self.manifest.parts) if part not in self.received]

    def verify(self, checksums: Mapping[str, str]) -> Manifest:
        """The manifest with all checksums, after every byte was found to be there and right."""
        if missing := self.missing_parts():
            raise Conflict(
                f"{len(missing)} of {self.manifest.parts} parts are missing, the first is part {missing[0]}."
            )
        if unknown := sorted(set(checksums) - set(self._specs)):
            raise PayloadError(f"The commit has a checksum of {unknown[0][:200]}, which is not in the manifest.")
        specs = []
        for spec in self.manifest.tensors:
            specs.append(self._verify_tensor(spec, checksums.get(spec.name)))
        return dataclasses.replace(self.manifest, tensors=tuple(specs))

    def _verify_tensor(self, spec: TensorSpec, late: str | None) -> TensorSpec:
        if spec.checksum and late and late != spec.checksum:
            raise PayloadError(f"{spec.name}: the commit and the manifest name different checksums.")
        wanted = spec.checksum or late
        if wanted is None:
            raise PayloadError(f"{spec.name} has a checksum neither in the manifest nor in the commit.")
        filled = sum(end - begin for begin, end in self._filled[spec.name])  # no two overlap
        if filled != spec.nbytes or not self._filled[spec.name]:
            raise PayloadError(f"{spec.name}: {filled} of its {spec.nbytes} bytes came.")
        if not self._has_checksum(spec, wanted):
            raise PayloadError(f"{spec.name} does not have its checksum once its pieces are put together.")
        return dataclasses.replace(spec, checksum=wanted)

    def _has_checksum(self, spec: TensorSpec, wanted: str) -> bool:
        """From the digests of its blocks, which were made of these bytes as they came; else all of it is hashed now."""
        kind, known = wanted.partition(":")[0], self._digests[spec.name]
        digests = [known.get((kind, block)) for block in blocks_between(0, spec.nbytes, spec.nbytes)]
        if None in digests:
            return matches(self._bytes[spec.name], wanted)
        return combined(digests, kind) == wanted

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the order of the manifest; views of the staged bytes."""
        for spec in self.manifest.tensors:
            data = self._bytes[spec.name]
            flat = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
            yield spec.name, flat.view(DTYPES[spec.dtype]).view(spec.shape)
