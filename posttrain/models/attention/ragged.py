"""Attention over ragged batches: one row, many segments, no padding and no dense mask.

`install_ragged_attention` registers a function with transformers' AttentionInterface. When a call carries segment bounds
(`cu_seq_lens_q`, as transformers names them for varlen flash) each segment attends causally to itself only: with a flash kernel
on CUDA (`models/attention/flash`), with one SDPA call per segment elsewhere. Without bounds the call is passed on to transformers'
`sdpa` and its masks, so that `generate`, padded batches and freshly loaded models behave as ever. Soft-caps of scores, which
neither SDPA nor torch's flash kernel knows, are computed by the formula (`models/attention/softmax`), as are sinks on a CPU.

Samples that begin alike (the two answers to one prompt) may share their beginning: see `models/attention/prefix`. A call that
carries `kv_cache` is one of the rollout engine, which keeps keys and values itself: see `rollout/engines/native`. A call that
carries `row_part` has a part of the row's tokens: see `models/attention/sequence_parallel`. A call that
carries `image_blocks` has images that see themselves whole: see `models/attention/image_blocks`.

transformers would build a dense mask from position ids that restart. It returns a mask of four dimensions as it is, so a ragged
batch carries a four-dimensional placeholder of one element, which this module's function ignores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.core.batch import LONG, LongSegments, RowPart, SharedPrefixes
from posttrain.models.attention import flash_choice
from posttrain.models.attention.dense import Gain, dense_gain, long_segment_attention
from posttrain.models.attention.flash import (
    EVERYTHING,
    HALF,
    FlashCall,
    as_narrow,
    as_wide,
    flash_can_run,
    tokens_first,
)
from posttrain.models.attention.flash_choice import Variant
from posttrain.models.attention.image_blocks import ImageBlocks, seen_whole
from posttrain.models.attention.prefix import shared_prefix_attention, sink_flash
from posttrain.models.attention.sequence_parallel import to_heads, to_tokens
from posttrain.models.attention.softmax import attention

RAGGED_ATTENTION = "posttrain_ragged"
UNCAPPED_ATTENTION = "posttrain_ragged_uncapped"
"""In the place of transformers' `sdpa`, which leaves out the soft-cap of scores that a family may have."""


class KeyValueCache(Protocol):
    """Keeps the keys and values of the tokens so far, and attends to them; travels as the forward argument `kv_cache`."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """(1, heads, tokens, dim) of the new tokens -> (1, tokens, heads, dim)."""

    def mix(self, layer: int, run: Callable[[Tensor, Any], Tensor]) -> Tensor:
        """(tokens, width) of the new tokens, by `run`: a mixer over (rows, length) of them, with a cache of its states."""


def segment_kwargs(
    bounds: Tensor, longest: int, prefixes: SharedPrefixes | None = None, long: LongSegments | None = None
) -> dict[str, Any]:
    """Forward keyword arguments that keep the segments of a ragged row apart, and tie continuations to their prefixes.

    They travel as arguments, never in a context variable: gradient checkpointing recomputes on autograd's own thread.
    """
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=bounds.device)
    shared = {} if prefixes is None else {"shared_prefixes": prefixes}
    shared |= {} if long is None else {"long_segments": long}
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return {"attention_mask": placeholder, **lengths, **shared}


def install_ragged_attention() -> None:
    """Make `attn_implementation="posttrain_ragged"`, and the same without soft-caps, known to transformers. Safe to call twice."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    for name, function in ((RAGGED_ATTENTION, ragged_attention), (UNCAPPED_ATTENTION, uncapped_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


def is_ragged(name: str) -> bool:
    return name in (RAGGED_ATTENTION, UNCAPPED_ATTENTION)


def ragged_name(innermost: nn.Module) -> str:
    """The name under which ragged attention gives the answers of the attention that a model has."""
    leaves_out = innermost.config._attn_implementation == "sdpa" and caps_scores(innermost)
    return UNCAPPED_ATTENTION if leaves_out else RAGGED_ATTENTION


def caps_scores(innermost: nn.Module) -> bool:
    """Whether attention's scores have a soft-cap in this family."""
    return bool(getattr(innermost.config.get_text_config(), "attn_logit_softcapping", None))


def can_be_replaced(innermost: nn.Module, on_gpu: bool) -> bool:
    """Whether a family's attention is one that is computed here: SDPA, or one with sinks, which SDPA does not know. On a GPU that
    takes the flash kernel, which has no float32."""
    has_kernel = not on_gpu or next(innermost.parameters()).dtype in HALF
    by_function = getattr(innermost, "_supports_attention_backend", False) and has_kernel
    return getattr(innermost, "_supports_sdpa", False) or by_function


def uncapped_attention(*heads: Any, softcap: float | None = None, **how: Any) -> tuple[Tensor, None]:
    return ragged_attention(*heads, **how)


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    long_segments: LongSegments | None = None,
    kv_cache: KeyValueCache | None = None,
    image_blocks: ImageBlocks | None = None,
    row_part: RowPart | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(1, heads, tokens, dim) -> (1, tokens, heads, dim), segments apart where bounds are given."""
    if row_part is not None:
        heads, bounds = to_heads(query, key, value, row_part), (cu_seq_lens_q, max_length_q)
        kwargs["s_aux"] = None if s_aux is None else s_aux.chunk(row_part.size)[row_part.rank]
        kwargs["softcap"] = softcap
        how = (attention_mask, dropout, scaling, *bounds, sliding_window)
        how += (shared_prefixes, long_segments, kv_cache, image_blocks)
        return to_tokens(ragged_attention(module, *heads, *how, **kwargs)[0], row_part), None
    if image_blocks is not None and (kv_cache is not None or shared_prefixes is not None):
        raise NotImplementedError("Images that see themselves whole are known to the ragged layout only.")
    if kv_cache is not None:
        return _attend_cached(kv_cache, module, query, key, value, scaling, sliding_window, softcap, s_aux), None
    if cu_seq_lens_q is None and (softcap or s_aux is not None):
        is_causal = query.shape[2] > 1
        how = (attention_mask, scaling, dropout, softcap, s_aux, is_causal)
        return attention(query, key, value, *how).transpose(1, 2).contiguous(), None
    if cu_seq_lens_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if shared_prefixes is not None:
        if sliding_window:
            raise NotImplementedError("Prefixes are not shared under a sliding window: use the ragged layout.")
        given = (query, key, value, cu_seq_lens_q, max_length_q, shared_prefixes, scaling, dropout, softcap, s_aux)
        return shared_prefix_attention(*given), None
    is_plain = not (dropout or sliding_window or softcap) and image_blocks is None and s_aux is None
    if long_segments is not None and is_plain and dense_pays(query, key, value):
        return long_segment_attention(query, key, value, long_segments, scaling, segment_attention), None
    how = (scaling, dropout, sliding_window, image_blocks, softcap, s_aux)
    return segment_attention(query, key, value, cu_seq_lens_q, max_length_q, *how), None


@torch.compiler.disable  # a compiled layer is split around it: what it reads and writes is no argument of the layer
def _attend_cached(
    kv_cache: KeyValueCache,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    *how: Any,
) -> Tensor:
    return kv_cache.attend(module, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, *how)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    image_blocks: ImageBlocks | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(1, heads, tokens, dim) -> (1, tokens, heads, dim): each segment attends causally to itself, and an image whole.

    By a flash kernel where that runs (torch's own varlen kernel, or a package's: see `flash`); elsewhere by one causal call
    per segment, which is exact, and on a CPU faster than one call over a padded batch.
    """
    reaches = image_blocks is None or sliding_window is None or image_blocks.longest <= sliding_window
    q, k, v = tokens_first(query, key, as_wide(value, query))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = {"window": (sliding_window - 1, 0) if sliding_window else EVERYTHING, "softcap": softcap or 0.0}
    call = FlashCall.of_segments(bounds, longest, scale, dropout=dropout, **how)
    is_known = image_blocks is None or (reaches and sinks is None and not softcap)
    if is_known and call.can_run(q, k):
        output = call.attend(q, k, v) if sinks is None else sink_flash(q, k, v, sinks, call)
        if image_blocks is not None:
            output = seen_whole(output, (q, k, v), image_blocks, call)
        return as_narrow(output, value).unsqueeze(0)
    parts = []
    # One split, whose backward is one `cat`: that of a slice fills the whole row with zeros, for every segment.
    lengths = [stop - start for start, stop in itertools.pairwise(bounds.tolist())]
    blocks = [None] * len(lengths) if image_blocks is None else image_blocks.blocks.split(lengths)
    for q, k, v, block in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), blocks):
        mask = _segment_mask(q.shape[2], sliding_window, block, q.device)
        parts.append(attention(q, k, v, mask, scaling, dropout, softcap, sinks).transpose(1, 2))
    return torch.cat(parts, dim=1)  # contiguous: some families view it


@torch.compiler.disable  # measured at the first call
def dense_pays(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether long segments attend faster by themselves. What must be deterministic stays with the varlen kernel, which can be."""
    if not flash_can_run(query) or query.shape[-1] != value.shape[-1] or torch.are_deterministic_algorithms_enabled():
        return False
    return long_gain(query.shape[1], key.shape[1], query.shape[-1], query.dtype, query.device).is_worth_it


def long_gain(heads: int, key_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Gain:
    return dense_gain(heads, key_heads, width, dtype, device, segment_attention)


def _shape_of_heads(innermost: nn.Module) -> tuple[int, int, int, torch.dtype] | None:
    """(heads, key heads, width, dtype) of a decoder's attention; None where layers differ, or no flash kernel has the dtype."""
    config, dtype = innermost.config.get_text_config(), next(innermost.parameters()).dtype
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int) or dtype not in HALF:
        return None
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads, dtype


def soft_caps_run(innermost: nn.Module, device: torch.device) -> bool:
    """Whether a flash kernel knows this model's soft-cap."""
    shape, softcap = _shape_of_heads(innermost), innermost.config.get_text_config().attn_logit_softcapping
    return shape is not None and flash_choice.chosen(Variant(*shape, softcap=softcap), 0, device) is not None


def how_rows_attend(innermost: nn.Module, device: torch.device) -> list[str]:
    """In sentences; measured now, so that no step waits for it, and compiled layers know."""
    config, shape = innermost.config.get_text_config(), _shape_of_heads(innermost)
    if shape is None:
        return []
    usual, notes = Variant(*shape, softcap=getattr(config, "attn_logit_softcapping", None) or 0.0), []
    if flash_choice.INSTALLED:
        windows = [usual._replace(windowed=True)] if getattr(config, "sliding_window", None) else []
        notes += dict.fromkeys(str(flash_choice.decide(variant, device)) for variant in (usual, *windows))
    if (getattr(config, "max_position_embeddings", None) or 0) >= LONG and not usual.softcap:
        notes.append(str(long_gain(*shape, device)))
    return notes


def _segment_mask(
    length: int, sliding_window: int | None, blocks: Tensor | None, device: torch.device
) -> Tensor | None:
    """(length, length): causal and within the window, or of one image. None where that is plainly causal."""
    has_window = sliding_window is not None and length > sliding_window
    if not has_window and blocks is None:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    seen = distance >= 0
    if has_window:
        seen &= distance < sliding_window
    if blocks is not None:
        seen |= (blocks[:, None] == blocks) & (blocks >= 0)
    return seen
