"""Everything that a running server is made of, without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from .engine.engine_thread import EngineThread
from .engine.protocol import Engine
from .engine.versions import Serving, Versions
from .errors import Conflict, FieldError, Stopping
from .recent import Recent
from .weights.adapters import Adapters
from .weights.transports import Transports
from .weights.update import UpdateLimits, Updater
from .wire.images import MAX_IMAGE_BYTES
from .wire.payload import CHECKSUMS

PROTOCOL = 3
ENGINE_FACTS = (
    "model",
    "engine",
    "device",
    "dtype",
    "context_length",
    "vocabulary",
    "logprobs_mode",
    "world_size",
    "images",
)
"""Fields of EngineInfo that /info has as they are."""
HAND_BACK_SECONDS = 2.0
"""For the answers to requests that are ended by a stop."""
PARTS_AT_ONCE = 8
"""Parts of weights whose bodies are held side by side."""


@dataclass(frozen=True)
class ServerOptions:
    initial_version: int | None = 0  # None: the engine has no weights yet (a model loaded with random numbers)
    adapter_folder: Path | None = None
    shared_folder: Path | None = None  # in which trainers of this machine leave weights
    update: UpdateLimits = field(default_factory=UpdateLimits)
    most_json_bytes: int = 64 << 20
    most_part_bytes: int = 272 << 20
    most_bodies_bytes: int = 4 << 30  # of all requests that are under way; the parts that come at once must fit
    most_image_bytes: int = MAX_IMAGE_BYTES  # of one
    most_images_bytes: int = 2 << 30  # of all that are kept for prompts to name; the least recently used are dropped
    most_images: int = 10_000
    most_in_flight: int = 4096
    most_seconds: float = 3600.0  # of one request
    stalled_seconds: float = 300.0  # without a step of the engine: no longer healthy
    stop_seconds: float = 30.0


class RolloutServer:
    """Engine, versions, updates, adapters and the cache of answers, put together."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.options = options
        empty = Serving(None, reason="the model was started without weights and none were sent yet.")
        self.versions = Versions(empty if options.initial_version is None else Serving(options.initial_version))
        self.engine = engine
        self.thread = EngineThread(engine, self.versions, options.most_in_flight)
        self.adapters = Adapters(self.versions, options.adapter_folder, self.thread.adapters_in_use)
        self.updater = Updater(engine, self.versions, self.thread, self.adapters.install, options.update)
        self.transports = Transports(options.shared_folder, options.most_part_bytes)
        self.requests = RequestCache()
        self.images: Recent[str, bytes] = Recent(options.most_images_bytes, options.most_images)
        self.metrics = Metrics(self)
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

    def unhealthy_reason(self) -> str | None:
        """Why the process is not healthy."""
        if self.thread.failure:
            return f"The engine is down: {self.thread.failure}"
        silent = self.thread.silent_seconds
        if silent > self.options.stalled_seconds:
            return f"The engine has not moved for {silent:.0f} s."
        return None

    def why_not_ready(self) -> str | None:
        """Why requests would be refused now."""
        if reason := self.unhealthy_reason():
            return reason
        if self.stopping:
            return "The server is stopping."
        if self.thread.sleeping:
            return self.thread.sleeping
        serving = self.versions.serving
        return None if serving.version is not None else f"No whole version of the weights is loaded: {serving.reason}"

    def refuse_if_stopping(self) -> None:
        if self.stopping:
            raise Stopping("The server is stopping.")

    def refuse_images(self, count: int) -> None:
        """Where this engine is not shown so many in a prompt."""
        most = self.engine.info.images
        if not most:
            raise FieldError("This server is shown no images: start it with --images N, the most in a prompt.")
        if count > most:
            raise FieldError(f"A prompt has {count} images; this server was started with --images {most}.")

    def info(self) -> dict[str, Any]:
        info, serving, options = self.engine.info, self.versions.serving, self.options
        return {
            "protocol": PROTOCOL,
            **{name: getattr(info, name) for name in ENGINE_FACTS},
            "capabilities": info.capabilities
            | {"adapters": bool(info.capabilities.get("adapters") and options.adapter_folder)},
            "notes": [*info.notes, *self.adapters.notes],
            "version": serving.version,
            "fingerprint": serving.fingerprint,
            "adapter": serving.adapter.name if serving.adapter else None,
            "not_ready": self.why_not_ready(),
            "update": self.updater.state(),
            "checksums": sorted(CHECKSUMS),
            "transports": self.transports.describe(),
            "limits": {
                "json_bytes": options.most_json_bytes,
                "part_bytes": options.most_part_bytes,
                "image_bytes": options.most_image_bytes,
                "in_flight": options.most_in_flight,
                "seconds": options.most_seconds,
                "update_bytes": options.update.total_bytes,
            },
            "in_flight": self.thread.in_flight,
        }

    async def stop_gracefully(self, seconds: float) -> None:
        """Take nothing new, let running requests end for at most `seconds`, hand back the rest, then end the process."""
        self.stopping = True
        for wait in (seconds, HAND_BACK_SECONDS):
            end = time.monotonic() + wait
            while self.thread.in_flight and time.monotonic() < end:
                await asyncio.sleep(0.05)
            if self.thread.in_flight:
                self.thread.abort_all("the server is stopping.")
        self.stop_process()


class Metrics(Collector):
    """What /metrics says: requests as they were counted, the rest as it is when asked for."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server
        self._requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self._seconds: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, route: str, status: int, seconds: float) -> None:
        """In the event loop only."""
        self._requests[route, str(status)] += 1
        self._seconds[route] += seconds

    def text(self) -> tuple[bytes, str]:
        """(the metrics, their content type)."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def describe(self) -> list[Any]:
        return []  # asked at registration, when the server is not whole yet

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        server = self._server
        requests = CounterMetricFamily(
            "posttrain_requests", "Requests by route and status.", labels=["route", "status"]
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        seconds = CounterMetricFamily(
            "posttrain_request_seconds", "Seconds spent on requests, by route.", labels=["route"]
        )
        for route, value in self._seconds.items():
            seconds.add_metric([route], value)
        yield from (requests, seconds)
        version, thread, updater = server.versions.serving.version, server.thread, server.updater
        for name, value, help_text in (
            ("generated_tokens", thread.tokens, "Tokens that were sampled."),
            ("joined_requests", server.requests.joined, "Requests sent again whose work was not done twice."),
            ("updates_committed", updater.committed, "Weight updates that were flipped to."),
            ("updates_failed", updater.failed, "Weight updates that were refused at the commit."),
        ):
            yield CounterMetricFamily(f"posttrain_{name}", help_text, value)
        for name, value, help_text in (
            ("in_flight", thread.in_flight, "Completions that wait or run."),
            ("serving_version", -1 if version is None else version, "Version of the weights that serve; -1 for none."),
            ("ready", server.why_not_ready() is None, "1 where requests are answered."),
            ("engine_silent_seconds", thread.silent_seconds, "Since the engine's thread last moved."),
            ("image_bytes", server.images.num_bytes, "Of the images that are kept for prompts to name."),
            ("uptime_seconds", time.monotonic() - server.started, "Since the start."),
        ):
            yield GaugeMetricFamily(f"posttrain_{name}", help_text, float(value))
        if (use := server.engine.cache_use) is not None:
            yield GaugeMetricFamily("posttrain_kv_used_share", "Share of the KV cache's pages in use.", use.used_share)
            yield CounterMetricFamily(
                "posttrain_preempted", "Running completions put back in the queue.", use.preempted
            )


@dataclass
class _Entry:
    digest: str
    task: asyncio.Task[bytes]


class RequestCache:
    """Answers of the latest requests. Used in the event loop only.

    Only successes are kept: where a request failed all of its work was ended, and sending it again is a new try.
    """

    def __init__(self, most_entries: int = 20_000, most_bytes: int = 512 << 20) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._most_entries, self._most_bytes = most_entries, most_bytes
        self._bytes = 0
        self.joined = 0

    async def run(self, request_id: str, digest: str, work: Callable[[], Awaitable[bytes]]) -> bytes:
        """The answer of `work()`, done once for this id. The work continues if this caller disconnects."""
        entry = self._entries.get(request_id)
        if entry is None:
            entry = _Entry(digest, asyncio.ensure_future(work()))
            self._entries[request_id] = entry
            entry.task.add_done_callback(lambda task: self._finished(request_id, task))
        elif entry.digest != digest:
            raise Conflict(f"The request id {request_id} was used before with another body.")
        else:
            self.joined += 1
        return await asyncio.shield(entry.task)

    def _finished(self, request_id: str, task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            del self._entries[request_id]
            return
        self._bytes += len(task.result())
        finished = [key for key, entry in self._entries.items() if entry.task.done()] if self._is_full() else []
        for key in finished:
            if not self._is_full():
                return
            self._bytes -= len(self._entries.pop(key).task.result())

    def _is_full(self) -> bool:
        return len(self._entries) > self._most_entries or self._bytes > self._most_bytes
