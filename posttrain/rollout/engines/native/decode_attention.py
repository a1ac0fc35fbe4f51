"""One query a row against the pages of its sequence, in plain torch. The Triton kernel of `decode_triton` does the same."""

from __future__ import annotations

import torch
from torch import Tensor

from posttrain.rollout.engines.native.cache import PAGE


def write_token(
    keys: Tensor,
    values: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    positions: Tensor,
    prefixes: Tensor,
    in_use: Tensor,
) -> None:
    """Put (rows, heads, width) of the new tokens at their places; those of rows that are not in use go to page 0."""
    places = positions + (-prefixes) % PAGE
    pages = table.gather(1, (places // PAGE)[:, None]).squeeze(1).long() * in_use
    keys[pages, :, places % PAGE] = key
    values[pages, :, places % PAGE] = value


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    positions: Tensor,
    prefixes: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """(rows, heads, width) -> same. Row i attends to the tokens 0 to positions[i] of its sequence.

    keys, values (pages, key heads, PAGE, width); table (rows, pages of the longest row).
    """
    rows, heads, width = query.shape
    gathered = [_of_rows(tensor, table) for tensor in (keys, values)]  # (rows, key heads, places, width)
    grouped = query.view(rows, keys.shape[1], -1, width)
    scores = (grouped @ gathered[0].transpose(-1, -2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(table.shape[1] * PAGE, positions, prefixes, window)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return (weights.to(query.dtype) @ gathered[1]).reshape(rows, heads, width)


def visible(places: int, positions: Tensor, prefixes: Tensor, window: int | None) -> Tensor:
    """(rows, places) bool: which places of a row's pages hold a token that its query may look at."""
    place = torch.arange(places, device=positions.device)
    gaps = ((-prefixes) % PAGE)[:, None]
    position = torch.where(place < prefixes[:, None], place, place - gaps)
    is_gap = (place >= prefixes[:, None]) & (place < prefixes[:, None] + gaps)
    distance = positions[:, None] - position
    seen = ~is_gap & (distance >= 0)
    return seen & (distance < window) if window else seen


def _of_rows(tensor: Tensor, table: Tensor) -> Tensor:
    pages = tensor[table.long()]  # (rows, pages, heads, PAGE, width)
    return pages.transpose(1, 2).flatten(2, 3)
