"""One version of the weights as it goes over the wire, in host memory, so that it can be sent again to a server that
was restarted while the trainer's own weights have moved on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.serve.buckets import Slice, plan_parts
from posttrain.serve.payload import CHECKSUMS, ITEM_BYTES, TensorSpec, checksum, split_part
from posttrain.serve.versions import fingerprint

BUCKET_BYTES = 64 << 20
FASTEST_FIRST = ("xxh3", "blake2b")


@dataclass(frozen=True)
class KeptWeights:
    """Tensors and their bytes; never changed once made, so any thread may send them."""

    specs: tuple[TensorSpec, ...]  # with checksums
    data: dict[str, memoryview]
    fingerprint: str  # of all tensors, as the server computes it
    adapter_config: dict[str, Any] | None = None  # given: the tensors are those of a LoRA adapter
    device: torch.device = torch.device("cpu")  # where the trainer had them

    @classmethod
    def of(
        cls,
        weights: Iterable[tuple[str, Tensor]],
        kind: str,
        folder: Path | None = None,
        adapter_config: dict[str, Any] | None = None,
    ) -> KeptWeights:
        """Copies of these tensors, taken one at a time. `folder`: on its disk instead of in memory."""
        specs, data, device = [], {}, torch.device("cpu")
        for name, tensor in weights:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in ITEM_BYTES:
                raise ValueError(
                    f"{name} is {dtype}, which cannot be sent; export it as one of {', '.join(ITEM_BYTES)}."
                )
            if name in data:
                raise ValueError(f"{name} was exported twice; a version has every tensor once.")
            data[name] = _bytes_of(tensor, folder)
            device = tensor.device if tensor.is_cuda else device
            specs.append(TensorSpec(name, dtype, tuple(tensor.shape), checksum(data[name], kind)))
        if not specs:
            raise ValueError("The export of the weights has no tensors, so there is nothing to send.")
        return cls(tuple(specs), data, fingerprint(specs), adapter_config, device)

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
        kind = (self.specs[0].checksum or "").partition(":")[0]
        pieces = [(s.spec, s.offset, self.data[s.spec.name][s.offset : s.offset + s.length]) for s in plan[number]]
        return split_part(version, number, len(plan), pieces, kind)


def spec_of(name: str, tensor: Tensor, kind: str) -> TensorSpec:
    """What a server that was sent this tensor knows about it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = memoryview(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return TensorSpec(name, dtype, tuple(tensor.shape), checksum(data, kind))


def common_checksum(offered: Sequence[Sequence[str]]) -> str:
    """The fastest kind of checksum that this process and all servers know."""
    for kind in FASTEST_FIRST:
        if kind in CHECKSUMS and all(kind in kinds for kinds in offered):
            return kind
    raise ValueError(f"The servers know the checksums {[list(kinds) for kinds in offered]}; blake2b is missing.")


def _bytes_of(tensor: Tensor, folder: Path | None) -> memoryview:
    """A copy of its bytes: on the CPU the exported tensor may be the trainer's own, which the next step changes."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    kept = (
        torch.empty(flat.numel(), dtype=torch.uint8) if folder is None or not flat.numel() else _on_disk(flat, folder)
    )
    kept.copy_(flat)
    return memoryview(kept.numpy())


def _on_disk(flat: Tensor, folder: Path) -> Tensor:
    """Memory that the disk backs. The file has no name any more: it is gone with the last use."""
    handle, path = tempfile.mkstemp(prefix="posttrain-weights-", dir=folder)
    try:
        os.posix_fallocate(handle, 0, flat.numel())  # a full disk is an error here, and a dead process later
        return torch.from_file(path, shared=True, size=flat.numel(), dtype=torch.uint8)
    finally:
        os.close(handle)
        os.unlink(path)
