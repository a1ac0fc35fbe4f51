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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from . import block_sums

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
MAX_REASON = 1000
"""Characters of the reason of an abort."""
MAX_VERSION = (1 << 53) - 1  # what JSON readers of every language keep exactly
HASH_BLOCK = block_sums.BLOCK_BYTES

SHARED_MEMORY, CUDA_IPC, COLLECTIVE = "shared_memory", "cuda_ipc", "collective"
"""The transports besides the body of a request; the last two go straight into the engine."""
MAX_FETCH_SECONDS = 600.0
STREAM_ALIGNMENT = 256
"""Where a tensor may begin in a part of a stream, in bytes: numbers of every dtype are aligned there."""

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


def _blake2b(data: Buffer) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _checksum_functions() -> dict[str, Callable[[Buffer], str]]:
    functions: dict[str, Callable[[Buffer], str]] = {"blake2b": _blake2b, block_sums.KIND: block_sums.of_bytes}
    try:
        import xxhash
    except ImportError:  # not a dependency of vLLM; both sides then agree on blake2b, see /info
        return functions
    return functions | {"xxh3": lambda data: xxhash.xxh3_128(data).hexdigest()}


CHECKSUMS = _checksum_functions()
"""Name -> function of the bytes of one block; all give 32 hexadecimal digits. A checksum is written "name:digits"."""


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
    """A tensor as the manifest announces it; `checksum` is of all its bytes, None of one that was not sent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str | None = None

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


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

    Joined they are the body of a request; they may also travel by different transports.
    """
    entries, chunks, end = [], [], 0
    for spec, offset, data, bytes_checksum in pieces:
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        begin, end = end, end + len(view)
        place = {"offset": offset, "begin": begin, "end": end, "checksum": bytes_checksum}
        entries.append({"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), **place})
        chunks.append(view)
    header = json.dumps({"version": version, "part": part, "parts": parts, "tensors": entries}).encode()
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header_digest(header), header]), chunks


def header_digest(header: Buffer) -> bytes:
    return hashlib.blake2b(header, digest_size=DIGEST_BYTES).digest()


def fingerprint(tensors: Iterable[TensorSpec]) -> str:
    """One digest for a whole version, whatever the order and the buckets."""
    lines = sorted(f"{t.name} {t.dtype} {list(t.shape)} {t.checksum}" for t in tensors)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON fields, for the body of /weights/begin."""
    return {"version": manifest.version, "parts": manifest.parts, "tensors": [asdict(t) for t in manifest.tensors]}
