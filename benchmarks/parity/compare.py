"""Compares what the two libraries logged and what the weights became.

    python -m benchmarks.parity.compare RESULTS [CASE ...]

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

from benchmarks.parity.case import Case
from benchmarks.parity.cases import CASES, ONE_MICRO_BATCH, STEP_MEANS, chosen
from benchmarks.parity.differences import DIFFERENCES, WITNESSED

TOLERANCE = 1e-4
SMALL = {"*rewards/*": 0.1, "o*_policy_loss": 1.0, "*matched_loss": 1.0, "*": 1e-2}
"""Numbers below this are compared absolutely. A mean of signed numbers near 0 has no meaningful relative error, an implicit
reward is the difference of two log-probs of about 150, which float32 rounds by 1e-5, and on_policy_loss and its like are rounded to
four places in TRL."""
CHANGE_TOLERANCE = 1e-3
"""For what training changed in a tensor (a small part of the tensor's norm, which is held to TOLERANCE)."""


@dataclass
class Verdict:
    """How far the two sides are apart, number by number."""

    case: Case
    apart: dict[str, float] = field(default_factory=dict)  # name of a number -> largest relative difference
    examples: dict[str, str] = field(default_factory=dict)  # the same -> what was seen
    without_floor: dict[str, float] = field(default_factory=dict)  # the same as `apart`, purely relative
    steps: int = 0
    weights: int = 0
    from_witness: Verdict | None = None  # our numbers against TRL's in the case that must agree

    def note(self, name: str, ours: Any, theirs: Any, place: str, scale: float | None = None) -> None:
        if scale is None:
            scale = next(small for pattern, small in SMALL.items() if fnmatch.fnmatch(name, pattern))
        self.without_floor[name] = max(self.without_floor.get(name, 0.0), relative(ours, theirs, 0.0))
        distance = relative(ours, theirs, scale)
        if distance > self.apart.get(name, -1.0):
            self.apart[name] = distance
            self.examples[name] = f"{show(ours)} here, {show(theirs)} in TRL ({place})"

    def differs(self, name: str) -> bool:
        bound = CHANGE_TOLERANCE if name in ("weights:moved", "weights:direction") else TOLERANCE
        return self.apart[name] > bound * self.case.rounding

    def reason(self, name: str) -> str | None:
        """Key of the declared difference, where the witness, if there is one, agrees with us."""
        declared = {**(STEP_MEANS if self.case.name.split("@")[1] in ONE_MICRO_BATCH else {}), **self.case.differs}
        key = next((key for pattern, key in declared.items() if fnmatch.fnmatch(name, pattern)), None)
        if key not in WITNESSED or self.from_witness is None:
            return key
        return None if self.from_witness.differs(name) else key

    @property
    def beyond(self) -> list[str]:
        return [name for name in self.apart if self.differs(name)]

    @property
    def undeclared(self) -> list[str]:
        return [name for name in self.beyond if self.reason(name) is None]

    @property
    def unseen(self) -> list[str]:
        """Declared differences that no number shows."""
        seen = {self.reason(name) for name in self.beyond}
        return sorted(set(self.case.differs.values()) - seen)

    @property
    def only_by_floor(self) -> list[str]:
        """Numbers that agree absolutely, being small, and not relatively."""
        logged = [name for name in self.apart if name not in ("weights:moved", "weights:direction")]
        return [name for name in logged if self.without_floor[name] > TOLERANCE and not self.differs(name)]

    @property
    def worst_equal(self) -> float:
        """Largest distance among the logged numbers and norms that agree."""
        return max((d for name, d in self.apart.items() if d <= TOLERANCE), default=0.0)


def relative(ours: Any, theirs: Any, scale: float) -> float:
    """|a - b| / max(|a|, |b|, scale), 0 for two zeros; infinite where only one side has a number, or texts differ."""
    if not isinstance(ours, (int, float)) or not isinstance(theirs, (int, float)):
        return 0.0 if ours == theirs else float("inf")
    return 0.0 if ours == theirs else abs(ours - theirs) / max(abs(ours), abs(theirs), scale)


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
            scale = None if kind == "norm" else their_numbers["moved"] + 1e-6
            verdict.note(f"weights:{kind}", ours["weights"].get(tensor, {}).get(kind), value, tensor, scale)
    verdict.weights = len(theirs["weights"])
    return verdict


def lines(verdict: Verdict) -> Iterator[str]:
    state = "DIFFERENT" if verdict.undeclared else "declared" if verdict.beyond else "equal"
    yield f"{verdict.case.name:44} {state:9} {verdict.steps} steps, {verdict.weights:2} tensors, {verdict.worst_equal:.0e}"
    for name in verdict.beyond:
        why = verdict.reason(name) or "NOT DECLARED"
        yield f"    {name:22} {verdict.apart[name]:8.1e}  {verdict.examples[name][:160]}  [{why}]"
    for key in verdict.unseen:
        yield f"    {key} is declared for this case, but nothing shows it: remove the declaration"


def verdict_of(case: Case, results: Path) -> Verdict:
    verdict = compare(case, load(results, "posttrain", case.name), load(results, "trl", case.name))
    if case.witness and (results / "trl" / f"{case.witness}.json").exists() and "error" not in verdict.apart:
        ours, witness = load(results, "posttrain", case.name), load(results, "trl", case.witness)
        verdict.from_witness = compare(case, ours, witness)
    return verdict


def load(results: Path, side: str, name: str) -> dict[str, Any]:
    return json.loads((results / side / f"{name}.json").read_text(encoding="utf-8"))


def main(results: Path, patterns: list[str]) -> int:
    verdicts = []
    for case in chosen(CASES, patterns):
        verdicts.append(verdict_of(case, results))
        print("\n".join(lines(verdicts[-1])))
    wrong = [v for v in verdicts if v.undeclared or v.unseen]
    declared = sorted({v.reason(name) for v in verdicts for name in v.beyond} - {None})
    equal = sum(not v.beyond for v in verdicts)
    print(
        f"\n{len(verdicts)} cases: {equal} equal to {TOLERANCE:g}, {len(verdicts) - equal - len(wrong)} with declared"
    )
    print(f"differences only, {len(wrong)} with others.")
    small = [name for verdict in verdicts for name in verdict.only_by_floor]
    count = sum(len(verdict.apart) for verdict in verdicts)
    print(
        f"{len(small)} of {count} numbers agree only absolutely, being near 0: {', '.join(sorted(set(small))) or 'none'}."
    )
    print("Declared differences that were seen:")
    for key in declared:
        print(f"  {key}: {DIFFERENCES[key]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
