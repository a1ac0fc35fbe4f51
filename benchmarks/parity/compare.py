"""Compares what the two libraries logged and what the weights became.

    python compare.py RESULTS [CASE ...]

Prints one line for each case and, below it, every number that differs by more than the tolerance, with its declared reason. Exit
code 1 when a difference is not declared in cases.py, or when a declared one is no longer there.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import CASES, DIFFERENCES, Case, chosen  # noqa: E402

TOLERANCE = 1e-4
FLOORS = {"": 1e-2, "moved": 1e-3, "direction": 1e-2}
"""Numbers smaller than this are compared absolutely: a mean of signed numbers near 0 has no meaningful relative error."""


@dataclass
class Verdict:
    """How far the two sides are apart, number by number."""

    case: Case
    apart: dict[str, float] = field(default_factory=dict)  # name of a number -> largest relative difference
    examples: dict[str, str] = field(default_factory=dict)  # the same -> what was seen
    steps: int = 0
    weights: int = 0

    def note(self, name: str, ours: Any, theirs: Any, place: str) -> None:
        distance = relative(name, ours, theirs)
        if distance > self.apart.get(name, -1.0):
            self.apart[name] = distance
            self.examples[name] = f"{show(ours)} here, {show(theirs)} in TRL ({place})"

    def reason(self, name: str) -> str | None:
        return next((key for pattern, key in self.case.differs.items() if fnmatch.fnmatch(name, pattern)), None)

    @property
    def beyond(self) -> list[str]:
        return [name for name, distance in self.apart.items() if distance > TOLERANCE]

    @property
    def undeclared(self) -> list[str]:
        return [name for name in self.beyond if self.reason(name) is None]

    @property
    def unseen(self) -> list[str]:
        """Declared differences that no number shows."""
        return [p for p in self.case.differs if not any(fnmatch.fnmatch(name, p) for name in self.beyond)]

    @property
    def worst_equal(self) -> float:
        return max((d for d in self.apart.values() if d <= TOLERANCE), default=0.0)


def relative(name: str, ours: Any, theirs: Any) -> float:
    if not isinstance(ours, (int, float)) or not isinstance(theirs, (int, float)):
        return 0.0 if ours == theirs else float("inf")
    floor = FLOORS.get(name.rsplit(":", 1)[-1], FLOORS[""])
    return abs(ours - theirs) / max(abs(ours), abs(theirs), floor)


def show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def compare(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> Verdict:
    verdict = Verdict(case)
    if "error" in ours or "error" in theirs:
        verdict.note("error", ours.get("error"), theirs.get("error"), "the run")
        return verdict
    verdict.note("log entries", len(ours["logs"]), len(theirs["logs"]), "the run")
    for our_log, their_log in zip(ours["logs"], theirs["logs"]):
        for name in dict.fromkeys([*their_log, *our_log]):
            if name in their_log:  # what only we log is no difference to what TRL logs
                verdict.note(name, our_log.get(name), their_log[name], f"step {their_log['step']}")
        verdict.steps = max(verdict.steps, their_log["step"])
    for tensor, their_numbers in theirs["weights"].items():
        for kind, value in their_numbers.items():
            verdict.note(f"weights:{kind}", ours["weights"].get(tensor, {}).get(kind), value, tensor)
    verdict.weights = len(theirs["weights"])
    return verdict


def lines(verdict: Verdict) -> Iterator[str]:
    state = "DIFFERENT" if verdict.undeclared else "declared" if verdict.beyond else "equal"
    yield f"{verdict.case.name:44} {state:9} {verdict.steps} steps, {verdict.weights:2} tensors, {verdict.worst_equal:.0e}"
    for name in verdict.beyond:
        yield f"    {name:22} {verdict.apart[name]:8.1e}  {verdict.examples[name]}  [{verdict.reason(name) or 'NOT DECLARED'}]"
    for pattern in verdict.unseen:
        yield f"    {pattern:22} is declared ({verdict.case.differs[pattern]}) but equal: remove the declaration"


def main(results: Path, patterns: list[str]) -> int:
    verdicts = []
    for case in chosen(CASES, patterns):
        sides = [json.loads((results / side / f"{case.name}.json").read_text()) for side in ("posttrain", "trl")]
        verdicts.append(compare(case, *sides))
        print("\n".join(lines(verdicts[-1])))
    wrong = [v for v in verdicts if v.undeclared or v.unseen]
    declared = sorted({v.reason(name) for v in verdicts for name in v.beyond} - {None})
    equal = sum(not v.beyond for v in verdicts)
    print(f"\n{len(verdicts)} cases: {equal} equal to {TOLERANCE:g}, {len(verdicts) - equal - len(wrong)} with declared")
    print(f"differences only, {len(wrong)} with others. Declared differences that were seen:")
    for key in declared:
        print(f"  {key}: {DIFFERENCES[key]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
