"""Everything that a running server is made of, without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .adapters import Adapters
from .engine import Engine
from .engine_thread import EngineThread
from .errors import NotReady
from .metrics import Metrics
from .payload import CHECKSUMS
from .request_book import RequestBook
from .transports import TransportOptions, Transports
from .update import UpdateLimits, Updater
from .versions import Serving, Versions

PROTOCOL = 2


@dataclass(frozen=True)
class ServerOptions:
    initial_version: int | None = 0  # None: the engine has no weights yet (a model loaded with random numbers)
    adapter_folder: Path | None = None
    shared_folder: Path | None = None  # in which trainers of this machine leave weights
    update: UpdateLimits = field(default_factory=UpdateLimits)
    most_json_bytes: int = 64 << 20
    most_part_bytes: int = 272 << 20
    most_bodies_bytes: int = 4 << 30  # of all requests that are under way; the parts that come at once must fit
    most_in_flight: int = 4096
    most_seconds: float = 3600.0  # of one request
    stalled_seconds: float = 300.0  # without a step of the engine: no longer healthy
    stop_seconds: float = 30.0


class RolloutServer:
    """Engine, versions, updates, adapters and the book of requests, put together."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.options = options
        empty = Serving(None, reason="the model was started without weights and none were sent yet.")
        self.versions = Versions(empty if options.initial_version is None else Serving(options.initial_version))
        self.engine = engine
        self.thread = EngineThread(engine, self.versions, options.most_in_flight)
        self.adapters = Adapters(self.versions, options.adapter_folder, self.thread.adapters_in_use)
        self.updater = Updater(engine, self.versions, self.thread, self.adapters.install, options.update)
        self.transports = Transports(TransportOptions(options.shared_folder, options.most_part_bytes))
        self.book = RequestBook()
        self.metrics = Metrics()
        self.started = time.monotonic()
        self.stopping = False
        self.stopper: asyncio.Task[None] | None = None
        self.stop_process: Callable[[], None] = lambda: None

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self.stopping = True
        self.thread.stop(self.options.stop_seconds)
        self.transports.close()
        self.adapters.close()

    def trouble(self) -> str | None:
        """Why the process is not healthy."""
        if self.thread.failure:
            return f"The engine is down: {self.thread.failure}"
        silent = self.thread.silent_seconds
        if silent > self.options.stalled_seconds:
            return f"The engine has not moved for {silent:.0f} s."
        return None

    def why_not_ready(self) -> str | None:
        """Why requests would be refused now."""
        if trouble := self.trouble():
            return trouble
        if self.stopping:
            return "The server is stopping."
        if self.thread.sleeping:
            return self.thread.sleeping
        serving = self.versions.serving
        return None if serving.version is not None else f"No whole version of the weights is loaded: {serving.reason}"

    def refuse_if_stopping(self) -> None:
        if self.stopping:
            raise NotReady("The server is stopping.")

    def info(self) -> dict[str, Any]:
        about, serving, options = self.engine.info, self.versions.serving, self.options
        return {
            "protocol": PROTOCOL,
            "model": about.model,
            "engine": about.engine,
            "device": about.device,
            "dtype": about.dtype,
            "context_length": about.context_length,
            "vocabulary": about.vocabulary,
            "logprobs_mode": about.logprobs_mode,
            "world_size": about.world_size,
            "capabilities": about.capabilities
            | {"adapters": bool(about.capabilities.get("adapters") and options.adapter_folder)},
            "notes": [*about.notes, *self.adapters.notes],
            "version": serving.version,
            "fingerprint": serving.fingerprint,
            "adapter": serving.adapter.name if serving.adapter else None,
            "not_ready": self.why_not_ready(),
            "update": self.updater.state(),
            "checksums": sorted(CHECKSUMS),
            "transports": self.transports.about(),
            "limits": {
                "json_bytes": options.most_json_bytes,
                "part_bytes": options.most_part_bytes,
                "in_flight": options.most_in_flight,
                "seconds": options.most_seconds,
                "update_bytes": options.update.total_bytes,
            },
            "in_flight": self.thread.in_flight,
        }

    def refresh_metrics(self) -> str:
        serving = self.versions.serving.version
        for name, value in {
            "generated_tokens_total": self.thread.tokens,
            "joined_requests_total": self.book.joined,
            "updates_committed_total": self.updater.committed,
            "updates_failed_total": self.updater.failed,
            "in_flight": self.thread.in_flight,
            "serving_version": -1 if serving is None else serving,
            "ready": self.why_not_ready() is None,
            "engine_silent_seconds": self.thread.silent_seconds,
            "uptime_seconds": time.monotonic() - self.started,
        }.items():
            self.metrics.set(name, float(value))
        return self.metrics.text()

    async def stop_gracefully(self, seconds: float) -> None:
        """Take nothing new, let running requests end for at most `seconds`, then end the process."""
        self.stopping = True
        end = time.monotonic() + seconds
        while self.thread.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.stop_process()
