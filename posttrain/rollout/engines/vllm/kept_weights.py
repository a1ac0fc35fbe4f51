"""One version of the weights as it goes over the wire, in host memory, so that it can be sent again to a server that
was restarted while the trainer's own weights have moved on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.serve.wire import block_sums
from posttrain.serve.wire.host_memory import HostMemory
from posttrain.serve.wire.payload import (
    CHECKSUMS,
    HASH_BLOCK,
    ITEM_BYTES,
    TensorSpec,
    blocks_between,
    blocks_of,
    checksum,
    combined,
    fingerprint,
    split_part,
)


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


BUCKET_BYTES = 64 << 20
FASTEST_FIRST = ("xxh3", "blake2b")
HASH_THREADS = 4


@dataclass(frozen=True)
class KeptWeights:
    """Tensors and their bytes; never changed once made, so any thread may send them."""

    specs: tuple[TensorSpec, ...]  # with checksums
    data: dict[str, memoryview]
    digests: dict[str, tuple[str, ...]]  # of the blocks of the data
    fingerprint: str  # of all tensors, as the server computes it
    adapter_config: dict[str, Any] | None = None  # given: the tensors are those of a LoRA adapter
    device: torch.device = torch.device("cpu")  # where the trainer had them

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[str, Tensor]],
        kind: str,
        adapter_config: dict[str, Any] | None = None,
        memory: HostMemory | None = None,
    ) -> KeptWeights:
        """Copies of these tensors, taken one at a time, in `memory` (that of older versions is used again). While one is copied,
        those before it are hashed."""
        memory = memory or HostMemory()
        memory.renew()
        shapes, data, device = {}, {}, torch.device("cpu")
        hashed: dict[str, list[Future[str]]] = {}
        with ThreadPoolExecutor(HASH_THREADS, "hash") as threads:
            for name, tensor in weights:
                if name in data:
                    raise ValueError(f"{name} was exported twice; a version has every tensor once.")
                shapes[name] = dtype_of(name, tensor), tuple(tensor.shape)
                data[name] = _bytes_of(tensor, memory)
                hashed[name] = [threads.submit(CHECKSUMS[kind], block) for block in blocks_of(data[name])]
                device = tensor.device if tensor.is_cuda else device
        if not data:
            raise ValueError("The export of the weights has no tensors, so there is nothing to send.")
        digests = {name: tuple(block.result() for block in blocks) for name, blocks in hashed.items()}
        specs = tuple(TensorSpec(name, *shapes[name], combined(digests[name], kind)) for name in data)
        return cls(specs, data, digests, fingerprint(specs), adapter_config, device)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def plan(self, bucket_bytes: int) -> list[list[Slice]]:
        """What goes into which part."""
        return plan_parts(self.specs, bucket_bytes)

    def split_payload(
        self, version: int, plan: Sequence[Sequence[Slice]], number: int
    ) -> tuple[bytes, list[memoryview]]:
        """(head, data in pieces) of one part."""
        pieces = [(s.spec, s.offset, self._bytes(s), self._checksum(s)) for s in plan[number]]
        return split_part(version, number, len(plan), pieces)

    def _bytes(self, piece: Slice) -> memoryview:
        return self.data[piece.spec.name][piece.offset : piece.offset + piece.length]

    def _checksum(self, piece: Slice) -> str:
        """From the digests of its blocks; hashed anew only where it was cut within one."""
        kind = (piece.spec.checksum or "").partition(":")[0]
        blocks = blocks_between(piece.offset, piece.offset + piece.length, piece.spec.nbytes)
        if blocks is None:
            return checksum(self._bytes(piece), kind)
        return combined(self.digests[piece.spec.name][blocks.start : blocks.stop], kind)


def spec_of(name: str, tensor: Tensor, kind: str) -> TensorSpec:
    """What a server that was sent this tensor knows about it."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if kind == block_sums.KIND:  # where it is
        found = combined(block_sums.of_tensor(flat), kind)
    else:
        found = checksum(memoryview(flat.cpu().numpy()), kind)
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), found)


def common_checksum(offered: Sequence[Sequence[str]]) -> str:
    """The fastest kind of checksum that this process and all servers know."""
    for kind in FASTEST_FIRST:
        if kind in CHECKSUMS and all(kind in kinds for kinds in offered):
            return kind
    raise ValueError(f"The servers know the checksums {[list(kinds) for kinds in offered]}; blake2b is missing.")


def dtype_of(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name} is {dtype}, which cannot be sent; export it as one of {', '.join(ITEM_BYTES)}.")
    return dtype


def _bytes_of(tensor: Tensor, memory: HostMemory) -> memoryview:
    """A copy of its bytes: on the CPU the exported tensor may be the trainer's own, which the next step changes."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if not flat.numel():
        return memoryview(b"")
    kept = memory.take(flat.numel())
    torch.frombuffer(kept, dtype=torch.uint8).copy_(flat)
    return kept
