"""The wire format of weights: a bucket of tensors, or of pieces of tensors too large for one bucket. No pickle.

    8 bytes   magic
    4 bytes   length of the header, little endian, at most `MAX_HEADER_BYTES`
    16 bytes  blake2b of the header
    header    JSON: version, part, parts, tensors: [{name, dtype, shape, offset, begin, end, checksum}]
    data      the raw bytes, little endian, in the order of the header, without gaps

`offset` says where a piece lies in the bytes of its tensor (0 for a whole one); `begin` and `end` where it lies in the
data. What parses is exactly what was encoded, to the last byte; everything else is a `PayloadError`.

A checksum is that of the bytes up to `HASH_BLOCK` of them, and beyond that the checksum of the checksums of their blocks. So a
tensor can be hashed by several threads, and where it is cut between two blocks, its own checksum follows from those of its
pieces: every byte is hashed once on each side.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from .errors import PayloadError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"PTWGT\x00\x00\x01"
DIGEST_BYTES = 16
PREFIX_BYTES = len(MAGIC) + 4 + DIGEST_BYTES
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 200_000
MAX_PARTS = 200_000
MAX_DIMENSIONS = 8
MAX_TENSOR_BYTES = 1 << 42
MAX_NAME = 512
MAX_VERSION = (1 << 53) - 1  # what JSON readers of every language keep exactly
HASH_BLOCK = 4 << 20

SHARED_MEMORY, CUDA_IPC, COLLECTIVE = "shared_memory", "cuda_ipc", "collective"
"""The ways, besides the body of a request, by which the data of a part may come."""
MOST_FETCH_SECONDS = 600.0

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""The dtypes that may travel, and bytes per number."""

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


def _blake2b(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _checksum_functions() -> dict[str, Callable[[Buffer], str]]:
    functions: dict[str, Callable[[Buffer], str]] = {"blake2b": _blake2b}
    try:
        import xxhash
    except ImportError:  # not a dependency of vLLM; both sides then agree on blake2b, see /info
        return functions
    return functions | {"xxh3": lambda data: xxhash.xxh3_128(data).hexdigest()}


CHECKSUMS = _checksum_functions()
"""Name -> function of the bytes of one block; both give 32 hexadecimal digits. A checksum is written "name:digits"."""


def blocks_of(data: memoryview) -> list[memoryview]:
    """The blocks of these bytes, each hashed by itself; at least one."""
    return [data[at : at + HASH_BLOCK] for at in range(0, max(len(data), 1), HASH_BLOCK)]


def combined(digests: Sequence[str], kind: str) -> str:
    """The checksum of bytes whose blocks have these digits."""
    return f"{kind}:{digests[0] if len(digests) == 1 else CHECKSUMS[kind](''.join(digests).encode())}"


def block_digests(data: Buffer, kind: str) -> tuple[str, ...]:
    return tuple(CHECKSUMS[kind](block) for block in blocks_of(memoryview(data)))


def checksum(data: Buffer, kind: str = "blake2b") -> str:
    return combined(block_digests(data, kind), kind)


def blocks_between(begin: int, end: int, nbytes: int) -> range | None:
    """Which blocks of a tensor its bytes `begin` to `end` are; None where they are not whole blocks of it."""
    if begin % HASH_BLOCK or (end % HASH_BLOCK and end != nbytes):
        return None
    return range(begin // HASH_BLOCK, max(-(-end // HASH_BLOCK), 1))


def matches(data: Buffer, wanted: str) -> bool:
    """Whether these bytes have that checksum."""
    return hmac.compare_digest(checksum(data, wanted.partition(":")[0]), wanted)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the manifest announces it; `checksum` is of all its bytes, None where it follows at the commit."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str | None = None

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


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
class Manifest:
    """All tensors of a version."""

    version: int
    parts: int
    tensors: tuple[TensorSpec, ...]


def split_part(
    version: int, part: int, parts: int, pieces: Iterable[tuple[TensorSpec, int, Buffer, str]]
) -> tuple[bytes, list[memoryview]]:
    """One part, from (tensor, offset in its bytes, bytes, their checksum): all that comes before the data, and the data.

    Joined they are the body of a request; they may also travel on different ways.
    """
    entries, chunks, end = [], [], 0
    for spec, offset, data, bytes_checksum in pieces:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        begin, end = end, end + len(view)
        place = {"offset": offset, "begin": begin, "end": end, "checksum": bytes_checksum}
        entries.append({"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), **place})
        chunks.append(view)
    header = json.dumps({"version": version, "part": part, "parts": parts, "tensors": entries}).encode()
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), _digest(header), header]), chunks


def _digest(header: Buffer) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES).digest()


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON fields, for the body of /weights/begin."""
    return {"version": manifest.version, "parts": manifest.parts, "tensors": [asdict(t) for t in manifest.tensors]}


@dataclass(frozen=True)
class PartHead:
    """What a part says of itself before its data: read first, where the data comes on another way."""

    version: int
    part: int
    parts: int
    entries: tuple[Any, ...]  # not checked yet, see `with_data`
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
        _refuse_twice([piece.name for piece in pieces])
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
    digest = _digest(header)
    if not hmac.compare_digest(digest, bytes(view[len(MAGIC) + 4 : PREFIX_BYTES])):
        raise PayloadError("The header does not have the checksum that stands before it: it was changed on the way.")
    fields = fields_of(read_json(header), ("version", "part", "parts", "tensors"), "the header")
    version, parts = _version(fields["version"]), whole_number(fields["parts"], "parts", 1, MAX_PARTS)
    part = whole_number(fields["part"], "part", 0, parts - 1)
    entries = _entries(fields["tensors"])
    last = entries[-1].get("end") if isinstance(entries[-1], dict) else None
    nbytes = whole_number(last, "end of the last tensor", 0, MAX_TENSOR_BYTES)
    return PartHead(version, part, parts, tuple(entries), nbytes, digest.hex()), data


def _piece(entry: Any, data: memoryview, expected_begin: int) -> tuple[Piece, int]:
    fields = fields_of(
        entry, ("name", "dtype", "shape", "offset", "begin", "end", "checksum"), "a tensor of the header"
    )
    spec = _spec(fields)
    begin = whole_number(fields["begin"], f"begin of {spec.name}", 0, MAX_TENSOR_BYTES)
    end = whole_number(fields["end"], f"end of {spec.name}", begin, MAX_TENSOR_BYTES)
    offset = whole_number(fields["offset"], f"offset of {spec.name}", 0, spec.nbytes)
    if begin != expected_begin:
        raise PayloadError(f"{spec.name} begins at byte {begin}; the tensor before it ends at {expected_begin}.")
    if end > len(data):
        raise PayloadError(f"{spec.name} ends at byte {end}; the body has {len(data)} bytes of data.")
    if offset + end - begin > spec.nbytes or (end == begin and spec.nbytes):
        raise PayloadError(
            f"{spec.name} ({spec.dtype} {list(spec.shape)}, {spec.nbytes} bytes) cannot hold the {end - begin} bytes "
            f"sent for offset {offset}."
        )
    if spec.checksum is None:
        raise PayloadError(f"{spec.name} has no checksum.")
    kind = spec.checksum.partition(":")[0]
    digests = block_digests(data[begin:end], kind)
    if not hmac.compare_digest(combined(digests, kind), spec.checksum):
        raise PayloadError(f"The bytes of {spec.name} do not have their checksum: they were changed on the way.")
    return Piece(spec.name, spec.dtype, spec.shape, offset, spec.checksum, data[begin:end], digests), end


def parse_manifest(fields: dict[str, Any]) -> Manifest:
    """The manifest in the fields of a JSON body."""
    fields_of(fields, ("version", "parts", "tensors"), "the manifest")
    specs = []
    for entry in _entries(fields["tensors"]):
        specs.append(_spec(fields_of(entry, ("name", "dtype", "shape", "checksum"), "a tensor of the manifest")))
    _refuse_twice([spec.name for spec in specs])
    parts = whole_number(fields["parts"], "parts", 1, MAX_PARTS)
    return Manifest(_version(fields["version"]), parts, tuple(specs))


def _spec(fields: dict[str, Any]) -> TensorSpec:
    name, dtype, shape = fields["name"], fields["dtype"], fields["shape"]
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise PayloadError(f"A tensor has no name of 1 to {MAX_NAME} letters, digits, '.', '_' and '-'.")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise PayloadError(f"{name}: its dtype is none of {', '.join(ITEM_BYTES)}.")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise PayloadError(f"{name}: its shape is not a list of at most {MAX_DIMENSIONS} numbers.")
    size = ITEM_BYTES[dtype]
    for number in shape:
        size *= whole_number(number, f"a dimension of {name}", 0, MAX_TENSOR_BYTES)
        if size > MAX_TENSOR_BYTES:
            raise PayloadError(f"{name}: its shape means more than {MAX_TENSOR_BYTES} bytes.")
    return TensorSpec(name, dtype, tuple(shape), _checksum_field(name, fields["checksum"]))


def _checksum_field(name: str, value: Any) -> str | None:
    if value is None:
        return None
    kind, _, digits = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in CHECKSUMS or not re.fullmatch("[0-9a-f]{32}", digits):
        raise PayloadError(
            f"{name}: its checksum is not 'KIND:32 hexadecimal digits' with KIND of {sorted(CHECKSUMS)}."
        )
    return value


def parse_checksums(value: Any) -> dict[str, str]:
    """Checksums by name of the tensor, as a commit brings those that the manifest left out."""
    if not isinstance(value, dict):
        raise PayloadError("`checksums` is not an object of names and checksums.")
    parsed = {name: _checksum_field(name, entry) for name, entry in value.items()}
    if missing := [name for name, entry in parsed.items() if entry is None]:
        raise PayloadError(f"The checksum of {missing[0][:MAX_NAME]} is null.")
    return parsed


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TENSORS:
        raise PayloadError(f"`tensors` is not a list of 1 to {MAX_TENSORS} tensors.")
    return value


def _version(value: Any) -> int:
    return whole_number(value, "version", 0, MAX_VERSION)


def _refuse_twice(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PayloadError(f"{name} is listed twice.")
        seen.add(name)


def whole_number(value: Any, what: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # `type`: True is no number here
        raise PayloadError(f"`{what}` is not a whole number from {low} to {high}.")
    return value


def fields_of(value: Any, names: Sequence[str], what: str) -> dict[str, Any]:
    """`value`, an object with exactly these fields."""
    if not isinstance(value, dict) or set(value) != set(names):
        raise PayloadError(f"{what[0].upper()}{what[1:]} is not an object with exactly the fields {', '.join(names)}.")
    return value


def read_json(text: Buffer) -> Any:
    """Strict JSON: UTF-8, no NaN, no field twice, no nesting deep enough to exhaust the stack."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) != len(pairs):
            raise PayloadError("The JSON has a field twice in one object.")
        return fields

    def refuse(constant: str) -> None:
        raise PayloadError(f"The JSON has the constant {constant}, which JSON does not know.")

    try:
        return json.loads(bytes(text).decode(), object_pairs_hook=once, parse_constant=refuse)
    except PayloadError:
        raise
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"The JSON cannot be read ({type(error).__name__}).") from error
