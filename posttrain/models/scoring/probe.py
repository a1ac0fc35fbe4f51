"""Can this model run ragged batches, and share prefixes? Short segments are run in two layouts, and the answers compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from posttrain.core.batch import PADDED, RAGGED, SHARED, SharedPrefixes, TokenBatch
from posttrain.models.attention.ragged import RAGGED_ATTENTION
from posttrain.models.scoring.heads import CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS, LabelsQuestion, score_sequences
from posttrain.models.scoring.token_scores import ask, score_tokens

PROBE_LENGTHS = (5, 11)
COMMON = 2  # tokens with which both segments begin
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}


def ordinary_tokens(innermost: nn.Module, count: int, seed: int = 0) -> torch.Tensor:
    """Some tokens out of the middle of the vocabulary.

    Control tokens stand at its ends, and many were never trained: after five of SmolLM2, float32 rounding alone moves log-probs by
    0.03, after five words by 5e-5.
    """
    size = innermost.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(size // 10, 1), max(9 * size // 10, 2), (count,), generator=generator)


def why_not_ragged(model: nn.Module, innermost: nn.Module, task: str) -> str | None:
    """None when ragged attention is in place and gives the padded answers; else the reason, and nothing is changed."""
    before = innermost.config._attn_implementation
    if before == RAGGED_ATTENTION:
        return None
    if not getattr(innermost, "_supports_sdpa", False):
        return f"{type(innermost).__name__} has no SDPA attention to build on"
    reason = _why_apart(model, innermost, task, (PADDED, RAGGED), "two ragged segments", "on ragged segments")
    if reason is None:
        return None
    innermost.set_attn_implementation(before)
    return f"{reason}, so it reads its mask" if "answers differently" in reason else reason


def why_not_shared(model: nn.Module, innermost: nn.Module, task: str) -> str | None:
    """None when a model that runs ragged batches gives the same answers where two samples share their beginning."""
    return _why_apart(model, innermost, task, (RAGGED, SHARED), "a shared prefix", "where a prefix is shared")


def why_not_its_own_labels(innermost: nn.Module) -> str | None:
    """None when a token classifier's own forward says what its head says of the hidden states; else the sentence about it.

    Some have more between the two. Trained without that, they would answer otherwise once they are saved and loaded.
    """
    training = innermost.training
    innermost.eval()
    with torch.no_grad():
        batch = _probe_batch(_asked(innermost, TOKEN_LABELS), PADDED).to(next(innermost.parameters()).device)
        ours = ask(innermost, batch, LabelsQuestion("labels", batch.positions)).labels
        own = innermost(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        difference = _difference(own.flatten(0, 1)[batch.positions].to(ours.dtype), ours, innermost)
    innermost.train(training)
    name = type(innermost).__name__
    return None if difference is None else f"{name} has more than one linear layer over its hidden states"


def _why_apart(
    model: nn.Module, innermost: nn.Module, task: str, layouts: tuple[str, str], what: str, where: str
) -> str | None:
    """None when the answers in two layouts are the same; else what is wrong with the second. Ragged attention is put in place."""
    name, training = type(innermost).__name__, model.training
    model.eval()
    try:
        asked = _asked(innermost, task)
        one = _answers(model, asked, task, layouts[0])
        if layouts[0] == PADDED:
            innermost.set_attn_implementation(RAGGED_ATTENTION)
        other = _answers(model, asked, task, layouts[1])
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        return f"{name} could not run {what} ({type(error).__name__}: {error})"
    finally:
        model.train(training)
    difference = _difference(one, other, innermost)
    return None if difference is None else f"{name} answers differently {where} (by {difference:.2g})"


def _difference(one: torch.Tensor, other: torch.Tensor, innermost: nn.Module) -> float | None:
    """How far two answers are apart, or None where that is rounding.

    In 16 bits on average: single words of a 135M model that was run rightly were seen 0.17 apart, while a model that reads its
    mask, or does not see the prefix, is wrong everywhere.
    """
    tolerance = max(TOLERANCE.get(dtype, 1e-3) for dtype in (one.dtype, next(innermost.parameters()).dtype))
    apart = (one - other).abs()
    difference = (apart.mean() if tolerance >= TOLERANCE[torch.float16] else apart.max()).item()
    return None if difference <= tolerance else difference


@dataclass(frozen=True)
class _Asked:
    """Two segments that begin alike, and the words whose log-probs are compared, one for each token but the first `COMMON`."""

    tokens: list[torch.Tensor]
    targets: list[torch.Tensor]


@torch.no_grad()
def _asked(innermost: nn.Module, task: str) -> _Asked:
    """Targets are what the model itself would say: rounding moves the log-prob of a word that nobody says by far more."""
    tokens = [ordinary_tokens(innermost, n, seed) for seed, n in enumerate(PROBE_LENGTHS)]
    tokens[1][:COMMON] = tokens[0][:COMMON]
    if task != CAUSAL_LM:
        return _Asked(tokens, [part[COMMON:] for part in tokens])
    device = next(innermost.parameters()).device
    said = [innermost(input_ids=part[None].to(device), use_cache=False).logits[0].argmax(-1).cpu() for part in tokens]
    return _Asked(tokens, [part[COMMON - 1 : -1] for part in said])


@torch.no_grad()
def _answers(model: nn.Module, asked: _Asked, task: str, layout: str) -> torch.Tensor:
    batch = _probe_batch(asked, layout).to(next(model.parameters()).device)
    if task == SEQUENCE_REWARD:
        return score_sequences(model, batch).rewards
    if task == CAUSAL_LM:
        return score_tokens(model, batch).logps
    return ask(model, batch, LabelsQuestion("labels", batch.positions)).labels


def _probe_batch(asked: _Asked, layout: str) -> TokenBatch:
    """Made by hand: `models` does not import `data`."""
    tokens = asked.tokens
    mask = bounds = prefixes = None
    if layout == PADDED:
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = (torch.arange(max(PROBE_LENGTHS)) < torch.tensor(PROBE_LENGTHS)[:, None]).long()
        places = [row * ids.shape[1] + torch.arange(n) for row, n in enumerate(PROBE_LENGTHS)]
        segments = list(PROBE_LENGTHS)
    elif layout == RAGGED:
        ids = torch.cat(tokens)[None]
        places = [torch.arange(PROBE_LENGTHS[0]), PROBE_LENGTHS[0] + torch.arange(PROBE_LENGTHS[1])]
        segments = list(PROBE_LENGTHS)
    else:
        rests = [n - COMMON for n in PROBE_LENGTHS]
        ids = torch.cat([tokens[0][:COMMON], *(part[COMMON:] for part in tokens)])[None]
        starts = (COMMON, COMMON + rests[0])
        places = [torch.cat([torch.arange(COMMON), start + torch.arange(n)]) for start, n in zip(starts, rests)]
        segments = [COMMON, *rests]
        edges = [torch.tensor([0, size], dtype=torch.int32) for size in (COMMON, sum(rests))]
        prefixes = SharedPrefixes(*edges, COMMON, COMMON, ids.shape[1], COMMON, sum(rests))
    if layout != PADDED:
        bounds = torch.tensor(np.cumsum([0, *segments]), dtype=torch.int32)
    position_ids = torch.zeros_like(ids)
    for place in places:
        position_ids.view(-1)[place] = torch.arange(len(place))
    lengths = torch.tensor(PROBE_LENGTHS)
    return TokenBatch(
        layout, ids, position_ids, torch.cat([place[COMMON - 1 : -1] for place in places]),
        torch.cat(asked.targets), lengths - COMMON, lengths,
        torch.stack([place[-1] for place in places]), 2, ("text",), (0, 1), bounds, max(segments), prefixes, mask,
        num_tokens=sum(PROBE_LENGTHS), num_trained=sum(PROBE_LENGTHS) - 2 * COMMON,
    )  # fmt: skip
