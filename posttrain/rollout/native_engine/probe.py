"""Can the native engine run this model? Two short prompts are prefilled and continued, and compared with a full forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.models.adapters import is_prompt_learning
from posttrain.models.attention import RAGGED_ATTENTION, install_ragged_attention
from posttrain.models.probe import TOLERANCE

LENGTHS = (5, 19)  # one shorter than a page, one longer
CONTINUED = 3
LAYER_TYPES = {"full_attention", "sliding_attention"}
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@contextmanager
def cached_attention(innermost: nn.Module) -> Iterator[None]:
    """The model attends through `models/attention` inside of the block; a model that does so already is left alone."""
    before = innermost.config._attn_implementation
    if before == RAGGED_ATTENTION:
        yield
        return
    install_ragged_attention()
    innermost.set_attn_implementation(RAGGED_ATTENTION)
    try:
        yield
    finally:
        innermost.set_attn_implementation(before)


def why_not_by_config(model: nn.Module, innermost: nn.Module) -> str | None:
    """Reasons that short prompts would not show."""
    config = innermost.config.get_text_config()
    if getattr(innermost.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if is_prompt_learning(model):
        return "its adapter puts virtual tokens in front of every row"
    if not getattr(innermost, "_supports_sdpa", False):
        return "its attention cannot be replaced by a function"
    other = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
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


def probe_tokens() -> list[np.ndarray]:
    """Two sequences that begin alike."""
    return [np.arange(1, length + CONTINUED + 1, dtype=np.int32) + (length == LENGTHS[1]) for length in LENGTHS]


@torch.no_grad()
def difference(innermost: nn.Module, answers: Callable[[list[np.ndarray]], list[Tensor]]) -> tuple[float, float]:
    """(how far `answers` (CONTINUED, V) to each sequence are from a full forward's, what rounding may amount to)."""
    sequences = probe_tokens()
    device = next(innermost.parameters()).device
    largest, dtypes = 0.0, {next(innermost.parameters()).dtype}
    for tokens, found in zip(sequences, answers(sequences)):
        logits = innermost(input_ids=torch.from_numpy(tokens)[None].long().to(device), use_cache=False).logits[0]
        wanted = logits[-CONTINUED - 1 : -1].float().log_softmax(-1)
        dtypes.add(logits.dtype)
        gap = (found.float().log_softmax(-1) - wanted).abs().max()
        largest = max(largest, float(gap) if torch.isfinite(gap) else float("inf"))
    return largest, max(TOLERANCE.get(dtype, 1e-3) for dtype in dtypes)
