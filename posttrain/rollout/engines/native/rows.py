"""Rows of a decode step, one for each request that runs, laid out on the host and copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.rollout.engines.native.scheduler import Running

FIELDS = ("tokens", "positions", "prefixes", "bases", "numbers", "remaining", "shifts")
"""Of each row: its last token, where that stands, how long the prefix is, where its noise begins, the number of the token to be
drawn, how many may still be drawn (0: the row is not in use), and how far its rotary positions are from its places (images)."""


@dataclass(frozen=True)
class Lines:
    """What a step feeds to the model, one token a line: the last of each row, and its drafts (see `drafts`)."""

    table: Tensor  # (lines, pages) int32
    tokens: Tensor  # (lines,) int64, as all that follow
    positions: Tensor
    prefixes: Tensor
    remaining: Tensor  # 0: the line is not in use
    shifts: Tensor
    of_each_row: int = 1


class Rows:
    """The rows of a step, on the host and on the device."""

    def __init__(self, slots: int, pages: int, steps: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(len(FIELDS), slots, dtype=torch.int64, pin_memory=pinned)
        self.host_table = torch.zeros(slots, pages, dtype=torch.int32, pin_memory=pinned)
        self.device = torch.zeros_like(self.host, device=device)
        self.table = torch.zeros_like(self.host_table, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.ids = torch.zeros(steps, slots, dtype=torch.int64, device=device)
        self.logps = torch.zeros(2, steps, slots, dtype=torch.float32, device=device)  # sampling, policy

    def field(self, name: str, rows: int) -> Tensor:
        return self.device[FIELDS.index(name), :rows]

    def lines(self, rows: int, table_width: int) -> Lines:
        """The last token of each row, without drafts."""
        names = ("tokens", "positions", "prefixes", "remaining", "shifts")
        return Lines(self.table[:rows, :table_width], *(self.field(name, rows) for name in names))

    def put(self, running: Sequence[Running], rows: int) -> int:
        """Lay out who runs; the rest of the `rows` is out of use. Returns the width of the table in use."""
        fields, table = self.host.numpy(), self.host_table.numpy()
        widest = max((len(run.table) for run in running), default=1)
        fields[:, len(running) : rows] = 0
        table[:rows, :widest] = 0
        lines = [_fields_of(run) for run in running]
        fields[:, : len(running)] = np.array(lines, np.int64).T if lines else 0
        for row, run in enumerate(running):
            table[row, : len(run.table)] = run.table
        self.device.copy_(self.host, non_blocking=True)
        self.table[:rows].copy_(self.host_table[:rows], non_blocking=True)  # whole lines are one piece of memory
        self.restart()
        return widest

    def restart(self) -> None:
        """The rows continue from where the last steps left them; results are written from the first line again."""
        self.step.zero_()

    def drawn(self, steps: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(steps, rows) ids and (2, steps, rows) log-probs; the one place where the host waits."""
        return self.ids[:steps, :rows].cpu().numpy(), self.logps[:, :steps, :rows].cpu().numpy()


def _fields_of(run: Running) -> tuple[int, ...]:
    """In the order of FIELDS."""
    request = run.request
    place = (run.last_token, run.position, len(run.prefix.ids))
    return *place, request.base, request.number, request.remaining, request.rotary_shift
