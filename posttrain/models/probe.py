"""Can this model run ragged batches? Two short segments are run ragged and padded, and the answers compared."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from posttrain.core.batch import PADDED, RAGGED, TokenBatch
from posttrain.models.attention import RAGGED_ATTENTION
from posttrain.models.heads import score_sequences
from posttrain.models.token_scores import score_tokens

PROBE_LENGTHS = (5, 11)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def why_not_ragged(model: nn.Module, innermost: nn.Module, task: str) -> str | None:
    """None when ragged attention is in place and gives the padded answers; else the reason, and nothing is changed."""
    before = innermost.config._attn_implementation
    if before == RAGGED_ATTENTION:
        return None
    if not getattr(innermost, "_supports_sdpa", False):
        return f"{type(innermost).__name__} has no SDPA attention to build on"
    training = model.training
    model.eval()
    try:
        padded = _answers(model, task, PADDED)
        innermost.set_attn_implementation(RAGGED_ATTENTION)
        ragged = _answers(model, task, RAGGED)
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        innermost.set_attn_implementation(before)
        return f"{type(innermost).__name__} could not run two ragged segments ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    bound = TOLERANCE.get(padded.dtype if padded.dtype in TOLERANCE else torch.float32, 1e-3)
    bound = max(bound, TOLERANCE.get(next(innermost.parameters()).dtype, bound))
    difference = (padded - ragged).abs().max().item()
    if difference <= bound:
        return None
    innermost.set_attn_implementation(before)
    return (
        f"{type(innermost).__name__} answers differently on ragged segments (by {difference:.2g}), so it reads its mask"
    )


@torch.no_grad()
def _answers(model: nn.Module, task: str, layout: str) -> torch.Tensor:
    batch = _probe_batch(layout).to(next(model.parameters()).device)
    if task == "sequence_reward":
        return score_sequences(model, batch).rewards
    return score_tokens(model, batch).logps


def _probe_batch(layout: str) -> TokenBatch:
    """Every token of two segments, in the given layout. Made by hand: `models` does not import `data`."""
    first, second = PROBE_LENGTHS
    lengths = torch.tensor(PROBE_LENGTHS)
    tokens = [torch.arange(1, n + 1) for n in PROBE_LENGTHS]
    if layout == RAGGED:
        ids, places, starts = (
            torch.cat(tokens)[None],
            torch.cat([torch.arange(n) for n in PROBE_LENGTHS])[None],
            [0, first],
        )
        mask, bounds = None, torch.tensor([0, first, first + second], dtype=torch.int32)
    else:
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        places = torch.arange(second).expand(2, second) * (ids > 0)
        mask, bounds, starts = (ids > 0).long(), None, [0, second]
    positions = np.concatenate([start + np.arange(n - 1) for start, n in zip(starts, PROBE_LENGTHS)])
    return TokenBatch(
        layout, ids, places, torch.from_numpy(positions), torch.cat([t[1:] for t in tokens]), lengths - 1, lengths,
        torch.tensor(starts) + lengths - 1, 2, ("text",), (0, 1), bounds, second, mask,
        num_tokens=first + second, num_trained=first + second - 2,
    )  # fmt: skip
