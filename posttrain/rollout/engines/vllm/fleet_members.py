"""What a fleet is made of: a server as its client shows it, and the version that it is to serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.rollout.engines.vllm.client import GenerateRequest, ServerInfo, Written
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from posttrain.rollout.engines.vllm.transport import Deadlines, ServerError


class Client(Protocol):
    """What the fleet asks of a server's client (`ServerClient`, `UpstreamClient`)."""

    name: str
    deadlines: Deadlines

    def health(self) -> None: ...
    def info(self) -> ServerInfo: ...
    def generate(self, request: GenerateRequest) -> Written: ...
    def score(self, sequences: Sequence[Sequence[int]], version: int | None) -> list[list[float]]: ...
    def stage(self, kept: KeptWeights, version: int, bucket_bytes: int) -> None: ...
    def commit(self, kept: KeptWeights, version: int, in_flight: str) -> None: ...
    def abort(self, version: int) -> None: ...
    def refuse_if_not_offered(self, kept: KeptWeights, info: ServerInfo) -> None: ...
    def sleep(self, level: int) -> str | None: ...
    def wake(self) -> None: ...
    def break_off(self, why: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Target:
    """The version that all servers are to serve. Without `kept` this trainer cannot send it again."""

    version: int | None  # as the servers count; None: they have no weights yet
    fingerprint: str | None
    label: int = 0  # what the trainer calls it
    kept: KeptWeights | None = None
    follows: bool = False  # another process of this run sends it

    def is_served(self, info: ServerInfo) -> bool:
        return (info.version, info.fingerprint) == (self.version, self.fingerprint)


@dataclass(eq=False)
class Member:
    """One server. Its fields are changed under the fleet's lock."""

    client: Client
    process: ServerProcess | None = None  # where it is ours to restart
    info: ServerInfo | None = None
    is_up: bool = False
    hangs: bool = False  # it did not answer: a process of ours is restarted without asking it once more
    why: str = "it was not asked yet."
    down_since: float = field(default_factory=time.monotonic)
    unrecoverable: ServerError | None = None  # coming back failed in a way that will not change
    failed_starts: int = 0  # in a row, as the next one
    refusals: int = 0
    load: int = 0  # tokens in flight there, prompt and allowance
    in_flight: int = 0
    stir: threading.Event = field(default_factory=threading.Event)  # wakes its watcher
    weights: threading.Lock = field(default_factory=threading.Lock)  # held by whoever sends it weights

    @property
    def name(self) -> str:
        return self.client.name
