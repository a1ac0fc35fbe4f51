"""Weights under the names that `save_pretrained` writes, read back under the model's own.

For many families, most of those that see images among them, transformers writes the names of an older layout and renames them in
`from_pretrained`. Its Trainer loads a checkpoint by `load_state_dict`, which would find none of them, and say so in a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import innermost_model


def own_names(model: nn.Module) -> dict[str, str]:
    """Written name -> own name, of the tensors that are written under another one and are not taken apart or joined besides."""
    own = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    by_identity = {id(tensor): name for name, tensor in own.items()}
    written = revert_weight_conversion(model, own)
    names = {name: by_identity[id(tensor)] for name, tensor in written.items() if id(tensor) in by_identity}
    return {name: own_name for name, own_name in names.items() if name != own_name}


@contextlib.contextmanager
def read_as_written(model: nn.Module) -> Iterator[None]:
    """In here, `load_state_dict` of the model also knows the names that `save_pretrained` writes."""
    innermost = innermost_model(model)
    names = {} if is_peft_model(model) else own_names(innermost)  # adapters are written under their own names

    def rename(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        for written, own in names.items():
            if prefix + written in state_dict:
                state_dict[prefix + own] = state_dict.pop(prefix + written)

    hook = innermost.register_load_state_dict_pre_hook(rename)
    try:
        yield
    finally:
        hook.remove()
