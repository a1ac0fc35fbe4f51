"""What `make trust` shows at its end: each fault, how often it was injected, what was reached, the goal, and the time it took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trust.report import Row, markdown, table

ROWS: list[Row] = []
REPORT = "TRUST_REPORT"  # the file that `make trust` wants the table in


@pytest.fixture
def figure() -> Iterator[Callable[..., None]]:
    """figure(fault, injected, reached, goal): a row of the table. The time is that of the test."""
    began = time.monotonic()
    mine: list[Row] = []

    def note(fault: str, injected: int, reached: str, goal: str) -> None:
        mine.append(Row(fault, injected, reached, goal, 0.0))

    yield note
    seconds = (time.monotonic() - began) / max(len(mine), 1)
    ROWS.extend(Row(row.fault, row.injected, row.reached, row.goal, seconds) for row in mine)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("trust")
    terminalreporter.write_line(table(ROWS))
    if os.environ.get(REPORT):
        path = Path(os.environ[REPORT])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown(ROWS), encoding="utf-8")
        terminalreporter.write_line(f"written to {path}")
