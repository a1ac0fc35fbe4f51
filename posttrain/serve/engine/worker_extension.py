"""What the server adds to vLLM's worker processes (`--tensor-parallel` above 1): new weights, from blocks in shared memory.

Imported by vLLM, by its name, in each worker and nowhere else, before the model is loaded (`worker_weights` is the other side).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from ..wire.shared_blocks import SharedFolder
from .cpu_linear import keep_cpu_weights_loadable
from .protocol import DTYPES
from .random_weights import keep_buffers
from .tower_names import as_vllm_names

keep_buffers()
if current_platform.is_cpu():  # of this process: what the server did to its own vLLM is unknown here
    keep_cpu_weights_loadable()


class WeightLoading:
    """Mixed into vLLM's worker class."""

    def posttrain_load_block(self, folder: str, name: str, layout: str) -> dict[str, Any]:
        """The tensors of a block into the parameters of this worker's share: the names of those that were `loaded`, if vLLM says.

        An `error` is an answer: where a worker raises, vLLM (0.32.0) leaves the answers of the others unread and takes them for
        those to its next call.
        """
        try:
            loaded = self._posttrain_load(SharedFolder(Path(folder)), name, json.loads(layout))
        except Exception as error:  # reported to the server, which restores the old weights
            return {"error": f"{type(error).__name__}: {error}"}
        return {"loaded": None if loaded is None else sorted(loaded)}

    def _posttrain_load(self, shared: SharedFolder, name: str, entries: list[dict[str, Any]]) -> set[str] | None:
        try:
            mapped = shared.map(name, entries[-1]["end"])
        finally:
            shared.close()
        with torch.no_grad():
            model = self.model_runner.model
            loaded = model.load_weights(as_vllm_names(model, _views(mapped, entries)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the block is removed afterwards
        return loaded

    def posttrain_parameters(self) -> list[str]:
        return sorted(name for name, _ in self.model_runner.model.named_parameters())


def _views(mapped: Any, entries: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    for entry in entries:
        flat = data[entry["begin"] : entry["end"]]
        yield entry["name"], flat.view(DTYPES[entry["dtype"]]).view(entry["shape"])
