"""Which step runs the tests that take long, by a measured list:

- `make test` leaves cells of a parametrised test that take long, but the quickest where all do, and whatever takes longest, to
  `make test-slow`;
- `make test-slow` has so many seconds for the cells of one test, which go to the quickest; it leaves the others to `make trust`.

    python -m tests.long_cells runs/junit/fast.xml runs/junit/slow.xml

writes `long_cells.txt` from the durations of both steps of CI. The list is measured, not chosen: whoever adds a method to a table
adds cells that run with the others, until the list is written again.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).with_suffix(".txt")
SLOW, TRUST = "slow", "trust"
LIMIT_S = 0.7
"""Of a cell in `make test`."""
LONGEST_S = 4.0
"""Of anything there."""
BUDGET_S = 12.0
"""Of the cells of one test in `make test-slow`, if it has more than one in CI."""
ALL_OF = (
    "tests/docs/",
    "tests/cli/test_train.py::test_a_file_and_flags_train_the_same",
    "tests/methods/test_vllm_training.py::test_two_servers",
    "tests/trainer/test_gradient_matrix.py::test_two_processes",
    "tests/trainer/test_two_processes.py::test_two_processes_equal_one_and_resume_exactly",
    "tests/trust/test_kill.py::test_killed_at_random_instants_and_resumed_is_bit_identical",
)
"""What users copy, what docs/support.md says of each method, and the processes of the gradient matrix: run by CI however long it
takes."""


def long_cells() -> dict[str, str]:
    """Test id -> the mark that it is given."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {name: mark for mark, name in (line.split(" ", 1) for line in lines)}


def mark_long(items: list[pytest.Item]) -> None:
    listed = long_cells()
    for item in items:
        if (mark := listed.get(item.nodeid)) and not item.get_closest_marker(TRUST):
            item.add_marker(getattr(pytest.mark, mark))


def durations(report: Path) -> dict[str, float]:
    """Test id -> seconds, of a JUnit report; of tests that ran. Fixtures are not counted: they would be paid by another cell."""
    ran = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return {_id(case.get("classname", ""), case.get("name", "")): float(case.get("time", 0)) for case in ran}


def _id(module: str, name: str) -> str:
    """JUnit's "tests.data.test_a.TestClass" and "test_b" -> "tests/data/test_a.py::TestClass::test_b"."""
    folder, file, *classes = re.split(r"\.(test_\w+)\.?", module, maxsplit=1)
    return "::".join([f"{folder.replace('.', '/')}/{file}.py", *filter(None, classes), name])


def chosen(fast: Mapping[str, float], slow: Mapping[str, float], listed: Mapping[str, str]) -> dict[str, str]:
    """Test id -> mark. What was not measured keeps its own; tests that are marked slow in their file are never made fast."""
    found = {name: mark for name, mark in listed.items() if name not in fast and name not in slow}
    tests: dict[str, dict[str, float]] = defaultdict(dict)
    for name, seconds in {**fast, **slow}.items():
        tests[name.split("[")[0]][name] = seconds
    for test, cells in tests.items():
        quickest, spent = min(cells, key=lambda name: cells[name]), 0.0
        for name in sorted(cells, key=lambda name: cells[name]):
            is_movable = name in fast or name in listed
            if is_movable and cells[name] <= (LONGEST_S if name == quickest else LIMIT_S):
                continue
            spent += cells[name]
            if spent > BUDGET_S and name != quickest and not test.startswith(ALL_OF):
                found[name] = TRUST
            elif is_movable:
                found[name] = SLOW
    return found


if __name__ == "__main__":
    fast, slow = (durations(Path(name)) for name in sys.argv[1:])
    lines = sorted(f"{mark} {name}" for name, mark in chosen(fast, slow, long_cells()).items())
    LIST.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{LIST.name}: {len(lines)} tests, {sum(line.startswith(TRUST) for line in lines)} of them for `make trust`")
