"""Segment bounds for the modules that transformers does not pass them to.

`segment_kwargs` reach the decoder layers. Two kinds of modules inside of them do not get them, or cannot use them:

- attention of a layer that takes keyword arguments and drops them (StableLM, Nemotron): a hook passes them on;
- mixers, which read a row from left to right by a convolution, a recurrence or both (Mamba, gated delta nets, short convolutions,
  lightning attention) and know no segments. They are causal: tokens behind a segment change nothing in it. So the segments become
  rows of padded batches inside of the mixer alone, and its outputs are joined to one row again. Attention, MLPs, experts and the
  head stay without padding, and a family's own fast kernels are used as they are.

A continuation of a shared prefix (`models/attention/prefix`) is a row that begins with the prefix: the state in which the mixer
leaves the prefix is computed again for each, and the gradients of the copies are added up.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.core.batch import SharedPrefixes
from posttrain.models.attention.prefix import segments_with_prefixes

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
CARRIED = frozenset({*BOUNDS, "shared_prefixes", "long_segments", "kv_cache", "row_part", "image_blocks"})
LEAST_FULL = 0.5
"""A row of a padded batch is at least so full: shorter ones have a batch of their own."""
CACHES = ("cache_params", "past_key_values")
"""Names under which mixers are handed what they remember."""
WITHOUT_CONVOLUTION = ("LightningAttention",)
"""Mixers that show no convolution, by the end of their class's name."""


# ---- which modules ------------------------------------------------------------------------------------------------------


def carry_segments(innermost: nn.Module) -> Callable[[], None] | None:
    """Pass segment bounds on to attention and mixers of the decoder. Returns what undoes it; None: there is nothing to do, or it is
    done."""
    undo: list[Callable[[], None]] = []
    if are_carried(innermost):
        return None
    for layer in _decoder_layers(innermost):
        mixers = [child for child in layer.children() if is_mixer(child)]
        others = [child for child in layer.children() if child not in mixers and _is_attention(child)]
        if not (mixers or others) or not _takes_keywords(layer):
            continue
        undo += [layer.register_forward_pre_hook(_set_on_children, with_kwargs=True).remove]
        undo += [layer.register_forward_hook(_clear_on_children, always_call=True).remove]
        undo += [child.register_forward_pre_hook(_add_carried, with_kwargs=True).remove for child in others]
        for mixer in mixers:
            # A method, not a closure: a deep copy of the mixer computes with its own weights.
            mixer.forward = types.MethodType(_by_segments, mixer)
            undo.append(lambda mixer=mixer: delattr(mixer, "forward"))

    def take_back() -> None:
        for step in undo:
            step()
        torch.compiler.reset()

    if not undo:
        return None
    # By default compiled code is not guarded by hooks: it would run for a module that got hooks later, or for another model's.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch.compiler.reset()
    return take_back


def are_carried(innermost: nn.Module) -> bool:
    hooks = (hook for layer in _decoder_layers(innermost) for hook in layer._forward_pre_hooks.values())
    return any(hook is _set_on_children for hook in hooks)


def why_wrong_with_carried(innermost: nn.Module, why_wrong: Callable[[], str | None]) -> str | None:
    """None when `why_wrong` finds nothing, with bounds passed on to the layers that need them; else its reason, and they are not.

    Mixers always need them, and are not asked first.
    """
    take_back = carry_segments(innermost) if has_mixers(innermost) else None
    reason = why_wrong()
    if reason is not None and take_back is None:
        take_back = carry_segments(innermost)
        reason = reason if take_back is None else why_wrong()
    if reason is not None and take_back is not None:
        take_back()
    return reason


def has_mixers(innermost: nn.Module) -> bool:
    return any(is_mixer(child) for layer in _decoder_layers(innermost) for child in layer.children())


def _decoder_layers(innermost: nn.Module) -> list[nn.Module]:
    return [part for part in innermost.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]


def is_mixer(module: nn.Module) -> bool:
    parts = [*module.modules()]
    has_convolution = any(isinstance(part, nn.Conv1d) for part in parts)
    if any(isinstance(part, GradientCheckpointingLayer) for part in parts):
        return False  # a layer in a layer (Zamba)
    return has_convolution or type(module).__name__.endswith(WITHOUT_CONVOLUTION)


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and _takes_keywords(module)


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _set_on_children(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """On the modules, not in a context variable: checkpointing calls the layer again, on autograd's own thread."""
    carried = {name: value for name, value in kwargs.items() if name in CARRIED and value is not None}
    for child in layer.children():
        child.carried_segments = carried


def _clear_on_children(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Otherwise a copy of the model would hold them and whatever they refer to."""
    for child in layer.children():
        child.carried_segments = {}


def _add_carried(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, module.carried_segments | kwargs


# ---- a mixer over segments ----------------------------------------------------------------------------------------------


@torch.compiler.disable  # a compiled layer is split around it: its rows are of other sizes in every batch
def _by_segments(mixer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The mixer's own forward: of the row as it is, or of its segments as rows."""
    plain, carried = type(mixer).forward, mixer.carried_segments
    is_cached = "kv_cache" in carried
    if not (is_cached or "cu_seq_lens_q" in carried) or "row_part" in carried:
        return plain(mixer, hidden_states, *args, **kwargs)
    left = {name: value for name, value in kwargs.items() if name not in CARRIED}
    rest: list[Any] = []

    def run(packed: Tensor, tokens: Tensor, **more: Any) -> Tensor:
        """(rows, length, width) of the tokens (rows, length) of the row -> the same shape."""
        laid = {name: _laid_out(value, tokens, hidden_states.shape[1]) for name, value in left.items()}
        if "attention_mask" in laid:
            laid["attention_mask"] = None  # padding comes after all tokens of its row
        found = plain(mixer, packed, *args, **laid | more)
        rest[:] = found[1:] if isinstance(found, tuple) else []
        return found[0] if isinstance(found, tuple) else found

    if is_cached:
        name = next((name for name in CACHES if name in left), None)
        if name is None:
            raise NotImplementedError(f"{type(mixer).__name__} is handed no cache under a name that is known")

        def run_cached(tokens: Tensor, cache: Any) -> Tensor:
            return run(hidden_states[0][tokens], tokens, **{name: cache})

        joined = carried["kv_cache"].mix(mixer.layer_idx, run_cached)
    else:
        rows = _rows_of(carried["cu_seq_lens_q"], carried.get("shared_prefixes"))
        parts = []
        for batch in rows.batches:
            found = run(_Packed.apply(hidden_states[0], batch, rows.repeats), batch.tokens)
            parts.append(_Taken.apply(found.flatten(0, 1), batch))
        joined = torch.cat(parts).index_select(0, rows.order)
    return (joined[None], *rest) if rest else joined[None]


def _laid_out(value: Any, tokens: Tensor, width: int) -> Any:
    """Positions and rotary embeddings (1, tokens, ...) as rows; everything else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(_laid_out(part, tokens, width) for part in value)
    is_of_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, width)
    return value[0][tokens] if is_of_tokens else value


@dataclass(frozen=True)
class _Batch:
    """Rows of similar length."""

    tokens: Tensor  # (rows, longest) which token of the ragged row stands here; 0 where the row has ended
    taken: Tensor  # (n,) places of `tokens`, flattened, whose answers are taken: those of each segment itself


@dataclass(frozen=True)
class _Rows:
    """How the segments of a ragged row become rows, and rows the ragged row."""

    batches: list[_Batch]
    order: Tensor  # (tokens,) where each token's answer stands among all that are taken
    repeats: bool  # whether a token may stand in several rows: prefixes


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By the bounds: all layers of a forward pass, and of its recomputation, are asked about the same."""


def _rows_of(bounds: Tensor, prefixes: SharedPrefixes | None) -> _Rows:
    if bounds not in _KNOWN:
        _KNOWN[bounds] = _made_rows(bounds, prefixes)
    return _KNOWN[bounds]


def _made_rows(bounds: Tensor, prefixes: SharedPrefixes | None) -> _Rows:
    if prefixes is None:
        segments = [(start, stop, None) for start, stop in itertools.pairwise(bounds.tolist())]
    else:
        segments = segments_with_prefixes(bounds, prefixes)
    rows, laid = [], set()  # (tokens, how many of them are a copy); prefixes that stand in one
    for start, stop, prefix in reversed(segments):
        if start == stop or start in laid:
            continue
        before = range(0) if prefix is None else range(*segments[prefix][:2])
        # The first continuation of a prefix computes it for the row itself.
        copied = len(before) if before.start in laid else 0
        laid.update(before[:1])
        rows.append((np.array([*before, *range(start, stop)]), copied))
    batches, taken_tokens = [], []
    for batch in _of_similar_length(rows):
        longest = len(batch[0][0])
        tokens, is_own = np.zeros((len(batch), longest), np.int64), np.zeros((len(batch), longest), bool)
        for place, (row, repeated) in enumerate(batch):
            tokens[place, : len(row)] = row
            is_own[place, repeated : len(row)] = True
        taken_tokens.append(tokens[is_own])
        taken = np.flatnonzero(is_own)
        batches.append(_Batch(*(torch.from_numpy(part).to(bounds.device) for part in (tokens, taken))))
    order = np.argsort(np.concatenate(taken_tokens), kind="stable")
    return _Rows(batches, torch.from_numpy(order).to(bounds.device), prefixes is not None)


def _of_similar_length(rows: list[tuple[np.ndarray, int]]) -> list[list[tuple[np.ndarray, int]]]:
    batches: list[list[tuple[np.ndarray, int]]] = []
    for row in sorted(rows, key=lambda row: -len(row[0])):
        if not batches or len(row[0]) < LEAST_FULL * len(batches[-1][0][0]):
            batches.append([])
        batches[-1].append(row)
    return batches


class _Packed(torch.autograd.Function):
    """(tokens, width) -> (rows, longest, width); the gradient of a token is the sum over its places."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, batch: _Batch, repeats: bool) -> Tensor:
        ctx.batch, ctx.repeats, ctx.shape = batch, repeats, hidden.shape
        return hidden[batch.tokens]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        tokens, taken, flat = ctx.batch.tokens.flatten(), ctx.batch.taken, gradient.flatten(0, 1)
        if not ctx.repeats:  # nothing is added up
            return flat.new_zeros(ctx.shape).index_copy_(0, tokens[taken], flat[taken]), None, None
        # The gradient of padding is 0.
        total = flat.new_zeros(ctx.shape, dtype=torch.promote_types(flat.dtype, torch.float32))
        return total.index_add_(0, tokens, flat.to(total.dtype)).to(flat.dtype), None, None


class _Taken(torch.autograd.Function):
    """(rows x longest, width) -> (n, width): what is taken of a batch's answers."""

    @staticmethod
    def forward(ctx: Any, answers: Tensor, batch: _Batch) -> Tensor:
        ctx.taken, ctx.shape = batch.taken, answers.shape
        return answers[batch.taken]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_zeros(ctx.shape).index_copy_(0, ctx.taken, gradient), None
