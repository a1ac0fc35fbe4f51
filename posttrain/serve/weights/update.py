"""A weight update in two phases: stage and verify beside the weights that serve, then flip in one step.

Until the flip nothing of the engine is touched, so an update that is interrupted, wrong or forgotten costs memory only.
If the engine itself refuses the new weights half way, the old ones are loaded again before the next request runs.

Or in one, where the weights come from another GPU (`stream`): each part is verified and goes straight into the engine. An update
that ends half way then leaves no whole version, unless the old one is in host memory; requests are refused until one comes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..bodies import StreamPart
from ..engine.engine_thread import KEEP
from ..engine.protocol import Engine
from ..engine.versions import Phase, Serving, Versions
from ..errors import (
    Conflict,
    DeadlinePassed,
    EngineFailed,
    NotFound,
    PayloadError,
    ServeError,
    TooLarge,
    TransportFailed,
)
from ..wire.collective import in_background
from ..wire.host_memory import HostMemory
from ..wire.payload import ITEM_BYTES, Buffer, Manifest, TensorSpec, fingerprint
from .staging import PartHead, Staging, parse_head
from .stream import WeightStream

log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]
STREAM_IDLE_SECONDS = 60.0
"""Between two parts that go straight into the engine, at most: it does nothing else meanwhile."""


class Flips(Protocol):
    """Runs something in the engine's thread, with no request in between (`EngineThread`)."""

    def flip(self, swap: Callable[[Engine], None], version: int, in_flight: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class UpdateLimits:
    total_bytes: int = 1 << 40  # of one version in host memory
    idle_seconds: float = 600.0  # an update that is silent for longer is dropped
    keep_loaded: bool = True  # hold the version that serves in host memory, to put it back if a flip fails


@dataclass
class _Update:
    staging: Staging
    last_seen: float
    adapter: dict[str, Any] | None  # its adapter_config, where the tensors are those of a LoRA adapter


InstallAdapter = Callable[[Engine, int, dict[str, Any], Weights, str], None]
"""(engine, version, adapter_config, tensors, fingerprint): write and load an adapter, and let it serve."""


class Updater:
    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        flips: Flips,
        install_adapter: InstallAdapter,
        limits: UpdateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._versions, self._flips, self._install_adapter = versions, flips, install_adapter
        self._limits, self._clock = limits or UpdateLimits(), clock
        self._memory = HostMemory(keeps=self._limits.keep_loaded)
        self._lock = threading.Lock()  # of `_update`; never held while the engine works
        self._update: _Update | None = None
        self._stream: WeightStream | None = None  # the latest
        self._known = engine.known_tensors()
        self._optional = engine.optional_tensors()
        self._loaded: Callable[[], Weights | None] = engine.initial_weights
        self.committed = 0
        self.failed = 0

    # begin ----------------------------------------------------------------------------------------------------------

    def begin(
        self, manifest: Manifest, replace: bool, rollback: bool, adapter: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Announce a version. The same announcement twice is one update; another one needs `replace`."""
        if replace:
            self._cancel_stream("Another update takes its place.")
        with self._lock:
            self._drop_if_stale()
            if self._update and self._update.staging.manifest == manifest and self._update.adapter == adapter:
                return self._state(self._update)
            self._check_version(manifest.version, rollback)
            self._check_tensors(manifest, adapter)
            self._replace_staged(replace)
            self._versions.move(Phase.STAGING)
            self._memory.renew()
            self._update = _Update(Staging(manifest, self._memory), self._clock(), adapter)
            return self._state(self._update)

    def _replace_staged(self, replace: bool) -> None:
        if self._update:
            if not replace or self._versions.phase is not Phase.STAGING:
                raise Conflict(
                    f"The update to version {self.staged_version} is {self._versions.phase}. Commit or abort it, or "
                    "begin with `replace` while it is staging."
                )
            self._drop()

    def _check_version(self, version: int, rollback: bool) -> None:
        serving = self._versions.serving.version
        if serving is not None and version <= serving and not rollback:
            raise Conflict(f"Version {serving} serves; version {version} is not newer. Set `rollback` to go back.")

    def _check_tensors(self, manifest: Manifest, adapter: dict[str, Any] | None) -> None:
        total = sum(spec.nbytes for spec in manifest.tensors)
        if total > self._limits.total_bytes:
            raise TooLarge(f"The version has {total} bytes; this server stages at most {self._limits.total_bytes}.")
        if adapter is not None or self._known is None:
            return
        names = {spec.name: spec for spec in manifest.tensors}
        if missing := sorted(set(self._known) - set(names) - self._optional):
            raise PayloadError(f"{missing[0]} is missing from the manifest, with {len(missing) - 1} others.")
        if unknown := sorted(set(names) - set(self._known) - self._optional):
            raise PayloadError(
                f"The model has no tensor {unknown[0]} ({len(unknown)} names of the manifest are unknown)."
            )
        for spec in manifest.tensors:
            self._check_tensor(spec)

    def _check_tensor(self, sent: TensorSpec) -> None:
        known = (self._known or {}).get(sent.name, sent)
        if sent.shape != known.shape or (known.dtype in ITEM_BYTES and _is_float(sent) != _is_float(known)):
            raise PayloadError(
                f"{sent.name} is {known.dtype} {list(known.shape)}; the manifest says {sent.dtype} {list(sent.shape)}."
            )

    # parts ----------------------------------------------------------------------------------------------------------

    def part(self, body: Buffer) -> dict[str, Any]:
        """Stage one payload. Hashing and copying happen outside of the lock, so parts can come side by side."""
        head, data = parse_head(body)
        return self._stage(head, data)

    def fetched(self, body: Buffer, fetch: Callable[[int], Buffer]) -> dict[str, Any]:
        """Stage a part of which the body has the head alone. `fetch(number of bytes)` gets the data, once it is known that
        it is wanted; a part that is here already (its answer was lost) is not fetched again.
        """
        head, rest = parse_head(body)
        if len(rest):
            raise PayloadError(f"The head of the part is followed by {len(rest)} bytes.")
        update = self._current(head.version)
        if update.staging.received.get(head.part) == head.digest:
            return self._state(update)
        return self._stage(head, fetch(head.nbytes))

    def _stage(self, head: PartHead, data: Buffer) -> dict[str, Any]:
        part = head.with_data(data)
        update = self._current(head.version)
        update.staging.add(part, head.digest)
        update.last_seen = self._clock()
        return self._state(update)

    def _current(self, version: int) -> _Update:
        with self._lock:
            self._drop_if_stale()
            if self._update is None or self._update.staging.manifest.version != version:
                raise NotFound(f"No update to version {version} was begun, or it was dropped since.")
            if self._versions.phase is not Phase.STAGING:
                raise Conflict(f"The update to version {version} is {self._versions.phase}.")
            return self._update

    # commit ---------------------------------------------------------------------------------------------------------

    def commit(self, version: int, in_flight: str, seconds: float) -> dict[str, Any]:
        """Verify everything, then flip. Committing the version that serves is a success without effect."""
        if self._stream is not None and self._stream.version == version:
            return self._end_of_stream(self._stream, seconds)
        if self._update is None and self._versions.serving.version == version and self.committed:
            return self.state()
        update = self._current(version)
        self._versions.move(Phase.VERIFYING)
        try:
            update.staging.verify()
        except Conflict:  # parts are missing: they may still come
            self._versions.move(Phase.STAGING)
            raise
        except ServeError:
            self._end(failed=True)
            raise
        self._versions.move(Phase.FLIPPING)
        in_flight = in_flight if update.adapter is None else KEEP
        try:
            self._flips.flip(lambda engine: self._swap(engine, update), version, in_flight, seconds)
        except DeadlinePassed:
            if self._versions.phase is Phase.FLIPPING:  # never started: running requests did not end in time
                self._versions.move(Phase.STAGING)
                update.last_seen = self._clock()
            raise
        except ServeError:
            self._end(failed=True)
            raise
        except Exception as error:  # not foreseen (a full disk, say); the phase must not stay where it is
            self._end(failed=True)
            raise EngineFailed(
                f"The flip failed ({type(error).__name__}: {error}). {self._serving_sentence()}"
            ) from error
        self._end(failed=False)
        return self.state()

    def _swap(self, engine: Engine, update: _Update) -> None:
        """In the engine's thread, between two steps."""
        staging, manifest = update.staging, update.staging.manifest
        if update.adapter is not None:
            digest = fingerprint(manifest.tensors)
            self._install_adapter(engine, manifest.version, update.adapter, staging.tensors(), digest)
            return
        try:
            engine.load_weights(staging.tensors())
        except Exception as error:
            self._restore(engine, error, self._versions.serving)
            raise self._refused(manifest.version, error) from error
        self._set_serving(manifest)
        self._loaded = staging.tensors if self._limits.keep_loaded else _no_tensors

    def _set_serving(self, manifest: Manifest) -> None:
        self._versions.serve(Serving(manifest.version, fingerprint(manifest.tensors)))
        if self._known is None:  # a model without weights in its folder: the first version says what a whole one is
            self._known = {spec.name: spec for spec in manifest.tensors}

    def _refused(self, version: int, error: Exception) -> EngineFailed:
        return EngineFailed(
            f"The engine refused version {version} ({type(error).__name__}: {error}). {self._serving_sentence()}"
        )

    def _restore(self, engine: Engine, cause: Exception, before: Serving) -> None:
        self._versions.move(Phase.RESTORING)
        old = self._loaded()
        if old is None:
            self._versions.invalidate(
                f"an update failed half way ({type(cause).__name__}: {cause}) and the old weights were not kept."
            )
            return
        try:
            engine.load_weights(old)
            self._versions.serve(before)
        except Exception as error:  # the engine can do anything here; what matters is that nothing serves afterwards
            log.exception("The old weights could not be put back.")
            self._versions.invalidate(f"an update failed half way and putting the old weights back failed ({error}).")

    def _serving_sentence(self) -> str:
        serving = self._versions.serving
        return (
            f"No version serves: {serving.reason}" if serving.version is None else f"Version {serving.version} serves."
        )

    # straight into the engine ---------------------------------------------------------------------------------------

    def open_stream(self, version: int, rollback: bool, in_flight: str, seconds: float) -> dict[str, Any]:
        """Announce a version whose parts go into the engine as they arrive; `commit` waits for its end. An update that is
        under way, staged or streamed, is dropped."""
        self._cancel_stream("Another update takes its place.")
        with self._lock:
            self._drop_if_stale()
            self._check_version(version, rollback)
            self._replace_staged(replace=True)
            self._versions.move(Phase.STREAMING)
            stream = self._stream = WeightStream(version, min(self._limits.idle_seconds, STREAM_IDLE_SECONDS))
        in_background(lambda: self._run_stream(stream, in_flight, seconds), "weights")
        return self.state()

    def _run_stream(self, stream: WeightStream, in_flight: str, seconds: float) -> None:
        error: BaseException | None = None
        try:
            self._flips.flip(lambda engine: self._load_stream(engine, stream), stream.version, in_flight, seconds)
        except BaseException as raised:  # for the request that commits
            error = raised
        with self._lock:
            self.failed += error is not None
            self.committed += error is None
            self._versions.move(Phase.IDLE)
        if error is None:
            stream.outcome.set_result(None)
        else:
            stream.outcome.set_exception(error)

    def _load_stream(self, engine: Engine, stream: WeightStream) -> None:
        """In the engine's thread, which waits in it for the parts."""
        before = self._versions.serving
        self._versions.invalidate(f"version {stream.version} is on its way into the engine.")
        try:
            engine.load_weights(stream.tensors())
            manifest = Manifest(stream.version, 1, tuple(stream.specs.values()))
            self._check_tensors(manifest, None)
        except Exception as error:
            if stream.has_begun:
                self._restore(engine, error, before)
            else:
                self._versions.serve(before)
            if isinstance(error, ServeError):
                raise
            raise self._refused(stream.version, error) from error
        self._set_serving(manifest)
        self._loaded = _no_tensors

    def stream_part(self, part: StreamPart, receive: Callable[[int], Tensor]) -> dict[str, Any]:
        """`receive(number of bytes)` gets the data."""
        stream = self._stream
        if stream is None or stream.version != part.version or stream.outcome.done():
            raise NotFound(f"No stream of version {part.version} is open, or no longer.")
        for entry in part.tensors:
            self._check_tensor(entry.spec())
        stream.take(part.part, part.tensors, part.last, receive, part.deadline_s)
        return self.state()

    def _cancel_stream(self, why: str) -> None:
        """It has ended when this returns, unless the engine hangs."""
        stream = self._stream
        if stream is not None and not stream.outcome.done():
            stream.cancel(TransportFailed(f"Version {stream.version} was given up. {why}"))
            wait([stream.outcome], STREAM_IDLE_SECONDS)

    def _end_of_stream(self, stream: WeightStream, seconds: float) -> dict[str, Any]:
        try:
            stream.outcome.result(seconds)
        except TimeoutError as error:
            if not stream.outcome.done():
                raise DeadlinePassed(f"Version {stream.version} was not loaded within {seconds:g} s.") from error
            raise
        return self.state()

    # end ------------------------------------------------------------------------------------------------------------

    def abort(self, version: int, reason: str = "") -> dict[str, Any]:
        """Drop the update to this version, if there is one. One that goes into the engine has ended when this returns."""
        if self._stream is not None and self._stream.version == version:
            self._cancel_stream(f"The trainer gave it up: {reason}" if reason else "The trainer gave it up.")
        with self._lock:
            if self._update and self._update.staging.manifest.version == version:
                if self._versions.phase is not Phase.STAGING:
                    raise Conflict(
                        f"The update to version {version} is {self._versions.phase} and can no longer be dropped."
                    )
                self._drop()
        return self.state()

    def _end(self, failed: bool) -> None:
        with self._lock:
            self.failed += failed
            self.committed += not failed
            self._drop()

    def _drop(self) -> None:
        self._update = None
        self._versions.move(Phase.IDLE)

    def _drop_if_stale(self) -> None:
        if self._update and self._versions.phase is Phase.STAGING:
            silent = self._clock() - self._update.last_seen
            if silent > self._limits.idle_seconds:
                log.warning("The update to version %s is dropped: silent for %.0f s.", self.staged_version, silent)
                self._drop()

    def tick(self) -> None:
        """Drop an update that was forgotten; called now and then."""
        with self._lock:
            self._drop_if_stale()

    @property
    def staged_version(self) -> int | None:
        update = self._update
        return update.staging.manifest.version if update else None

    def _state(self, update: _Update) -> dict[str, Any]:
        missing = update.staging.missing_parts()
        return {
            "phase": str(self._versions.phase),
            "staged_version": update.staging.manifest.version,
            "parts": update.staging.manifest.parts,
            "missing": len(missing),
            "first_missing": missing[:100],
            "serving_version": self._versions.serving.version,
        }

    def state(self) -> dict[str, Any]:
        if update := self._update:
            return self._state(update)
        serving = self._versions.serving
        return {
            "phase": str(self._versions.phase),
            "serving_version": serving.version,
            "fingerprint": serving.fingerprint,
        }


def _is_float(spec: TensorSpec) -> bool:
    return "float" in spec.dtype


def _no_tensors() -> Iterator[tuple[str, Tensor]] | None:
    return None
