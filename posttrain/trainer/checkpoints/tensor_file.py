"""Safetensors files written in pieces, hashed in the same pass, without holding the interpreter lock.

safetensors' own `save_file` wants every tensor in one piece, and the file would have to be read again for its checksum. The format
is simple enough to write by hand: the length of the header as 8 bytes (little-endian), the header as JSON (name -> dtype, shape,
offsets), then the raw bytes of every tensor. Writing and hashing a large buffer both release the lock, so training continues.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.faults import fault_point
from posttrain.core.secrets import private_opener

PIECE_BYTES = 8 * 2**20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
"""torch's types and the names that the safetensors format has for them."""
PRIVATE_FILES = ("training_args.json", "run_state.json", "trainer_state.json")
"""What was asked for, and what callbacks remember: only the owner may read them, should a secret have come through."""


class SaveCancelled(Exception):
    """The writing was called off from outside."""


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says about a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class HeldTensor:
    """A tensor whose bytes lie in host memory, in one or several pieces."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Tensor]  # uint8

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat uint8 tensor on its device; a view wherever the tensor is contiguous."""
    if tensor.dtype not in DTYPES:
        raise TypeError(f"A tensor of {tensor.dtype} cannot be saved; the safetensors format has no such type.")
    flat = tensor.detach().contiguous().reshape(-1)
    return torch.view_as_real(flat).reshape(-1).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)


def header_and_order(tensors: dict[str, HeldTensor], metadata: dict[str, str] | None) -> tuple[bytes, list[str]]:
    """The header, padded to a multiple of 8, and the order of the data: widest types first, so that everything is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name in order:
        held = tensors[name]
        end = offset + held.nbytes
        header[name] = {"dtype": DTYPES[held.dtype], "shape": list(held.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _chunks(header: bytes, order: Iterable[str], tensors: dict[str, HeldTensor]) -> Iterator[Any]:
    yield header
    fault_point("save.write")
    for name in order:
        for piece in tensors[name].pieces:
            view = memoryview(piece.numpy())
            for start in range(0, len(view), PIECE_BYTES):
                yield view[start : start + PIECE_BYTES]


def write_tensor_file(
    path: Path,
    tensors: dict[str, HeldTensor],
    metadata: dict[str, str] | None = None,
    should_continue: Callable[[], bool] = lambda: True,
) -> FileRecord:
    """Write, hash and flush a safetensors file. `should_continue` is asked before every piece; False ends it with SaveCancelled."""
    header, order = header_and_order(tensors, metadata)
    return _write(path, _chunks(header, order, tensors), should_continue)


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write, hash and flush a small file."""
    return _write(path, [content], lambda: True)


def _write(path: Path, chunks: Iterable[Any], should_continue: Callable[[], bool]) -> FileRecord:
    digest = hashlib.sha256()
    size = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = private_opener if path.name in PRIVATE_FILES else None
    with open(path, "wb", buffering=0, opener=opener) as file:
        for chunk in chunks:
            if not should_continue():
                raise SaveCancelled(str(path))
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while rest:  # a raw file may take less than it was given
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())
