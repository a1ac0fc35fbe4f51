"""The decode step as CUDA graphs: one for each number of rows, captured when it is first needed.

A graph bakes in addresses and whatever Python decided while it was captured. Keys and values are found through a table of their
addresses (see `cache`), so graphs outlive the memory of a session; what else could change is in the key: the weights' addresses,
which adapters are on, how tokens are drawn. The graphs share one pool of memory: only one of them runs at a time.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from torch import nn

from posttrain.rollout.engines.native.rows import Rows
from posttrain.rollout.engines.native.step import Sampler

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2  # Triton compiles, cuBLAS chooses and allocates outside of the capture
ROWS_ALMOST_FREE = 256  # up to here a step mostly reads the weights
MAX_SAMPLERS = 4  # training and evaluation are two


class Step(Protocol):
    """What is captured: the step of a `Program`, or that with drafts."""

    rows: Rows
    innermost: nn.Module

    def run(self, rows: int, table_width: int, sampler: Sampler) -> None:
        """One step."""


class StepGraphs:
    """Runs steps of a program, by graph where they can be captured."""

    def __init__(self, model: nn.Module, program: Step) -> None:
        self._model, self._program = model, program
        self._slots = program.rows.device.shape[1]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._samplers: dict[int, Sampler] = {}  # held on to, since graphs read their tensors
        self._pool: Any = None
        self._baked_in: Any = None
        self.has_failed = False

    def begin(self, sampler: Sampler) -> None:
        """A session begins: graphs of other weights, or of too many ways to draw, are dropped."""
        baked_in = _addresses_and_adapters(self._model)
        is_new = id(sampler) not in self._samplers
        if baked_in != self._baked_in or (is_new and len(self._samplers) >= MAX_SAMPLERS):
            self._graphs, self._samplers, self._pool, self._baked_in = {}, {}, None, baked_in
        self._samplers[id(sampler)] = sampler

    def bucket(self, rows: int) -> int:
        """Rows of the graph that runs `rows`."""
        return rows_of_graph(rows, self._slots)

    def run(self, rows: int, steps: int, sampler: Sampler) -> None:
        width = self._program.rows.table.shape[1]
        graph = None if self.has_failed else self._graph(rows, sampler)
        for _ in range(steps):
            if graph is None:
                self._program.run(rows, width, sampler)
            else:
                graph.replay()

    def _graph(self, rows: int, sampler: Sampler) -> torch.cuda.CUDAGraph | None:
        key = (rows, id(sampler))
        if key not in self._graphs:
            try:
                self._graphs[key] = self._captured(rows, sampler)
            except Exception as error:  # a model may synchronise with the device anywhere; it runs, without graphs
                self.has_failed = True
                logger.warning(
                    f"{type(self._program.innermost).__name__} decodes without CUDA graphs, which is slower: its step could not be "
                    f"captured ({type(error).__name__}: {error})."
                )
                return None
        return self._graphs[key]

    def _captured(self, rows: int, sampler: Sampler) -> torch.cuda.CUDAGraph:
        """Capture one step; the rows, which the steps that warm up change, are put back."""
        state = self._program.rows
        kept = [(tensor, tensor.clone()) for tensor in (state.device, state.table, sampler.seen) if tensor is not None]
        state.device.zero_()  # no row is in use: no page is written
        state.table.zero_()
        try:
            return self._captured_from_nothing(rows, sampler)
        finally:
            for tensor, value in kept:
                tensor.copy_(value)
            state.step.zero_()

    def _captured_from_nothing(self, rows: int, sampler: Sampler) -> torch.cuda.CUDAGraph:
        width = self._program.rows.table.shape[1]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._program.run(rows, width, sampler)
                self._program.rows.step.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._program.run(rows, width, sampler)
        self._pool = graph.pool()
        return graph


def rows_of_graph(rows: int, slots: int) -> int:
    """The next power of two, or three quarters of it where rows begin to cost; at most all slots."""
    full = 1 << max(rows - 1, 0).bit_length()
    if full > ROWS_ALMOST_FREE and rows <= 3 * full // 4:
        full = 3 * full // 4
    return min(full, slots)


def _addresses_and_adapters(model: nn.Module) -> tuple[Any, ...]:
    """What a graph of this model bakes in."""
    addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
    adapters = tuple(
        (tuple(module.active_adapters), bool(module.disable_adapters), bool(getattr(module, "merged", False)))
        for module in model.modules()
        if hasattr(module, "merged_adapters")
    )
    return addresses, adapters
