"""ReplayFeed: the windows that an earlier run took, from its journal, in their order. Nothing is written or judged anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.rollout.feed.feed import ZERO_VARIANCE
from posttrain.rollout.feed.group import Group
from posttrain.rollout.feed.journal import FOLDER, PROCESS, Journal
from posttrain.rollout.feed.ledger import DROPPED, FINISHED, TAKEN, Ledger
from posttrain.rollout.feed.pacing import Lead, Pace

logger = logging.getLogger(__name__)


class ReplayFeed:
    """In the place of a Feed, for one process of the run that repeats `run`."""

    def __init__(
        self, run: str | Path, process: int, processes: int, pace: Pace, lead: Lead, row_of: Callable[[int], Any]
    ) -> None:
        self.folder = Path(run) / FOLDER
        found = len([*self.folder.glob(f"{PROCESS}*")])
        if not found:
            raise ValueError(
                f"There is no journal in {self.folder}: `replay_from` names the folder of a run with `async_rollouts`."
            )
        if found != processes:
            raise ValueError(
                f"The run of {self.folder} had {found} processes, and this one has {processes}: start as many."
            )
        self.journal = Journal(run, process)
        self._taken = self.journal.windows()
        self.pace, self.lead, self.row_of = pace, lead, row_of
        self.journal.say_damage("A replay needs it.")
        last = max(self._taken, default=(-1, 0))[0]
        if last * pace.steps >= self.steps:
            logger.warning(
                f"{self.journal.folder} says what window {last} took, and not what window {self.steps // pace.steps} did: the "
                f"replay ends with step {self.steps}."
            )
        self.ledger, self.groups = Ledger(), {}
        self.windows, self.waited, self._round = 0, 0.0, 0

    def next_window(self) -> list[Group]:
        self.windows, self._round = self.windows + 1, 0
        return self._take()

    def further(self, count: int) -> list[Group]:
        self._round += 1
        self.ledger.replace(count, ZERO_VARIANCE)
        return self._take() if count else []

    def _take(self) -> list[Group]:
        entry = self._taken.get((self.windows - 1, self._round))
        if entry is None:
            raise ValueError(
                f"The journal in {self.folder} ends in window {self.windows - 1}, and more groups were asked for."
            )
        for reason in entry["dropped"].values():
            self.ledger.totals[DROPPED + reason] += 1
        for fate in (FINISHED, TAKEN):
            self.ledger.totals[fate] += len(entry["numbers"])
        self.ledger.begun += len(entry["numbers"]) + len(entry["dropped"])
        return [self._group(number) for number in entry["numbers"]]

    def _group(self, number: int) -> Group:
        content = self.journal.read(number)
        if content is None:
            raise ValueError(
                f"The group of prompt {number} is not in {self.journal.folder}: a run that is to be replayed keeps all of its "
                "journal with `keep_journal=True`."
            )
        return Group.from_bytes(content, self.row_of)

    @property
    def steps(self) -> int:
        """Optimizer steps whose groups are known."""
        windows = 0
        while (windows, 0) in self._taken:
            windows += 1
        return windows * self.pace.steps

    # ---- what a Feed has besides, and a replay has no need of --------------------------------------------------------

    def trained(self, step: int) -> None: ...

    def wait_until_written(self, label: int) -> None: ...

    def idle_seconds(self) -> dict[str, float]:
        return {}

    def oldest_needed(self) -> int:
        return self.ledger.begun

    oldest_open = oldest_needed

    def counts(self) -> dict[str, float]:
        return {"begun": self.ledger.begun, "in_flight": 0, "waiting": 0} | self.ledger.totals

    def overlap_seconds(self) -> float:
        return 0.0

    def stop(self, error: BaseException | None = None) -> None: ...

    def state(self) -> dict[str, Any]:
        return {"windows": self.windows, "totals": dict(self.ledger.totals)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.windows = state["windows"]
        self.ledger.totals.update(state["totals"])
