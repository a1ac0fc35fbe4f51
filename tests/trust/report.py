"""The table of the trust suite."""

from __future__ import annotations

import platform
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

import torch
import transformers

HEADER = ("fault", "injected", "reached", "goal", "seconds")


@dataclass(frozen=True)
class Row:
    fault: str
    injected: int
    reached: str
    goal: str
    seconds: float


def cells(rows: list[Row]) -> list[tuple[str, ...]]:
    return [
        (*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in astuple(row)[:-1]), f"{row.seconds:.1f}")
        for row in rows
    ]


def table(rows: list[Row]) -> str:
    lines = [HEADER, *cells(rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def markdown(rows: list[Row]) -> str:
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.machine()}, {versions}"
    lines = ["# Trust", "", f"`make trust`, {made}.", "", "| " + " | ".join(HEADER) + " |", "|---|--:|---|---|--:|"]
    return "\n".join([*lines, *("| " + " | ".join(line) + " |" for line in cells(rows))]) + "\n"
