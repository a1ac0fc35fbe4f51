"""The shape of a model, which may be on the meta device: its weights and the widths of its layers. Bytes and work follow from it.

Activations are estimated here for layers that cannot be run: those of `explain`, whose model has no weights, and sharded ones.
`fit.activation_cost` measures them wherever there is a whole model.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.layers.fused_lora import SIBLINGS
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.memory.fit import FULL, NONE, SELECTIVE, ActivationCost, models_beside
from posttrain.models.memory.tower import TowerShape
from posttrain.models.scoring.token_scores import default_chunk_tokens

QUANTISED_BYTES = {"load_in_4bit": 0.5 + 4 / 64, "load_in_8bit": 1.0}
"""Of one weight of a linear layer, scales included."""
# In units of the item size: (hidden, query, key or value, inner) widths that one token keeps in one layer.
KEPT_WIDTHS = {
    (PLAIN, NONE): (9, 2, 2, 4),  # norms keep float32 copies, SiLU and the product keep theirs
    (LIGER, NONE): (4, 2, 2, 3),
    (COMPILED, NONE): (2, 2, 2, 2),  # what can be made again from what is read anyway is not kept
}
SELECTIVE_WIDTHS = (3, 2, 2, 2)
"""With any kernels; compiled layers run uncompiled then."""
FROZEN_SAVES = (2, 0, 0, 1)
"""Linears without a gradient of their own do not keep their inputs (two norms, the product of the MLP's halves); adapters may."""
DROPPED_WIDTHS = 1.5
"""Of an input with LoRA dropout: the copy, and its mask of one byte."""


class Shape:
    """Of a model, with its adapter if it has one. `dtype` that it computes in, where that is not its weights'."""

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        quantised: str | None = None,
        fuses_lora: bool = True,
        tower: TowerShape | None = None,
    ) -> None:
        """`tower`: of a model that sees, whose weights no token of the text is multiplied with."""
        innermost = model.get_base_model() if hasattr(model, "get_base_model") else model
        text, named = innermost.config.get_text_config(), list(model.named_parameters())
        head = getattr(innermost.get_output_embeddings(), "weight", None)
        outside = {id(head), id(innermost.get_input_embeddings().weight)}
        heads = getattr(text, "num_attention_heads", 1)
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        groups = getattr(text, "num_key_value_heads", None) or heads
        self.parameters = sum(p.numel() for _, p in named)
        self.trained = sum(p.numel() for _, p in named if p.requires_grad)
        # weights of the layers that a token is multiplied with
        self.active = sum(_active(name, p, text) for name, p in named if id(p) not in outside)
        self.active -= 0 if tower is None else tower.parameters
        self.tower = tower
        self.weight_bytes = sum(_bytes(name, p, None if id(p) in outside else quantised) for name, p in named)
        self.dtype = dtype or next(p.dtype for _, p in named if p.is_floating_point())
        self.layers, self.vocabulary = text.num_hidden_layers, text.vocab_size
        # of the hidden states, queries, keys (or values), inside of the MLP
        self.widths = (text.hidden_size, heads * size, groups * size, _inner(text))
        self.head = 0 if head is None else head.numel()  # weights of the language head; 0: a reward model's
        self.is_adapter = model is not innermost
        # widths that one token keeps for the adapters of all layers
        self.adapter_inputs = sum(adapter_inputs(module, fuses_lora) for module in model.modules())
        self.beside = [Shape(other, dtype) for other in models_beside(innermost)]

    def activations(self, kernels: str) -> ActivationCost:
        """Bytes a token, by level, as `activation_cost` would measure them on the device."""
        item, times, adapters = self.dtype.itemsize, KEPT_WIDTHS[kernels, NONE], 0.0
        if self.is_adapter:
            times, adapters = tuple(kept - saved for kept, saved in zip(times, FROZEN_SAVES)), self.adapter_inputs
        everything = item * (adapters + self._of_layers(times))
        selective = min(item * self._of_layers(SELECTIVE_WIDTHS), everything)
        inputs = self.widths[0] * item
        kept = {NONE: everything, SELECTIVE: selective, FULL: self.layers * inputs}
        own = ActivationCost(kept, inputs, everything / self.layers, is_measured=False)
        return functools.reduce(operator.add, (other.activations(kernels) for other in self.beside), own)

    def _of_layers(self, times: tuple[int, ...]) -> int:
        return self.layers * sum(count * width for count, width in zip(times, self.widths))

    def head_bytes(
        self, tokens: int, has_gradient: bool, chunk_tokens: int | None = None, exact: bool = False
    ) -> float:
        """A chunk of logits (slopes are written over it), hidden states that go in and their gradient.

        `exact`: statistics that the kernels do not know are taken from a copy of the chunk in float32.
        """
        if not self.head:
            return 0.0
        item = self.dtype.itemsize
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(torch.device("cuda"), self.vocabulary, item)
        chunk = min(chunk_tokens, tokens) * self.vocabulary * (item + (4 if exact else 0))
        return chunk + tokens * self.widths[0] * item * (2 if has_gradient else 1)


def recomputable_layers(model: nn.Module) -> list[nn.Module]:
    """Those that transformers can checkpoint."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def adapter_inputs(parent: nn.Module, fuses_lora: bool) -> float:
    """Widths that one token keeps for the LoRA linears of one module: what the gradients of their adapters need.

    q, k and v read one tensor, as do gate and up. Attention keeps the input of o itself; a fused MLP computes that of down again.
    """
    adapted = {name: child for name, child in parent.named_children() if getattr(child, "lora_A", None)}
    dropped = [child for child in adapted.values() if any(getattr(d, "p", 0) for d in child.lora_dropout.values())]
    if dropped:
        return DROPPED_WIDTHS * sum(child.in_features for child in dropped)
    elsewhere = ("o_proj", "down_proj") if fuses_lora else ("o_proj",)
    siblings = {name: group for group in SIBLINGS for name in group}
    inputs = {siblings.get(name, name): child.in_features for name, child in adapted.items() if name not in elsewhere}
    return sum(inputs.values())


def _active(name: str, parameter: nn.Parameter, text: Any) -> int:
    """A token passes through some of the experts only."""
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    return parameter.numel() * used // experts if experts and used and "expert" in name else parameter.numel()


def _inner(text: Any) -> int:
    used = getattr(text, "num_experts_per_tok", None)
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return used * (getattr(text, "moe_intermediate_size", None) or dense) if used else dense


def _bytes(name: str, parameter: nn.Parameter, quantised: str | None) -> float:
    is_packed = quantised is not None and parameter.dim() == 2 and "lora_" not in name
    return parameter.numel() * QUANTISED_BYTES[quantised] if is_packed else parameter.nbytes
