"""IdleTimes: for how long workers held nothing, and for how long both sides worked. No thread and no clock: one owner calls, and
brings its seconds."""

from __future__ import annotations

from collections import Counter


class IdleTimes:
    """Of workers that have asked for work. One without a group waits for the trainer: nothing more may begin before it trains."""

    def __init__(self) -> None:
        self._since: dict[str, float | None] = {}  # when a worker was last seen without a group; None: it has one
        self._seconds: Counter[str] = Counter()
        self._trains = False  # or the trainer waits for groups
        self._both_since: float | None = None  # when it was last seen training while a worker had a group
        self._both = 0.0

    def __len__(self) -> int:
        """Workers that are there."""
        return len(self._since)

    def __contains__(self, worker: str) -> bool:
        return worker in self._since

    def note(self, worker: str, is_idle: bool, now: float) -> None:
        since = self._since.get(worker)
        if since is not None:
            self._seconds[worker] += now - since
        self._since[worker] = now if is_idle else None
        self._note_both(now)

    def forget(self, worker: str, now: float) -> None:
        """It ended, or begins anew."""
        self._since.pop(worker, None)
        self._note_both(now)

    def note_trainer(self, trains: bool, now: float) -> None:
        self._trains = trains
        self._note_both(now)

    def _note_both(self, now: float) -> None:
        if self._both_since is not None:
            self._both += now - self._both_since
        self._both_since = now if self._trains and None in self._since.values() else None

    def both_since_asked(self, now: float) -> float:
        """Seconds since the last question in which the trainer trained and a worker wrote."""
        self._note_both(now)
        seconds, self._both = self._both, 0.0
        return seconds

    def since_asked(self, now: float) -> dict[str, float]:
        """Seconds without a group since the last question, of workers that are there."""
        for worker, since in [*self._since.items()]:
            self.note(worker, since is not None, now)
        seconds, self._seconds = self._seconds, Counter()
        return {worker: seconds[worker] for worker in self._since}
