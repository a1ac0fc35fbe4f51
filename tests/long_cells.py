"""What `make test` leaves to `make test-slow`: cells of a parametrised test that take long, but the quickest where all do, and
whatever takes longest.

    python -m tests.long_cells runs/junit/fast.xml runs/junit/slow.xml

writes `long_cells.txt` from the durations of both steps of CI. The list is measured, not chosen: whoever adds a method to a table
adds cells that run with the others, until the list is written again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).with_suffix(".txt")
LIMIT_S = 0.7
"""Of a cell."""
LONGEST_S = 5.0
"""Of anything."""


def long_cells() -> frozenset[str]:
    return frozenset(LIST.read_text(encoding="utf-8").splitlines())


def mark_slow(items: list[pytest.Item]) -> None:
    listed = long_cells()
    for item in items:
        if item.nodeid in listed and not item.get_closest_marker("trust"):
            item.add_marker(pytest.mark.slow)


def durations(report: Path) -> dict[str, float]:
    """Test id -> seconds, of a JUnit report; of tests that ran."""
    ran = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in ran
    }


def chosen(fast: dict[str, float], slow: dict[str, float], listed: frozenset[str]) -> list[str]:
    """Tests that are marked slow in their file are none of ours."""
    tests: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in {**fast, **{name: slow[name] for name in listed & slow.keys()}}.items():
        tests[name.split("[")[0]][name] = seconds
    found = [*(listed - fast.keys() - slow.keys())]  # what was not measured stays
    for cells in tests.values():
        quickest = min(cells, key=lambda name: cells[name])
        limits = {name: LONGEST_S if name == quickest else LIMIT_S for name in cells}
        found += [name for name, seconds in cells.items() if seconds > limits[name]]
    return sorted(found)


if __name__ == "__main__":
    fast, slow = (durations(Path(name)) for name in sys.argv[1:])
    LIST.write_text("\n".join(chosen(fast, slow, long_cells())) + "\n", encoding="utf-8")
    print(f"{LIST.name}: {len(long_cells())} cells")
