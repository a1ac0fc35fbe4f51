"""What a fleet is made of: a server as its client shows it, and the version that it is to serve."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.transport import ServerError
from posttrain.rollout.engines.vllm.client import ServerClient, ServerInfo
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from posttrain.serve.wire.payload import TensorSpec

AnyClient = ServerClient | UpstreamClient


@dataclass(eq=False)
class Target:
    """The version that all servers are to serve. Without `kept` this trainer cannot send it again, or not yet: of weights that
    went straight into the engines a copy is made afterwards."""

    version: int | None  # as the servers count; None: they have no weights yet
    fingerprint: str | None
    label: int = 0  # what the trainer calls it
    kept: KeptWeights | None = None
    follows: bool = False  # another process of this run sends it
    specs: tuple[TensorSpec, ...] = ()  # what was sent
    probe: tuple[Any, Any] | None = None  # (tokens, their log-probs) as servers that have it say

    def is_served(self, info: ServerInfo) -> bool:
        return (info.version, info.fingerprint) == (self.version, self.fingerprint)


@dataclass(eq=False)
class Member:
    """One server. Its fields are changed under the fleet's lock."""

    client: AnyClient
    process: ServerProcess | None = None  # where it is ours to restart
    info: ServerInfo | None = None
    is_up: bool = False
    stops: bool = False  # it takes nothing new, and ends what it has
    hangs: bool = False  # it did not answer: a process of ours is restarted without asking it once more
    why: str = "it was not asked yet."
    down_since: float = field(default_factory=time.monotonic)
    unrecoverable: ServerError | None = None  # coming back failed in a way that will not change
    failed_starts: int = 0  # in a row, as the next one
    refusals: int = 0
    wakeup: threading.Event = field(default_factory=threading.Event)  # wakes its watcher
    weights: threading.Lock = field(default_factory=threading.Lock)  # held while it is sent weights

    @property
    def name(self) -> str:
        return self.client.name
