"""Attention of towers whose images are patches end to end: one call per layer, not one per image or window.

transformers calls such a tower's attention once for every image, and in Qwen2.5-VL for every window, with a wait of the host each,
unless the name of the implementation contains "flash": then it hands over the bounds (`cu_seq_lens_q`) and calls once. Towers of
images of one size (CLIP, SigLIP, InternViT) are dense batches and keep `sdpa`; such a name would change their masks.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from posttrain.core.vision import VisionFamily
from posttrain.models.attention.flash import FlashCall, tokens_first
from posttrain.models.vision.features import family_of

TOWER_ATTENTION = "posttrain_flash_vision"


def install_tower_attention(innermost: nn.Module, family: VisionFamily) -> bool:
    """Give the tower this attention, where it hands over bounds. True where it has it now; the text keeps its own."""
    if not family.tower_has_bounds:
        return False
    _register()
    innermost.set_attn_implementation({"vision_config": TOWER_ATTENTION})
    return True


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(TOWER_ATTENTION, tower_attention)
    AttentionMaskInterface.register(TOWER_ATTENTION, sdpa_mask)


def know_tower(innermost: nn.Module) -> None:
    """In a process that was handed a model which sees, and did not build it: the tower's attention, and which layers may be looked
    at from outside, as LLaVA does; transformers notes that by class when it builds a model."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    _register()
    for module in innermost.modules():
        if isinstance(module, PreTrainedModel):
            _CAN_RECORD_REGISTRY[str(type(module))] = module._can_record_outputs


def set_text_attention(innermost: nn.Module, name: str) -> None:
    """Change the attention of a model; a tower keeps its own."""
    innermost.set_attn_implementation(name if family_of(innermost) is None else {"": name, "text_config": name})


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(1, heads, patches, dim) -> (1, patches, heads, dim): every patch of a segment sees all of its segment."""
    q, k, v = tokens_first(query, key, value)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    call = FlashCall.of_segments(cu_seq_lens_q.to(torch.int32), max_length_q, scale, causal=False, dropout=dropout)
    if call.can_run(q, k):
        return call.attend(q, k, v).unsqueeze(0), None
    lengths = [stop - start for start, stop in itertools.pairwise(cu_seq_lens_q.tolist())]
    segments = zip(*(x.split(lengths, dim=2) for x in (query, key, value)))
    parts = [scaled_dot_product_attention(*segment, dropout_p=dropout, scale=scaling) for segment in segments]
    return torch.cat(parts, dim=2).transpose(1, 2), None
