"""Ledger: the fate of every prompt number of an asynchronous run.

    planned -> issued -> finished -> taken            each of them -> dropped, with a reason

A number that was begun has one fate, whatever dies: it is trained on once, or dropped and counted. An issue is a *lease*: it has an
attempt number and ends by its result or by the end of its worker. Only then is the number issued again, with the next attempt, and
the result of an older attempt is refused. No thread and no clock here: one owner calls, and brings its seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

PLANNED, ISSUED, FINISHED = "planned", "issued", "finished"
LATE, REISSUED, TAKEN, DROPPED = "late_results", "reissued", "taken", "dropped/"


@dataclass
class Entry:
    """A number that is neither taken nor dropped."""

    fate: str = PLANNED
    label: int = 0  # of the weights that it was planned, then last issued, with
    attempt: int = 0  # issues so far; the last one counts
    worker: str = ""
    since: float = 0.0  # when it was issued, by the owner's clock
    place: int = -1  # among finished groups, in the order in which they finished
    digest: str = ""  # of the finished group
    batch: int = -1  # the first of the numbers that were begun at once
    batch_size: int = 0  # how many these were


class Ledger:
    """`live` has the open numbers. Every other number below `begun` was taken or dropped."""

    def __init__(self) -> None:
        self.begun = 0
        self.live: dict[int, Entry] = {}
        self.totals: Counter[str] = Counter()

    # ---- a number's way ----------------------------------------------------------------------------------------------

    def begin(self, label: int, batch: int = -1, batch_size: int = 0) -> int:
        """The next number, planned."""
        number, self.begun = self.begun, self.begun + 1
        self.live[number] = Entry(label=label, batch=batch, batch_size=batch_size)
        return number

    def issue(self, number: int, worker: str, label: int, now: float = 0.0) -> int:
        """The attempt that `worker` now has a lease for."""
        entry = self._entry(number, PLANNED)
        entry.fate, entry.worker, entry.label = ISSUED, worker, label
        entry.since, entry.attempt = now, entry.attempt + 1
        self.totals[REISSUED] += entry.attempt > 1
        return entry.attempt

    def give_back(self, number: int, attempt: int) -> bool:
        """The lease ended without a result: the number waits to be issued again. False: it was not the current one."""
        if not self._is_current(number, attempt):
            return False
        self.live[number].fate = PLANNED
        return True

    def finish(self, number: int, attempt: int, digest: str) -> bool:
        """False: this is the result of an older attempt, or of a number that has its fate. It is counted, and not to be used."""
        if not self._is_current(number, attempt):
            self.totals[LATE] += 1
            return False
        entry = self.live[number]
        entry.fate, entry.digest, entry.place = FINISHED, digest, self.totals[FINISHED]
        self.totals[FINISHED] += 1
        return True

    def take(self, numbers: Iterable[int]) -> None:
        """They are trained on, by the step that asks for them and by no other."""
        for number in numbers:
            self._entry(number, FINISHED)
            del self.live[number]
            self.totals[TAKEN] += 1

    def replace(self, count: int, reason: str) -> None:
        """So many of those that were taken last are not trained on: others come in their place."""
        self.totals[TAKEN] -= count
        self.totals[DROPPED + reason] += count

    def drop(self, number: int, reason: str) -> None:
        if number not in self.live:
            raise ValueError(f"Prompt {number} has its fate already, or was never begun: it cannot be dropped.")
        del self.live[number]
        self.totals[DROPPED + reason] += 1

    def _entry(self, number: int, fate: str) -> Entry:
        entry = self.live.get(number)
        if entry is None or entry.fate != fate:
            found = "settled or never begun" if entry is None else entry.fate
            raise ValueError(f"Prompt {number} is {found}, not {fate}.")
        return entry

    def _is_current(self, number: int, attempt: int) -> bool:
        entry = self.live.get(number)
        return entry is not None and entry.fate == ISSUED and entry.attempt == attempt

    # ---- what is where -----------------------------------------------------------------------------------------------

    def numbers(self, fate: str) -> list[int]:
        return [number for number, entry in self.live.items() if entry.fate == fate]

    def held_by(self, worker: str) -> list[int]:
        return [n for n, entry in self.live.items() if entry.fate == ISSUED and entry.worker == worker]

    def holds(self, worker: str) -> bool:
        return any(entry.fate == ISSUED and entry.worker == worker for entry in self.live.values())

    @property
    def dropped(self) -> int:
        return sum(count for name, count in self.totals.items() if name.startswith(DROPPED))

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        live = {number: asdict(entry) for number, entry in self.live.items()}
        return {"begun": self.begun, "live": live, "totals": dict(self.totals)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Leases end with the process that gave them: what was issued is planned again."""
        self.begun, self.totals = state["begun"], Counter(state["totals"])
        known = Entry.__dataclass_fields__.keys()  # a checkpoint of an older version has more
        self.live = {
            number: Entry(**{name: entry[name] for name in entry.keys() & known})
            for number, entry in state["live"].items()
        }
        for entry in self.live.values():
            if entry.fate == ISSUED:
                entry.fate = PLANNED
