"""What the folder of a model says about its weights: names, shapes, and the numbers themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from .errors import PayloadError
from .payload import TensorSpec

DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The names that safetensors files use."""


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    return sorted(folder.glob("*.safetensors"))


def known_tensors(folder: Path) -> dict[str, TensorSpec] | None:
    """Every tensor of the checkpoint, by the headers of its files; None where there are none."""
    from safetensors import safe_open

    known = {}
    for path in weight_files(folder) if folder.is_dir() else []:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                entry = file.get_slice(name)
                known[name] = TensorSpec(name, DTYPES[entry.get_dtype()], tuple(entry.get_shape()))
    return known or None


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]] | None:
    """(name, tensor) of the checkpoint, one at a time; None where there are no files."""
    files = weight_files(folder) if folder.is_dir() else []
    return _read(files) if files else None


def _read(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def tied_tensors(folder: Path) -> frozenset[str]:
    """Names that a version may leave out, since they are other tensors under a second name."""
    config = folder / "config.json"
    fields = json.loads(config.read_text()) if config.is_file() else {}
    tied = fields.get("tie_word_embeddings", fields.get("text_config", {}).get("tie_word_embeddings", False))
    return frozenset({"lm_head.weight"}) if tied else frozenset()


def tensor_names(path: Path) -> list[str]:
    """The names in one safetensors file; PayloadError where it is not one."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise PayloadError(f"{path.name} cannot be read ({error}).") from error
