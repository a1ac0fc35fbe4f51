"""What the attention function does for the engine: it keeps keys and values on pages, and attends to them.

Both passes are handed to the model as the forward argument `kv_cache` (see `models/attention`); tokens are one ragged row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from posttrain.models.attention.ragged import segment_attention
from posttrain.models.attention.softmax import softmax_attention
from posttrain.models.triton_support import runs_triton
from posttrain.rollout.engines.native.cache import PAGE, KeyValueStore, LayerShape, Pages
from posttrain.rollout.engines.native.dense_rows import DenseRows
from posttrain.rollout.engines.native.rows import Lines
from posttrain.rollout.engines.native.states import Mix, MixerStates, Parts, parts_of

# ---- one query a row against the pages of its sequence, in plain torch; the Triton kernel of `decode_triton` does the same


def write_token(
    keys: Pages,
    values: Pages,
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
    keys: Pages,
    values: Pages,
    table: Tensor,
    positions: Tensor,
    prefixes: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(lines, heads, width) -> (lines, heads, width of values). Line i attends to the tokens 0 to positions[i] of its sequence.

    keys, values (pages, key heads, PAGE, width); table (rows, pages of the longest row). The lines of a row lie together, as
    many of each, and its pages are gathered once for all of them.
    """
    rows, (count, heads, width) = len(table), query.shape
    gathered = [_of_rows(tensor, table) for tensor in (keys, values)]  # (rows, key heads, places, width)
    grouped = query.view(rows, count // rows, keys.shape[1], -1, width).transpose(1, 2)
    shape = grouped.shape[:-1]  # (rows, key heads, lines of each row, query heads of each key head)
    seen = visible(table.shape[1] * PAGE, positions, prefixes, window).view(rows, 1, shape[2], 1, -1)
    seen = seen.expand(-1, -1, -1, shape[3], -1).flatten(2, 3)
    if sinks is not None:
        sinks = sinks.view(shape[1], 1, shape[3], 1).expand(-1, shape[2], -1, -1).flatten(1, 2)
    found = softmax_attention(grouped.flatten(2, 3), *gathered, seen, scale, softcap, sinks)
    return found.view(*shape, -1).transpose(1, 2).reshape(count, heads, -1)


def visible(places: int, positions: Tensor, prefixes: Tensor, window: int | None) -> Tensor:
    """(rows, places) bool: which places of a row's pages hold a token that its query may look at."""
    place = torch.arange(places, device=positions.device)
    gaps = ((-prefixes) % PAGE)[:, None]
    position = torch.where(place < prefixes[:, None], place, place - gaps)
    is_gap = (place >= prefixes[:, None]) & (place < prefixes[:, None] + gaps)
    distance = positions[:, None] - position
    seen = ~is_gap & (distance >= 0)
    return seen & (distance < window) if window else seen


def _of_rows(tensor: Pages, table: Tensor) -> Tensor:
    pages = tensor[table.long()]  # (rows, pages, heads, PAGE, width)
    return pages.transpose(1, 2).flatten(2, 3)


@dataclass(frozen=True)
class Segments:
    """Which tokens of a ragged row belong together."""

    bounds: Tensor  # (segments + 1,) int32
    longest: int

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """(1, heads, tokens, width) -> (1, tokens, heads, width), causally inside of each segment."""
        how = (scale, 0.0, window, None, softcap, sinks)
        return segment_attention(query, key, value, self.bounds, self.longest, *how)


@dataclass(frozen=True)
class Pass:
    """What the model is handed, whichever pass it is: a compiled layer is compiled again for each type of its arguments."""

    how: ShapeReader | Prefill | DecodeStep

    def attend(self, *call: Any) -> Tensor:
        return self.how.attend(*call).contiguous()

    def mix(self, layer: int, run: Mix) -> Tensor:
        return self.how.mix(layer, run)


class ShapeReader:
    """Keeps nothing: finds out which layers attend, and what their keys look like."""

    def __init__(self, segments: Segments, config: Any) -> None:
        self._segments, self._config = segments, config
        self.shapes: dict[int, LayerShape] = {}
        self.states: dict[int, Parts] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Tensor:
        are_alike = key.shape[:-1] == value.shape[:-1]
        if module.layer_idx in self.shapes or not are_alike or query.shape[-1] != key.shape[-1]:
            raise NotImplementedError(
                f"layer {module.layer_idx} attends twice, or its keys {tuple(key.shape)} are not shaped as its values "
                f"{tuple(value.shape)}"
            )
        self.shapes[module.layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        return self._segments.attend(query, key, value, *how)

    def mix(self, layer: int, run: Mix) -> Tensor:
        cache = DynamicCache(config=self._config)
        mixed = run(torch.arange(self._segments.longest, device=self._segments.bounds.device)[None], cache)
        self.states[layer] = parts_of(cache.layers[layer])
        return mixed[0]


@dataclass(frozen=True)
class Prefill:
    """Whole prefixes, one segment each: their keys and values are put on pages."""

    store: KeyValueStore
    segments: Segments
    pages: Tensor  # (tokens,) where each token lies
    offsets: Tensor  # (tokens,)
    config: Any
    states: list[dict[int, Parts]]  # of each segment, by layer: filled by the pass

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        place = self.store.place_of_layer[module.layer_idx]
        key, value = self.store.as_kept(key, value)
        self.store.keys[place][self.pages, :, self.offsets] = key[0].transpose(0, 1)
        self.store.values[place][self.pages, :, self.offsets] = value[0].transpose(0, 1)
        return self.segments.attend(query, key, value, scale, window, softcap, sinks)

    def mix(self, layer: int, run: Mix) -> Tensor:
        """Segments of one length together: padding would change the state in which a shorter one ends."""
        edges = self.segments.bounds.tolist()
        of_length: dict[int, list[int]] = {}
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            of_length.setdefault(stop - start, []).append(number)
        outputs, places = [], []
        for length, numbers in of_length.items():
            starts = torch.tensor([edges[number] for number in numbers], device=self.pages.device)
            tokens = starts[:, None] + torch.arange(length, device=starts.device)
            cache = DynamicCache(config=self.config)
            outputs.append(run(tokens, cache).flatten(0, 1))
            places.append(tokens.flatten())
            for row, number in enumerate(numbers):
                parts = parts_of(cache.layers[layer])
                self.states[number][layer] = {name: state[row].clone() for name, state in parts.items()}
        joined = torch.cat(outputs)
        return torch.empty_like(joined).index_copy_(0, torch.cat(places), joined)


@dataclass(frozen=True)
class DecodeStep:
    """One token of each line: it is put on its page, or in its column of the dense rows, then looks back."""

    store: KeyValueStore
    lines: Lines
    dense: DenseRows | None = None
    states: MixerStates | None = None

    def mix(self, layer: int, run: Mix) -> Tensor:
        return run(torch.arange(len(self.lines.tokens), device=self.lines.tokens.device)[:, None], self.states.cache)[
            :, 0
        ]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        place, lines = self.store.place_of_layer[module.layer_idx], self.lines
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (lines, heads, width)
        if self.dense is not None:
            return self.dense.attend(place, query, key, value, scale, window, softcap, sinks)[None]
        if runs_triton(query):
            from posttrain.rollout.engines.native.decode_triton import decode_attention_triton

            return decode_attention_triton(
                query, key, value, self.store.addresses[place], lines.table, lines.positions, lines.prefixes,
                lines.remaining, scale, window, softcap, None if sinks is None else sinks.contiguous(),
                writes_first=lines.of_each_row > 1, in_eight_bits=self.store.in_eight_bits,
            )[None]  # fmt: skip
        keys, values = self.store.keys[place], self.store.values[place]
        where = (lines.table, lines.positions, lines.prefixes)
        write_token(keys, values, key, value, *where, lines.remaining > 0)
        where = (lines.table[:: lines.of_each_row], lines.positions, lines.prefixes)
        return decode_attention(query.contiguous(), keys, values, *where, scale, window, softcap, sinks)[None]
