"""Weights as safetensors, tensor by tensor, with a checksum of each: what is read back from the disk must be what was computed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from posttrain.exporting.verification import ExportRefused

SHARD_BYTES = 5 * 10**9
SINGLE, SHARD, INDEX = (
    "model.safetensors",
    "model-{number:05d}-of-{count:05d}.safetensors",
    "model.safetensors.index.json",
)


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Name -> checksum of what was written. One shard is held in memory at a time."""
    sums: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    parts: list[list[str]] = []
    size = total = 0
    for name, tensor in weights:
        tensor = tensor.detach().cpu().contiguous().clone()
        if shard and size + tensor.nbytes > shard_bytes:
            parts.append(_written(folder, shard, len(parts)))
            shard, size = {}, 0
        shard[name], sums[name] = tensor, checksum(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    parts.append(_written(folder, shard, len(parts)))
    _named(folder, parts, total)
    return sums


def check_weights(folder: Path, sums: dict[str, str]) -> None:
    """ExportRefused where a file does not hold what was written."""
    found: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.add(name)
                if checksum(file.get_tensor(name)) != sums.get(name):
                    raise ExportRefused(
                        f"{path.name} does not hold the numbers of {name} that were written to it.", name
                    )
    if missing := [name for name in sums if name not in found]:
        raise ExportRefused(f"{missing[0]} was written, and is in none of the files.", missing[0])


def checksum(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy())}"


def _written(folder: Path, shard: dict[str, Tensor], number: int) -> list[str]:
    save_file(shard, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    return list(shard)


def _named(folder: Path, parts: list[list[str]], total: int) -> None:
    """How many shards there are is known at the end, and is a part of their names."""
    if len(parts) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(parts):
        final = SHARD.format(number=number + 1, count=len(parts))
        (folder / f"part-{number}.safetensors").rename(folder / final)
        where |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
