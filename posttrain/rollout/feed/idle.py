"""IdleTimes: for how long workers held nothing. No thread and no clock: one owner calls, and brings its seconds."""

from __future__ import annotations

from collections import Counter


class IdleTimes:
    """Of workers that have asked for work. One without a group waits for the trainer: nothing more may begin before it trains."""

    def __init__(self) -> None:
        self._since: dict[str, float | None] = {}  # when a worker was last seen without a group; None: it has one
        self._seconds: Counter[str] = Counter()

    def note(self, worker: str, is_idle: bool, now: float) -> None:
        since = self._since.get(worker)
        if since is not None:
            self._seconds[worker] += now - since
        self._since[worker] = now if is_idle else None

    def forget(self, worker: str) -> None:
        """It ended, or begins anew."""
        self._since.pop(worker, None)

    def since_asked(self, now: float) -> dict[str, float]:
        """Seconds without a group since the last question, of workers that are there."""
        for worker, since in [*self._since.items()]:
            self.note(worker, since is not None, now)
        seconds, self._seconds = self._seconds, Counter()
        return {worker: seconds[worker] for worker in self._since}
