"""Give the LoRA layers of a PEFT model the fused products of `lora_products`, and leave everything else about them alone.

Only the `forward` of single modules is replaced, so weights, names, saving, loading and merging stay PEFT's. Every call looks at
the layer as it is now: where the adapter is off or merged, where several are active, where there is dropout, DoRA, a bias of the
adapter, autocast, a quantised or sharded weight, or a dtype other than the input's, PEFT's own forward runs. Linears on one
input (q, k, v) find each other through that tensor: the first that is asked computes for all, the others collect their result.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.inference import evaluating
from posttrain.models.layers.lora_products import AdaptedLinear, gated_mlp, linears_of_one_input

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
"""Names of linears that read one tensor, where they stand beside each other in a module."""
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
PROBE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


def fuse_lora(model: nn.Module) -> int:
    """Fuse what can be fused and return the number of LoRA linears that train so from now on. Safe to call twice.

    Layers with dropout are left to PEFT in training, and are fused in evaluation (a reference, say).
    """
    plain = [module for module in model.modules() if _is_lora_linear(module) and _is_plain(module.base_layer)]
    fused = [module for module in plain if any(_adapter_fits(module, name) for name in module.lora_A)]
    for module in fused:
        if not hasattr(module, "_forward_of_peft"):
            module._forward_of_peft = module.forward
            module.forward = types.MethodType(_linear_forward, module)
    known: dict[Any, bool] = {}
    for parent in model.modules():
        if not hasattr(parent, "_forward_of_parts") and _is_gated_mlp(parent, known):
            parent._forward_of_parts = parent.forward
            parent.forward = types.MethodType(_mlp_forward, parent)
        _introduce_siblings(parent)
    return sum(not any(_drops_out(dropout) for dropout in module.lora_dropout.values()) for module in fused)


def lora_layers(model: nn.Module) -> int:
    """LoRA layers of every kind, embeddings and quantised ones included."""
    from peft.tuners.lora.layer import LoraLayer

    return sum(isinstance(module, LoraLayer) for module in model.modules())


def _is_lora_linear(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import Linear

    return type(module) is Linear  # derived classes are for quantised and parallel layers


def _drops_out(dropout: nn.Module) -> bool:
    return isinstance(dropout, nn.Dropout) and dropout.p > 0


def _adapter_fits(module: nn.Module, name: str) -> bool:
    down, up = module.lora_A[name], module.lora_B[name]
    return (
        name not in module.lora_variant  # DoRA and its kin
        and _is_plain(down)
        and _is_plain(up)
        and up.bias is None
        and down.weight.dtype == up.weight.dtype == module.base_layer.weight.dtype
    )


def _is_plain(module: nn.Module) -> bool:
    """An nn.Linear that nothing watches and whose weight is here, whole: hooks of sharding and offloading must be called."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and _is_unwatched(module)
        and type(weight) in (nn.Parameter, Tensor)  # not a DTensor, not packed
        and not hasattr(weight, "ds_id")
        and not weight.is_meta
    )


def _is_unwatched(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def adapted_linear(module: nn.Module, x: Tensor) -> AdaptedLinear | None:
    """The tensors that this layer multiplies x with right now, or None where it must be left to its own forward."""
    if not _is_lora_linear(module):
        return _frozen_linear(module, x)
    if module.disable_adapters or module.merged or not _is_plain(module.base_layer):
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or not _adapter_fits(module, active[0]):
        return None
    dropout = module.lora_dropout[active[0]]
    if _drops_out(dropout) and dropout.training:
        return None
    frozen = _frozen_linear(module.base_layer, x)
    if frozen is None:
        return None
    down, up = module.lora_A[active[0]].weight, module.lora_B[active[0]].weight
    return frozen._replace(down=down, up=up, scale=float(module.scaling[active[0]]))


def _frozen_linear(module: nn.Module, x: Tensor) -> AdaptedLinear | None:
    if not _is_plain(module) or module.weight.requires_grad or module.weight.dtype != x.dtype:
        return None
    return AdaptedLinear(module.weight, module.bias, None, None)


def _is_ordinary(x: Any) -> bool:
    """A tensor of torch itself, outside autocast, which would choose the dtypes for us."""
    return type(x) in (Tensor, nn.Parameter) and not torch.is_autocast_enabled(x.device.type)


def _linear_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    linear = adapted_linear(self, x) if _is_ordinary(x) and not args and not kwargs else None
    if linear is None:
        return self._forward_of_peft(x, *args, **kwargs)
    shared = getattr(self, "_shared_input", None)
    if shared is None or torch.compiler.is_compiling():  # a compiled graph cannot carry results from call to call
        return linears_of_one_input(x, (linear,))[0]
    return shared.output_of(self, linear, x)


class SharedInput:
    """Siblings such as q, k and v. The first that is given a tensor computes for all; each of the others collects its part.

    Results wait only between those calls. A sibling that is given another tensor meanwhile (cross-attention) shows that they
    do not share their input: from then on each computes for itself.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.together = True
        self._forget()

    def _forget(self) -> None:
        self._waiting: dict[int, Tensor] = {}
        self._question: tuple[Any, ...] = ()

    def output_of(self, module: nn.Module, linear: AdaptedLinear, x: Tensor) -> Tensor:
        place = next(index for index, sibling in enumerate(self.modules) if sibling is module)
        if self._waiting:
            asked, version, with_grad = self._question
            is_asked_again = x is asked and x._version == version and torch.is_grad_enabled() == with_grad
            if is_asked_again and place in self._waiting:
                output = self._waiting.pop(place)
                if not self._waiting:
                    self._forget()
                return output
            self.together = False
            self._forget()
        all_linears = [adapted_linear(sibling, x) for sibling in self.modules] if self.together else []
        if not all_linears or None in all_linears:
            return linears_of_one_input(x, (linear,))[0]
        outputs = linears_of_one_input(x, all_linears)
        self._waiting = {index: output for index, output in enumerate(outputs) if index != place}
        self._question = (x, x._version, torch.is_grad_enabled())
        return outputs[place]


def _introduce_siblings(parent: nn.Module) -> None:
    for names in SIBLINGS:
        found = [getattr(parent, name, None) for name in names]
        fused = [module for module in found if hasattr(module, "_forward_of_peft")]
        if len(fused) > 1 and not hasattr(fused[0], "_shared_input"):
            shared = SharedInput(fused)
            for module in fused:
                module._shared_input = shared


def _is_gated_mlp(module: nn.Module, known: dict[Any, bool]) -> bool:
    """down(act(gate(x)) * up(x)) and nothing else, with an adapter that was fused; shown by what it answers to two tokens."""
    children = dict(module.named_children())
    if set(children) - {"act_fn"} != set(MLP_PARTS) or not callable(getattr(module, "act_fn", None)):
        return False
    parts = [children[name] for name in MLP_PARTS]
    if not any(hasattr(part, "_forward_of_peft") for part in parts):
        return False
    if not all(hasattr(part, "_forward_of_peft") or _is_plain(part) for part in parts):
        return False
    kind = (type(module), getattr(module.forward, "__func__", None), type(module.act_fn))
    if kind not in known:
        known[kind] = _answers_as_gated_mlp(module)
    return known[kind]


@torch.no_grad()
def _answers_as_gated_mlp(module: nn.Module) -> bool:
    gate, up, down = (getattr(module, name) for name in MLP_PARTS)
    weight = gate.weight  # PEFT shows the base's
    x = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device, dtype=torch.float32).to(weight.dtype)
    x = x.view(1, 2, -1)
    with evaluating(module):
        expected = down(module.act_fn(gate(x)) * up(x))
        found = module.forward(x)
    bound = PROBE_TOLERANCE[weight.dtype] * expected.abs().max()
    return found.shape == expected.shape and bool((found - expected).abs().max() <= bound)


def _mlp_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not _is_ordinary(x) or args or kwargs or torch.compiler.is_compiling():
        return self._forward_of_parts(x, *args, **kwargs)
    modules = [getattr(self, name) for name in MLP_PARTS]
    parts = [adapted_linear(module, x) if _is_unwatched(module) else None for module in modules]
    if None in parts or all(part.down is None for part in parts):
        return self._forward_of_parts(x)
    return gated_mlp(x, self.act_fn, *parts)
