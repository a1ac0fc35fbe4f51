"""What the folder of a model says about its weights: names, shapes, and the numbers themselves."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from ..wire.payload import TensorSpec

log = logging.getLogger(__name__)

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
"""The names that safetensors files use, for those that may travel. A checkpoint may have others, which stay as they are there."""
BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|(attn|attention)\.(masked_)?bias|position_ids)$"
)
"""What older versions of transformers saved besides the parameters: frequencies and masks, which newer ones compute."""
MIN_MASK_DIMENSIONS = 3
"""Of a mask of attention. A `bias` with fewer is a parameter; `masked_bias` is one number."""


class ModelFiles:
    """The files that a model was loaded from, found once it is loaded: in its folder, or in the cache for a name of the Hub."""

    def __init__(self, model: str, revision: str | None = None, cache: str | None = None) -> None:
        """`cache`: where the weights were downloaded to, if not where the other files were."""
        self._config, why_not = _folder_of(model, revision, None)
        self._weights = self._config
        if cache is not None:
            self._weights, why_not = _folder_of(model, revision, cache)
        if self._weights is not None:
            why_not = _what_is_missing(self._weights)
        self.note: str | None = None
        if why_not is not None:
            self._weights = None
            self.note = (
                f"The weights that were loaded are not at hand ({why_not}): the first version that is sent is not compared "
                "with them, and should the engine refuse it half way, they cannot be put back."
            )

    def known_tensors(self) -> dict[str, TensorSpec] | None:
        return known_tensors(self._weights) if self._weights else None

    def optional_tensors(self) -> frozenset[str]:
        tied = tied_tensors(self._config) if self._config else frozenset()
        return tied | buffers(self.known_tensors() or {})

    def read_tensors(self) -> Iterator[tuple[str, Tensor]] | None:
        return read_tensors(self._weights) if self._weights else None


def _folder_of(model: str, revision: str | None, cache: str | None) -> tuple[Path | None, str | None]:
    """(folder, None), or (None, why there is none). Nothing is downloaded."""
    if Path(model).is_dir():
        return Path(model), None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)), None
    except Exception as error:  # a name for another hub, no such library: whatever it is, the model itself is loaded
        log.warning("The folder of %s was not found.", model, exc_info=True)
        return None, f"the folder of {model} was not found: {type(error).__name__}"


def _what_is_missing(folder: Path) -> str | None:
    files = weight_files(folder)
    if not files:
        return f"{folder} has no safetensors files"
    missing = [path.name for path in files if not path.is_file()]
    return f"{folder} has no file {missing[0]}" if missing else None


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
                dtype = entry.get_dtype()
                known[name] = TensorSpec(name, DTYPES.get(dtype, dtype), tuple(entry.get_shape()))
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


def buffers(known: Mapping[str, TensorSpec]) -> frozenset[str]:
    """Names in a checkpoint that are not parameters, so that a trainer does not have them."""
    return frozenset(name for name, spec in known.items() if BUFFERS.search(name) and not _is_bias(spec))


def _is_bias(spec: TensorSpec) -> bool:
    return spec.name.rpartition(".")[2] == "bias" and len(spec.shape) < MIN_MASK_DIMENSIONS
