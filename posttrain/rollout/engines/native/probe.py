"""Can the native engine run this model? Two short prompts are prefilled and continued, and compared with a full forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.attention.ragged import can_be_replaced, install_ragged_attention, is_ragged, ragged_name
from posttrain.models.load.adapters import is_prompt_learning
from posttrain.models.scoring.probe import LEAK, TOLERANCE, ordinary_tokens
from posttrain.models.vision.features import family_of
from posttrain.models.vision.tower import set_text_attention

LENGTHS = (5, 19)  # one shorter than a page, one longer
CONTINUED = 3
OF_EIGHT_BITS = 0.5
"""What 8 bits may change. e4m3 keeps four binary digits, which is 2.6% off on average: that moves the words of SmolLM2 135M by 0.15
to 0.31 (keys and values) and 0.41 to 0.43 (products). Beyond, importance weights would leave little of a completion."""
LAYER_TYPES = {"full_attention", "sliding_attention"}
WITH_MIXERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@contextmanager
def uncompiled(innermost: nn.Module) -> Iterator[None]:
    """Compiled layers run as they are written: they would be compiled for whatever is different inside of the block."""
    compiled = {module: module._compiled_call_impl for module in innermost.modules() if module._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


@contextmanager
def cached_attention(innermost: nn.Module) -> Iterator[None]:
    """The model attends through `models/attention` inside of the block; a model that does so already is left alone."""
    before = innermost.config._attn_implementation
    if is_ragged(before):
        yield
        return
    install_ragged_attention()
    set_text_attention(innermost, ragged_name(innermost))
    try:
        yield
    finally:
        set_text_attention(innermost, before)


def why_not_by_config(model: nn.Module, innermost: nn.Module) -> str | None:
    """Reasons that short prompts would not show."""
    config = innermost.config.get_text_config()
    if getattr(innermost.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if is_prompt_learning(model):
        return "its adapter puts virtual tokens in front of every row"
    if not can_be_replaced(innermost, next(innermost.parameters()).is_cuda):
        return "its attention cannot be replaced by a function"
    other = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES - WITH_MIXERS
    if other or getattr(config, "attention_chunk_size", None):
        return (
            f"its layers are of a kind that keeps more than keys and values ({', '.join(sorted(other)) or 'chunked'})"
        )
    if _rope_types(config) & BATCH_DEPENDENT_ROPE:
        return "its rotary frequencies change with the longest row of a batch"
    return None


def _rope_types(config: object) -> set[str]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [found, *(part for part in found.values() if isinstance(part, dict))]
    return {str(part.get("rope_type", part.get("type", "default"))) for part in parts}


@torch.no_grad()
def difference(innermost: nn.Module, answers: Callable[[list[np.ndarray]], list[Tensor]]) -> tuple[float, float]:
    """(how far `answers` (CONTINUED, V) to two sequences are from a full forward's, what rounding may amount to).

    Far: sum_v p(v) |log q(v) - log p(v)|, at the worst position. The largest difference of all words would be that of an
    improbable one: in bfloat16 it is 0.4 for a model of 135M that is run rightly. Rounding is also looked at: the same sequence
    three times over is another shape to the device, and should be the same answer.
    """
    sequences = _sequences(innermost)
    largest, rounding = 0.0, 0.0
    dtypes = {next(innermost.parameters()).dtype}
    for tokens, found in zip(sequences, answers(sequences)):
        alone, threefold = (_full_forward(innermost, tokens, times) for times in (1, 3))
        dtypes.add(alone.dtype)
        wanted = alone.float().log_softmax(-1)
        largest = max(largest, _gap(found.float().log_softmax(-1), wanted))
        rounding = max(rounding, _gap(threefold.float().log_softmax(-1), wanted))
    tolerance = max(TOLERANCE.get(dtype, 1e-3) for dtype in dtypes)
    return largest, max(tolerance, 4 * rounding) if math.isfinite(rounding) else tolerance


@torch.no_grad()
def leak(innermost: nn.Module, answers: Callable[[list[np.ndarray]], list[Tensor]]) -> float | None:
    """How much another sequence in the first place changes the answers to the second; None: nothing, as it should be."""
    sequences, others = _sequences(innermost), _sequences(innermost, seed=len(LENGTHS))
    found, moved = answers(sequences), answers([others[0], sequences[1]])
    if len(found) < 2:  # an engine with one slot writes one after the other
        return None
    own, next_one = ((after.float() - before.float()).abs().mean().item() for before, after in zip(found, moved))
    return next_one if next_one > LEAK * own else None


def _sequences(innermost: nn.Module, seed: int = 0) -> list[np.ndarray]:
    drawn = (ordinary_tokens(innermost, length + CONTINUED, seed + i) for i, length in enumerate(LENGTHS))
    return [tokens.numpy().astype(np.int32) for tokens in drawn]


def _full_forward(innermost: nn.Module, tokens: np.ndarray, times: int) -> Tensor:
    """(CONTINUED, V) logits before the last tokens."""
    ids = torch.from_numpy(tokens).long().to(next(innermost.parameters()).device).expand(times, -1)
    family, kwargs = family_of(innermost), {}
    if family is not None and family.prefix_sees_itself_whole:  # as it is trained: the last tokens are the completion
        is_written = torch.arange(len(tokens), device=ids.device) >= len(tokens) - CONTINUED
        kwargs[family.token_types_key] = is_written.long().expand(times, -1)
    return innermost(input_ids=ids, use_cache=False, **kwargs).logits[0, -CONTINUED - 1 : -1]


def _gap(found: Tensor, wanted: Tensor) -> float:
    gap = float((wanted.exp() * (found - wanted).abs()).sum(-1).max())
    return gap if math.isfinite(gap) else math.inf
