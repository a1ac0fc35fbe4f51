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


def checkpointing_needed(model: nn.Module, device: torch.device, tokens: int) -> tuple[bool, str]:
    """(recompute activations?, the sentence that says why) for micro-batches of up to `tokens` tokens."""
    if device.type != "cuda":
        return False, "Activations are kept, not recomputed: host memory is assumed to be enough."
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    free, _ = torch.cuda.mem_get_info(device)
    needed = tokens * activation_bytes_per_token(model) + trained * OPTIMIZER_BYTES
    need, room = needed / 2**30, HEAD_ROOM * free / 2**30
    verdict = need > room
    done = "recomputed in the backward" if verdict else "kept"
    return verdict, (
        f"Activations are {done}: micro-batches of up to {tokens} tokens and the optimizer need about {need:.1f} GiB, "
        f"{room:.1f} GiB may be used. Set `gradient_checkpointing` to decide yourself."
    )
