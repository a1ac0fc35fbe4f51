"""Which kernels the decoder layers run with: Liger's, torch.compile's, or transformers' own operations.

Norms, rotary embeddings, activations and residuals move far more bytes than they compute. Liger fuses each of them in Triton;
torch.compile fuses across them as well, at the price of some seconds at the start and whenever a new kind of call appears.
Which is faster depends on the model and the device, so a probe runs one layer of the model's shape both ways.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.attention.ragged import caps_scores, install_ragged_attention, ragged_name, segment_kwargs
from posttrain.models.inference import body_of
from posttrain.models.layers.checkpointing import products_are_kept
from posttrain.models.layers.tower_layers import TOWER_ROTARY

logger = logging.getLogger(__name__)

LIGER, COMPILED, PLAIN = "liger", "compiled", "plain"
EXPERT_AUTOTUNING = "LIGER_FUSED_MOE_AUTOTUNE"
"""Liger's switch, read when it is imported: 0 gives each kernel for experts one configuration."""
KERNELS_IN_WORDS = {
    LIGER: "Norm, rotary and SwiGLU layers are Liger's",
    COMPILED: "Decoder layers are compiled",
    PLAIN: "Decoder layers are transformers' own",
}
PROBE_SEGMENTS, PROBE_SEGMENT_TOKENS, PROBE_REPEATS = 16, 512, 5
VERSIONS_OF_A_LAYER = 64
WORTH_COMPILING = 0.97  # of Liger's time


def use_liger_layers(innermost: nn.Module) -> None:
    """Liger's norm, rotary and SwiGLU; its fused losses stay off, our own head never keeps logits anyway.

    Liger also replaces classes of the family's module, for models that are made later; those are put back, and so is how a tower
    rotates, for which `tower_layers` has a faster way. Functions, such as the
    one that applies rotary embeddings, are looked up there by every model of the family and stay, unless this version of
    transformers has none of that name. Of a model that sees, the language model alone is changed: what Liger knows of whole
    models is about some towers only.

    Kernels for experts are not autotuned unless the user says so: Liger would try up to 40 configurations of each in the first
    step, which took two minutes for a small Mixtral on an H200.
    """
    os.environ.setdefault(EXPERT_AUTOTUNING, "0")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    module = _family(innermost)
    before = _pristine.setdefault(module.__name__, dict(vars(module)))
    _apply_liger_kernel_to_instance(language_model(innermost), fused_linear_cross_entropy=False, cross_entropy=False)
    kept = {name: value for name, value in before.items() if isinstance(value, type) or name == TOWER_ROTARY}
    _put_back(module, kept)
    for name, function in dict(vars(module)).items():
        if "rotary" in name and name in before and function is not before[name]:
            setattr(module, name, on_gpus(on_copies_of_kept_products(function), before[name]))


def language_model(innermost: nn.Module) -> nn.Module:
    """The decoder of a model that has more than one part; another model as it is."""
    is_whole = innermost.config.get_text_config() is innermost.config
    return innermost if is_whole else innermost.get_decoder()


def on_gpus(rotary: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Liger's function where it can run; the family's own for a model of it on the CPU of the same process."""

    @functools.wraps(rotary)
    def apply(queries: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (plain if queries.device.type == "cpu" else rotary)(queries, *args, **kwargs)

    return apply


def on_copies_of_kept_products(rotary: Callable[..., Any]) -> Callable[..., Any]:
    """Liger rotates queries and keys in place. Under selective checkpointing these are products that are kept for the backward,
    which would rotate them a second time: there, copies are rotated, and the products stay."""

    @functools.wraps(rotary)
    def apply(queries: Tensor, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        if products_are_kept():
            queries, keys = queries.clone(), keys.clone()
        return rotary(queries, keys, *args, **kwargs)

    return apply


def compile_layers(innermost: nn.Module) -> None:
    """Compile every decoder layer, in place: names and state stay. Token counts are dynamic from the first call on.

    Training, evaluation and scoring are different calls, policy and reference different models, and all of them share the code of
    one layer: torch's default of eight versions would be used up, and the rest run uncompiled. Functions that Liger replaced for
    an earlier model of this process are put back: torch.compile cannot look into them. Calls with a cache, which are those of
    transformers' `generate`, stay uncompiled: every layer and nearly every token would be another version, two minutes of them
    for 300 short answers of a 135M model.
    """
    _put_back(_family(innermost), _pristine.get(_family(innermost).__name__, {}))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VERSIONS_OF_A_LAYER)
    for layer in decoder_layers(innermost):
        layer.compile(dynamic=True, backend=recomputing_inductor)
        layer._compiled_call_impl = uncompiled_with_a_cache(layer._compiled_call_impl, layer._call_impl)


def uncompiled_with_a_cache(compiled: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if kwargs.get("past_key_values") is None else plain)(*args, **kwargs)

    return call


def recomputing_inductor(graph: Any, inputs: list[Any]) -> Any:
    """torch's own backend, with two changes.

    Results that the backward can make again from what it reads anyway are not kept. By default a result that the backward writes
    to memory is kept, such as the product of SwiGLU, which is a third of all that a layer keeps. H200, 1.5B: 2085 -> 1403 KiB a
    token at the same speed (52.9k and 53.0k tokens/s).

    Fused operations round to bfloat16 where the separate ones would. Scoring and training are fused differently, so that a policy
    was not its own reference: the first loss of DPO was 0.6977 on an H200, now it is ln 2 to the last digit.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(ban_recompute_materialized_backward=False):
        return compile_fx(graph, inputs, config_patches={"emulate_precision_casts": True})


_pristine: dict[str, dict[str, Any]] = {}  # module of a family -> its names before Liger first changed it


def _family(innermost: nn.Module) -> ModuleType:
    """Where the layers of the language model look up their functions."""
    return sys.modules[type(language_model(innermost)).__module__]


def _put_back(module: ModuleType, names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def uncompile_layers(innermost: nn.Module) -> None:
    """Run the layers as they are again."""
    for layer in decoder_layers(innermost):
        layer._compiled_call_impl = None


def decoder_layers(innermost: nn.Module) -> nn.ModuleList:
    """The stack of layers of a transformers language model; a tower beside it may have as many."""
    for module in innermost.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == innermost.config.get_text_config().num_hidden_layers:
            return module
    raise ValueError(f"{type(innermost).__name__} has no list of decoder layers to compile.")


APPLY = {LIGER: use_liger_layers, COMPILED: compile_layers, PLAIN: lambda innermost: None}


def fastest_kernels(innermost: nn.Module, candidates: tuple[str, ...]) -> tuple[str, dict[str, float]]:
    """(the fastest of `candidates`, milliseconds of one layer forward and backward with each); the first one wins ties.

    Measured on a model of one layer and a vocabulary of a few words, so that it costs seconds and next to no memory.
    """
    if caps_scores(innermost):  # its batches are padded on a GPU: what is measured here would not be what is run
        return PLAIN, {}
    times: dict[str, float] = {}
    for name in candidates:
        try:
            times[name] = _milliseconds(innermost, name)
        except Exception as error:  # an architecture may fail in any way of its own; the others are still measured
            logger.info(f"Layers of {type(innermost).__name__} cannot run {name} ({type(error).__name__}: {error}).")
    if not times:
        return PLAIN, {}
    best = next(iter(times))
    for name, value in times.items():
        if value < WORTH_COMPILING * times[best]:
            best = name
    return best, times


def _milliseconds(innermost: nn.Module, name: str) -> float:
    parameter = next(innermost.parameters())
    with _module_kept(innermost):
        model = _one_layer_model(innermost).to(parameter.device, parameter.dtype)
        APPLY[name](model)
        body = body_of(model)
        places = torch.arange(PROBE_SEGMENTS * PROBE_SEGMENT_TOKENS, device=parameter.device)[None]
        bounds = torch.arange(PROBE_SEGMENTS + 1, dtype=torch.int32, device=parameter.device) * PROBE_SEGMENT_TOKENS
        kwargs = {"input_ids": places % 64, "position_ids": places % PROBE_SEGMENT_TOKENS}
        kwargs |= segment_kwargs(bounds, PROBE_SEGMENT_TOKENS)
        durations = []
        for _ in range(PROBE_REPEATS + 2):  # two to warm up: the first compiles
            torch.cuda.synchronize()
            started = time.perf_counter()
            body(**kwargs, use_cache=False).last_hidden_state.float().square().mean().backward()
            torch.cuda.synchronize()
            durations.append(1000 * (time.perf_counter() - started))
    return statistics.median(durations[2:])


def _one_layer_model(innermost: nn.Module) -> nn.Module:
    """The language model alone: a tower would be as large as it is."""
    whole = language_model(innermost)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers, config.vocab_size = 1, 64
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    install_ragged_attention()
    model = type(whole)(config)
    model.set_attn_implementation(ragged_name(innermost))
    return model


@contextmanager
def _module_kept(innermost: nn.Module) -> Iterator[None]:
    """What a probe changes in the family's module is put back."""
    before = dict(vars(_family(innermost)))
    try:
        yield
    finally:
        _put_back(_family(innermost), before)
