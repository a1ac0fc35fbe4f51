"""States of mixers (`models/attention/mixers`): what recurrences and convolutions remember of the tokens so far.

Keys and values lie on pages, token by token; a state belongs to a whole sequence. A prefix is run once, and the states in which it
leaves the mixers are kept with it. Each row that begins on it gets a copy. In decode steps the states of all rows lie side by side
in the tensors of transformers' own cache, whose layers update them in place. A request that is put back into the queue loses its
states with its pages, and both are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from posttrain.rollout.engines.native.scheduler import Prefix, Running

KINDS = ("conv_states", "recurrent_states")
Parts = dict[tuple[str, int], Tensor]
"""The states of one layer, by kind and number."""
Mix = Callable[[Tensor, Any], Tensor]
"""(rows, length) places in the row, and a cache -> (rows, length, width): a mixer over rows of tokens."""


def parts_of(layer: Any) -> Parts:
    """Of a layer of transformers' cache."""
    found = {(kind, number): state for kind in KINDS for number, state in getattr(layer, kind).items()}
    return {name: state for name, state in found.items() if state is not None}


class MixerStates:
    """Of one model: the states of the rows of the decode step."""

    def __init__(self, config: Any, shapes: dict[int, Parts]) -> None:
        """`shapes`: for each layer, the states that it has, of one sequence."""
        self.config, self.shapes = config, shapes
        self.cache = DynamicCache(config=config)
        self._rows: list[Running] = []

    @property
    def bytes(self) -> int:
        """Of one sequence."""
        return sum(state.nbytes for parts in self.shapes.values() for state in parts.values())

    def free(self) -> None:
        self.cache, self._rows = DynamicCache(config=self.config), []

    def keep(self, prefix: Prefix, states: dict[int, Parts]) -> None:
        prefix.states[id(self)] = states

    def seat(self, running: Sequence[Running]) -> None:
        """From now on row i is `running[i]`: as it was left, or as its prefix was."""
        before = {id(run): row for row, run in enumerate(self._rows)}
        if [id(run) for run in running] == [*before]:
            return
        stay = [(row, before[id(run)]) for row, run in enumerate(running) if id(run) in before]
        begin: dict[int, tuple[Prefix, list[int]]] = {}
        for row, run in enumerate(running):
            if id(run) not in before:
                begin.setdefault(id(run.prefix), (run.prefix, []))[1].append(row)
        cache = DynamicCache(config=self.config)
        for layer, shapes in self.shapes.items():
            old, made = parts_of(self.cache.layers[layer]), {}
            for name, state in shapes.items():
                made[name] = state.new_zeros(len(running), *state.shape[1:])
                if stay:
                    here, there = (torch.tensor(rows, device=state.device) for rows in zip(*stay))
                    made[name][here] = old[name][there]
                for prefix, rows in begin.values():
                    if id(self) in prefix.states:  # a prompt of one token leaves no state
                        made[name][torch.tensor(rows, device=state.device)] = prefix.states[id(self)][layer][name]
            _fill(cache.layers[layer], made)
        self.cache, self._rows = cache, list(running)


def _fill(layer: Any, parts: Parts) -> None:
    """Put states where a layer of transformers' cache has them after it has read some tokens."""
    for (kind, number), state in parts.items():
        getattr(layer, kind)[number] = state
        getattr(layer, f"is_{kind}_initialized")[number] = True
        layer.has_previous_state[number] = True
        layer.dtype, layer.device = state.dtype, state.device
        if kind == "conv_states":
            layer.conv_kernel_size[number] = state.shape[-1]
