"""Which weights serve, and how far the next ones are: two small values that only change in the ways listed here."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from ..errors import Conflict, NotReady
from .protocol import Accepted, AdapterRef


class Phase(StrEnum):
    """Of the update that is under way."""

    IDLE = "idle"
    STAGING = "staging"  # parts arrive
    VERIFYING = "verifying"  # all parts are here, checksums are compared
    STREAMING = "streaming"  # parts go straight into the engine; no version serves
    FLIPPING = "flipping"  # waits for running requests, then the engine takes the new weights
    RESTORING = "restoring"  # the engine refused them: the old ones are put back


MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.STAGING, Phase.STREAMING}),
    Phase.STREAMING: frozenset({Phase.IDLE, Phase.RESTORING}),
    Phase.STAGING: frozenset({Phase.VERIFYING, Phase.IDLE}),
    Phase.VERIFYING: frozenset({Phase.FLIPPING, Phase.STAGING, Phase.IDLE}),
    Phase.FLIPPING: frozenset({Phase.IDLE, Phase.STAGING, Phase.RESTORING}),
    Phase.RESTORING: frozenset({Phase.IDLE}),
}
"""What may follow each phase. Back to STAGING: a part was missing, or running requests took too long to end."""


@dataclass(frozen=True)
class Serving:
    """The weights that answer. `version` None: no whole version does, for this `reason`."""

    version: int | None
    fingerprint: str | None = None  # of all its tensors; None: as loaded from the model's folder
    adapter: AdapterRef | None = None
    reason: str = ""


class Versions:
    """The two values, changed under a lock and read as one."""

    def __init__(self, serving: Serving) -> None:
        self._lock = threading.Lock()
        self._serving = serving
        self._phase = Phase.IDLE

    @property
    def serving(self) -> Serving:
        return self._serving

    @property
    def phase(self) -> Phase:
        return self._phase

    def move(self, to: Phase) -> None:
        with self._lock:
            if to not in MOVES[self._phase]:
                raise Conflict(f"An update that is {self._phase} cannot become {to}.")
            self._phase = to

    def serve(self, serving: Serving) -> None:
        with self._lock:
            self._serving = serving

    def invalidate(self, reason: str) -> None:
        """No whole version is loaded any more; requests are refused until an update brings one."""
        with self._lock:
            self._serving = Serving(None, reason=reason)

    def check(self, accepted: Accepted) -> Serving:
        """The weights that serve, if the request takes them."""
        serving = self._serving
        if serving.version is None:
            raise NotReady(f"No whole version of the weights is loaded: {serving.reason}")
        if not accepted.takes(serving.version):
            raise Conflict(
                f"Version {serving.version} serves; the request accepts {accepted.lowest} to {accepted.highest}."
            )
        return serving
