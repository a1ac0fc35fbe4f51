"""On the CPU, vLLM repacks the weights of linear layers and drops the originals, so that new ones cannot be loaded:
`load_weights` meets parameters of size 0 and `reload_weights` leaves part of the model as it was (seen with 0.32.0).
Here the layers keep their weights and multiply plainly.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)

NOTE = "CPU: linear layers multiply plainly instead of with vLLM's packed kernels, so that new weights can be loaded."


def _plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return nn.functional.linear(x, weight, bias)


def keep_cpu_weights_loadable() -> str:
    """Replace vLLM's choice of a CPU kernel; to be called before a model is loaded. Returns the note for /info."""
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: nn.Module, *args: Any, **options: Any) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = _plain
        else:  # convolutions and stacked experts, which vLLM treats by themselves
            packing(layer, *args, **options)

    utils.dispatch_cpu_unquantized_gemm = dispatch
    log.warning(NOTE)
    return NOTE
