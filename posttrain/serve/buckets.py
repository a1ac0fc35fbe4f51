"""How tensors are laid out over parts of a bounded size. Used by whoever sends weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .payload import HASH_BLOCK, TensorSpec


@dataclass(frozen=True)
class Slice:
    """Bytes `offset` to `offset + length` of a tensor."""

    spec: TensorSpec
    offset: int
    length: int


def plan_parts(specs: Sequence[TensorSpec], bucket_bytes: int = 64 << 20) -> list[list[Slice]]:
    """The slices of each part, in the order of `specs`, with at most `bucket_bytes` of data in a part.

    A tensor larger than a part is cut between two blocks of its checksum, where a part holds one at all.
    """
    if bucket_bytes < 1:
        raise ValueError(f"A bucket of {bucket_bytes} bytes holds nothing; give at least 1.")
    longest = bucket_bytes // HASH_BLOCK * HASH_BLOCK or bucket_bytes  # of a slice that is not the last of its tensor
    parts: list[list[Slice]] = [[]]
    room = bucket_bytes
    for spec in specs:
        offset = 0
        while offset < spec.nbytes or (offset == 0 and spec.nbytes == 0):
            fits_alone = spec.nbytes - offset <= bucket_bytes
            length = spec.nbytes - offset if fits_alone else longest
            if parts[-1] and (length > room if fits_alone else room < bucket_bytes):
                parts.append([])
                room = bucket_bytes
            parts[-1].append(Slice(spec, offset, length))
            room -= length
            offset += length
            if length == 0:
                break
    return [part for part in parts if part]
