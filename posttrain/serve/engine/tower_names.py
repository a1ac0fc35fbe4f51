"""Names of a vision tower's tensors, where transformers and vLLM differ about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

TOWER, NESTED = "vision_tower.", "vision_tower.vision_model."


def as_vllm_names(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, under the names that vLLM's `model` loads.

    Published files, and vLLM, have the modules of a CLIP or SigLIP tower below `vision_model`. transformers 5 has not, and writes
    its own names for a model that was built from a config.
    """
    is_nested = any(name.startswith(NESTED) for name, _ in model.named_parameters())
    for name, tensor in tensors:
        before, tower, after = name.partition(TOWER)
        if is_nested and tower and not name[len(before) :].startswith(NESTED):
            name = f"{before}{NESTED}{after}"
        yield name, tensor
