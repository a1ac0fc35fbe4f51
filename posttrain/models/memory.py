"""Will the activations fit? An estimate before training, so that recomputing them is a decision and not a default."""

from __future__ import annotations

import torch
from torch import nn

OPTIMIZER_BYTES = 16  # float32 master, two Adam moments and gradient of one trained weight
HEAD_ROOM = 0.85  # share of the free memory that the estimate may claim


def activation_bytes_per_token(model: nn.Module) -> int:
    """Saved for the backward by one token: per layer about 12 vectors of the model's width and 4 of its MLP's width."""
    config = model.config.get_text_config()
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    item = next(model.parameters()).element_size()
    return config.num_hidden_layers * (12 * width + 4 * inner) * item


NONE, SELECTIVE, FULL = "none", "selective", "full"
KEPT_SHARE = {NONE: 1.0, SELECTIVE: 0.55, FULL: 0.05}
"""Share of the activations that each level of checkpointing keeps; each costs more time than the one before it."""
IN_WORDS = {
    NONE: "kept",
    SELECTIVE: "kept where they are dear and recomputed where they are cheap",
    FULL: "recomputed in the backward",
}


def checkpointing_needed(model: nn.Module, device: torch.device, tokens: int) -> tuple[str, str]:
    """(the mildest level of checkpointing that fits, the sentence that says why) for micro-batches of up to `tokens` tokens."""
    if device.type != "cuda":
        return NONE, "Activations are kept, not recomputed: host memory is assumed to be enough."
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    free, _ = torch.cuda.mem_get_info(device)
    activations = tokens * activation_bytes_per_token(model)
    room = HEAD_ROOM * free - trained * OPTIMIZER_BYTES
    fitting = [level for level, share in KEPT_SHARE.items() if share * activations <= room]
    level = fitting[0] if fitting else FULL
    return level, (
        f"Activations are {IN_WORDS[level]}: micro-batches of up to {tokens} tokens would keep about "
        f"{activations / 2**30:.1f} GiB of them, {max(room, 0) / 2**30:.1f} GiB are left beside the optimizer. Set "
        "`gradient_checkpointing` to decide yourself."
    )
