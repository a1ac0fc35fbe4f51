"""LoRA adapters by version, from folders inside of one folder."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .engine import AdapterRef, Engine
from .errors import Conflict, EngineFailed, FieldError, NotFound
from .model_folder import tensor_names
from .versions import Serving, Versions

log = logging.getLogger(__name__)

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
FORBIDDEN_CONFIG = ("auto_mapping", "custom_module_mapping")
"""Fields of an adapter_config that name code."""


def confined(folder: Path | None, path: str) -> Path:
    """The adapter folder `path`, given relative to `folder` or inside of it; links are followed before it is judged."""
    if folder is None:
        raise FieldError("This server was started without an adapter folder (--adapter-folder).")
    if "\0" in path:
        raise FieldError("`path` has a NUL character.")
    root = folder.resolve()
    found = (root / path).resolve()
    inside = found != root and found.is_relative_to(root)
    files = [found / WEIGHTS, found / CONFIG]
    if not inside or any(not file.resolve().is_relative_to(found) for file in files):
        raise FieldError("`path` leaves the adapter folder of this server.")
    if missing := [file.name for file in files if not file.is_file()]:
        raise NotFound(f"The adapter folder has no file {missing[0]}.")
    return found


def check_modules(names: Iterable[str], allowed: Sequence[str]) -> None:
    """Every tensor is a LoRA factor of a module that the engine was prepared for; others would be left out silently."""
    for name in names:
        module, found, rest = name.rpartition(".lora_")
        if not found or rest not in ("A.weight", "B.weight") or module.rpartition(".")[2] not in allowed:
            raise FieldError(
                f"The adapter has a tensor {name}; this server takes lora_A and lora_B of {', '.join(allowed)} "
                "(--adapter-modules)."
            )


class Adapters:
    """Which adapter serves. Its methods that take an engine run in the engine's thread."""

    def __init__(self, versions: Versions, folder: Path | None, in_use: Callable[[], set[int]]) -> None:
        self._versions, self.folder, self._in_use = versions, folder and folder.resolve(), in_use
        self._numbers = itertools.count(1)
        self._loaded: list[AdapterRef] = []
        self._base: Serving = versions.serving

    def install(
        self, engine: Engine, version: int, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], digest: str
    ) -> None:
        """Write the tensors of an update as an adapter, and let it serve."""
        if self.folder is None:
            raise FieldError("This server was started without an adapter folder (--adapter-folder).")
        if named := [name for name in FORBIDDEN_CONFIG if config.get(name)]:
            raise FieldError(f"An adapter_config with `{named[0]}` is not taken.")
        from safetensors.torch import save_file

        held = {name: tensor.contiguous() for name, tensor in tensors}
        path = self.folder / f"pushed-{version}-{digest[:8]}"
        shutil.rmtree(path, ignore_errors=True)
        try:
            path.mkdir(parents=True)
            save_file(held, path / WEIGHTS)
            (path / CONFIG).write_text(json.dumps(config))
            self.load(engine, path, f"pushed-{version}", version, digest)
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def load(self, engine: Engine, path: Path, name: str, version: int, digest: str | None) -> None:
        """Load an adapter and flip to it; requests that run stay with the one they began with."""
        serving = self._versions.serving
        if serving.version is None:
            raise Conflict(f"An adapter needs whole base weights: {serving.reason}")
        check_modules(tensor_names(path / WEIGHTS), engine.info.adapter_modules)
        adapter = AdapterRef(next(self._numbers), name, version, str(path))
        try:
            engine.add_adapter(adapter)
        except Exception as error:  # the engine's own words go to the caller; what served before serves on
            raise EngineFailed(f"The engine refused the adapter ({type(error).__name__}: {error}).") from error
        if serving.adapter is None:
            self._base = serving
        self._versions.serve(Serving(version, digest, adapter))
        self._loaded.append(adapter)
        self._remove_unused(engine, keep=adapter.number)

    def unload(self, engine: Engine) -> None:
        """Back to the base weights, under the version that they had."""
        serving = self._versions.serving
        if serving.adapter is None:
            raise Conflict("No adapter serves.")
        self._versions.serve(self._base)
        self._remove_unused(engine)

    def _remove_unused(self, engine: Engine, keep: int | None = None) -> None:
        """Adapters that requests still run with stay, and are looked at again at the next change."""
        stay = self._in_use() | {keep}
        for adapter in [one for one in self._loaded if one.number not in stay]:
            self._loaded.remove(adapter)
            engine.remove_adapter(adapter)
            if Path(adapter.path).name.startswith("pushed-") and Path(adapter.path).parent == self.folder:
                shutil.rmtree(adapter.path, ignore_errors=True)
