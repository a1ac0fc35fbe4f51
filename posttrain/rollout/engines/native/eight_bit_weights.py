"""Products of a session in 8 bits: rounded copies of the decoder's weights, and each token's row rounded before a product.

As `models/layers/fp8` computes them: e4m3, a scale for each row of the weight and for each token, sums in float32. A token's scale
depends on that token alone, so that what is written does not depend on the rows beside it. The copies lie beside the weights, a
byte for each number, in memory that stays where it is, since CUDA graphs read it; they are made again in every session and for
every version of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from posttrain.models.layers import fp8
from posttrain.models.load.adapters import is_peft_model, is_quantized
from posttrain.rollout.engines.native.probe import uncompiled


def why_not(model: nn.Module, innermost: nn.Module) -> str | None:
    """None where a session can compute in 8 bits; else the reason, as the end of a sentence."""
    weight = next(innermost.parameters())
    if (reason := fp8.why_not(weight.device)) is not None:
        return reason
    if weight.is_cuda and weight.dtype != torch.bfloat16:
        return f"products in 8 bits have results in bfloat16, and {type(innermost).__name__} is in {weight.dtype}"
    if is_peft_model(model) or is_quantized(innermost):
        return f"the weights of {type(innermost).__name__} have an adapter, or are quantised"
    if not fp8.linears(innermost):
        return f"{type(innermost).__name__} has no linear layers whose sizes are multiples of {fp8.MULTIPLE}"
    return None


class EightBitWeights:
    """The rounded weights of a model; used as `PackedWeights` are."""

    def __init__(self, innermost: nn.Module) -> None:
        self._innermost = innermost
        self._kept: dict[nn.Linear, fp8.Scaled] = {}
        self._version: int | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)

    @contextmanager
    def in_use(self, version: int) -> Iterator[None]:
        """Inside of the block the model's linear layers multiply with their rounded weights, which are those of `version`."""
        if self._version != version:
            self._round()
            self._version = version
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self._innermost))
            for layer, kept in self._kept.items():
                layer.forward = functools.partial(_forward, layer.bias, kept)
                stack.callback(delattr, layer, "forward")
            yield

    def free(self) -> None:
        """What is kept is of no version any more; its memory stays."""
        self._version = None

    def _round(self) -> None:
        for layer in (layer for layer in fp8.linears(self._innermost) if "forward" not in vars(layer)):
            made = fp8.by_rows(layer.weight.detach())
            if layer in self._kept:
                for kept, new in zip(self._kept[layer], made, strict=True):
                    kept.view(torch.uint8).copy_(new.view(torch.uint8))  # 8-bit floats cannot be copied everywhere
            else:
                self._kept[layer] = made


def _forward(bias: Tensor | None, weight: fp8.Scaled, hidden: Tensor) -> Tensor:
    output = fp8.scaled_product(fp8.by_rows(hidden.flatten(0, -2)), weight, hidden.dtype)
    output = output if bias is None else output + bias
    return output.view(*hidden.shape[:-1], len(weight[0]))
