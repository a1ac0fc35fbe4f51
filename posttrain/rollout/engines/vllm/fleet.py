"""Several servers that serve one version: which of them are up, who gets the next prompt, and how one comes back.

One invariant, kept under one lock: a server is up only while it serves `fleet.target`. Everything else is done by the
thread that watches it: notice that it is gone, stopped, slow or forgetful; restart it (where it is ours) or wait for it;
send it the target again; and only then call it up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from posttrain.core.transport import ServerAnswer, ServerError, ServerGone, ServerRefused, ServerSlow
from posttrain.rollout.engines.protocol import Prompt
from posttrain.rollout.engines.vllm.balance import Balancer, Placed
from posttrain.rollout.engines.vllm.client import DRAIN, NOT_OFFERED, ServerInfo
from posttrain.rollout.engines.vllm.fleet_members import Member, Target
from posttrain.rollout.engines.vllm.kept_weights import BUCKET_BYTES, KeptWeights
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS
from posttrain.rollout.engines.vllm.transport import Deadlines, in_parallel
from posttrain.rollout.engines.vllm.weight_stream import VersionStream
from posttrain.serve.errors import Stopping

log = logging.getLogger(__name__)

T = TypeVar("T")

MISSES = 2
"""Questions in a row that are not answered in time before a server counts as down."""
RETRY_SECONDS = 0.5
FAILED_TRIES = 3
"""Starts, or refusals of weights, in a row that fail before a server counts as unrecoverable."""
CLOSE_SECONDS = 5.0
"""For cancelled calls to end, and their watchers with them."""
FIXED = ("vocabulary", "logprobs_mode", "context_length")
"""What a server says about itself that all of them must have in common, from the beginning to the end."""
FINAL = frozenset({NOT_OFFERED, 400, 401, 403, 405, 413})
"""Refusals that will be the same next time: the request or the token is wrong, not the moment."""
FINAL_AT_COMMIT = FINAL | {500, 504}
"""At a commit, too: the engine cannot load these weights, or running requests did not end in time."""


class Fleet:
    """Servers under watch, from `attach` to `close`."""

    def __init__(
        self,
        members: Sequence[Member],
        deadlines: Deadlines,
        watch_seconds: float = 1.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if not members:
            raise ValueError("Server mode needs at least one server.")
        names = [member.name for member in members]
        if len(set(names)) != len(names):
            raise ValueError(f"The servers {names} are not all different.")
        self.members, self.deadlines, self.bucket_bytes = list(members), deadlines, bucket_bytes
        self.target = Target(None, None)
        self.labels: dict[int, int] = {}  # version, as the servers count -> what the trainer calls it
        self.asleep = False
        self.recoveries = 0
        self.balancer = Balancer()  # used under the lock
        self._watch_seconds = watch_seconds
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._owner = os.getpid()
        # Servers are given version numbers of their own, higher than those of any run before: a server that was restarted by others
        # with the weights of its folder, or that another trainer has written to, cannot happen to have the right one.
        self._next_version = max(int(time.time()) - 1_700_000_000, 0) << 20
        self._watchers: list[threading.Thread] = []

    # beginning and end ----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Start or find all servers and learn what they serve; from then on they are watched."""
        for found in in_parallel(self._connect, self.members):
            if isinstance(found, Exception):
                self.close()
                raise found
        infos = [member.info for member in self.members]
        self._first = infos[0]
        try:
            self._refuse_if_different(infos)
        except ValueError:
            self.close()
            raise
        served = {(info.version, info.fingerprint) for info in infos}
        if len(served) == 1:
            self.target = Target(*served.pop())
        with self._changed:
            for member in self.members:
                member.is_up = self.target.is_served(member.info) and (self.target.version is not None)
        for member in self.members:
            self._start_watch(member)

    def _start_watch(self, member: Member) -> None:
        watcher = threading.Thread(target=self._watch, args=(member,), name=f"watch {member.name}", daemon=True)
        self._watchers = [one for one in self._watchers if one.is_alive()] + [watcher]
        watcher.start()

    def join(self, member: Member) -> None:
        """Its watcher feeds it the target and probes it; only then is it asked. It must be as the others are."""
        with self._changed:
            if self._closing.is_set() or any(one.name == member.name for one in self.members):
                return
            self.members = [*self.members, member]  # another list: threads walk through the one before
        log.info("The server %s joins.", member.name)
        self._start_watch(member)

    def leave(self, name: str) -> None:
        """It is asked for nothing new; what it writes is waited for."""
        with self._changed:
            gone = [member for member in self.members if member.name == name]
            self.members = [member for member in self.members if member.name != name]
            for member in gone:
                member.is_up = False
                member.wakeup.set()
            self._changed.notify_all()
        if gone:
            log.info("The server %s leaves.", name)

    def _connect(self, member: Member) -> None:
        if member.process is not None and not member.process.is_running:
            member.process.start()
            member.process.wait_until_healthy(self._closing)
        end = time.monotonic() + self.deadlines.start
        while True:
            try:
                member.info = member.client.info()
                return
            except (ServerGone, ServerSlow) as error:
                if time.monotonic() > end:
                    raise ServerGone(
                        f"{member.name} did not answer within {self.deadlines.start:g} s (`vllm_server_timeout`): {error}"
                    ) from error
            if self._closing.wait(RETRY_SECONDS):
                raise ServerGone(f"{member.name}: the trainer is closing.")

    @staticmethod
    def _refuse_if_different(infos: Sequence[ServerInfo]) -> None:
        for what in FIXED:
            values = [getattr(info, what) for info in infos]
            if len(set(values)) > 1:
                raise ValueError(f"The servers have different values of {what}: {values}. Start them alike.")

    def close(self) -> None:
        """End the watch and the processes that are ours; free the weights and their transports."""
        if os.getpid() != self._owner:  # the sockets of a forked child are the trainer's, too
            return
        self._closing.set()
        self._stop_watchers()
        for member in self.members:
            if member.process is not None:
                member.process.close()
            member.client.close()
        with self._changed:
            self.target = replace(self.target, kept=None)

    def _stop_watchers(self) -> None:
        """A watcher may be about to begin one more call, so calls are cancelled until all watchers have ended."""
        end = time.monotonic() + CLOSE_SECONDS
        left = [watcher for watcher in self._watchers if watcher is not threading.current_thread()]
        while True:
            for member in self.members:
                member.wakeup.set()
                member.client.cancel_calls("the trainer is closing.")
            left = [watcher for watcher in left if watcher.is_alive()]
            if not left or time.monotonic() > end:
                break
            left[0].join(0.05)
        for watcher in left:
            log.warning("%s did not end within %g s of the trainer's end.", watcher.name, CLOSE_SECONDS)

    # who is up ------------------------------------------------------------------------------------------------------

    def up(self) -> list[Member]:
        with self._changed:
            return [member for member in self.members if member.is_up]

    def take(self, prompt: Prompt, limit: int, most: int, waiting: int) -> tuple[Member, Target, Placed] | None:
        """The server for up to `limit` tokens after this prompt, and what it serves; None: none yet. `most` requests a server."""
        with self._changed:
            up = {member.name: member for member in self.members if member.is_up}
            free = [name for name in up if self.balancer.in_flight(name) < most]
            placed = self.balancer.place(prompt, limit, free, [*up], waiting, time.monotonic()) if free else None
            return None if placed is None else (up[placed.server], self.target, placed)

    def in_flight(self, member: Member) -> int:
        with self._changed:
            return self.balancer.in_flight(member.name)

    def release(self, placed: Placed, length: int | None) -> None:
        """`length`: tokens of the completion; None: it did not come."""
        with self._changed:
            self.balancer.finished(placed, length, time.monotonic())

    def report(self, member: Member, why: str | Exception, hangs: bool = False) -> None:
        """This server is not used until its watcher has recovered it. One that stops ends what it has, or hands it back."""
        stops = isinstance(why, ServerRefused) and why.kind == Stopping.__name__
        with self._changed:
            if not member.is_up or self._closing.is_set():
                return
            member.is_up, member.why, member.hangs, member.down_since = False, str(why), hangs, time.monotonic()
            member.stops = stops
            self._changed.notify_all()
        log.warning("The server %s is down: %s", member.name, why)
        if not stops:
            member.client.cancel_calls(str(why))
        member.wakeup.set()

    def raise_if_unrecoverable(self) -> None:
        """Raise where no server is up and none can be expected back."""
        if self._closing.is_set():  # the watch has ended: no server will be brought back
            raise ServerGone("The servers were closed by this trainer while it still waited for them.")
        with self._changed:
            if any(member.is_up for member in self.members):
                return
            if all(member.unrecoverable for member in self.members):
                raise self.members[0].unrecoverable
            since = max(member.down_since for member in self.members)
            if time.monotonic() - since > self.deadlines.back:
                reasons = " ".join(f"{member.name}: {member.why}" for member in self.members)
                raise ServerGone(f"No server has been up for {self.deadlines.back:g} s. {reasons}")

    def wait_until_up(self) -> None:
        """Until at least one server serves the target."""
        with self._changed:
            while not any(member.is_up for member in self.members):
                self.raise_if_unrecoverable()
                self._changed.wait(0.2)

    # watching -------------------------------------------------------------------------------------------------------

    def _watch(self, member: Member) -> None:
        while not self._closing.is_set():
            if member not in self.members:
                if not self.in_flight(member):
                    break
                self._closing.wait(RETRY_SECONDS)
                continue
            if not member.is_up and self.target.version is not None:
                self._try_to_recover(member)
                continue
            member.wakeup.wait(self._watch_seconds)  # without a target there is nothing yet that it could be given
            member.wakeup.clear()
            try:
                self._check_health(member)
            except Exception as error:  # the watcher must live: without it a server that is down would never come back
                log.exception("The health check of %s failed.", member.name)
                self.report(member, f"it cannot be asked ({type(error).__name__}: {error}).")
        if member not in self.members:
            member.client.close()

    def _check_health(self, member: Member) -> None:
        for missed in range(MISSES):
            if not member.is_up or self._closing.is_set():
                return
            try:
                member.client.health()
                return
            except ServerGone as error:
                self.report(member, str(error))
            except ServerRefused as error:
                self.report(member, error, hangs=error.status == 503)
            except (ServerSlow, ServerAnswer) as error:
                if missed + 1 == MISSES:
                    self.report(member, f"{MISSES} health checks were not answered: {error}", hangs=True)

    def _try_to_recover(self, member: Member) -> None:
        if member.stops and self.in_flight(member):  # each of these is answered by the server, or ends with it
            self._closing.wait(RETRY_SECONDS)
            return
        member.stops = False
        member.client.cancel_calls(member.why)  # a call may have begun just before the server was known to be down
        try:
            self._ensure_process(member)
            with member.weights:
                self._send_target(member)
            return
        except ServerError as error:
            self._note_failure(member, error)
        except Exception as error:  # as above
            log.exception("Bringing back %s failed.", member.name)
            sentence = f"{member.name} cannot be brought back ({type(error).__name__}: {error})."
            self._note_failure(member, ServerError(sentence))
        self._closing.wait(RETRY_SECONDS * 2 ** min(member.failed_starts, 6))

    def _note_failure(self, member: Member, error: ServerError) -> None:
        if self._closing.is_set():
            return
        refused = isinstance(error, ServerRefused)
        member.refusals = member.refusals + 1 if refused and error.status in FINAL_AT_COMMIT else 0
        unrecoverable = (
            (refused and error.status in FINAL)
            or max(member.refusals, member.failed_starts) >= FAILED_TRIES
            or type(error) is ServerError
        )
        turns_away = unrecoverable and member.info is None  # it joins, and would be refused again and again
        with self._changed:
            if turns_away:
                self.members = [one for one in self.members if one is not member]
                log.warning(
                    "The server %s cannot join, and is not asked again before its entry is taken out and put back: %s",
                    member.name,
                    error,
                )
            elif str(error) != member.why:
                log.warning("The server %s is not back yet: %s", member.name, error)
            member.why = str(error)
            member.unrecoverable = error if unrecoverable else member.unrecoverable
            self._changed.notify_all()

    def _ensure_process(self, member: Member) -> None:
        """Until the process answers."""
        process = member.process
        if process is None:
            member.client.health()
            return
        if process.is_running and not member.hangs:
            try:
                member.client.health()
                return
            except ServerError as error:
                member.why = str(error)
        log.warning("Restarting the server %s: %s", member.name, member.why)
        try:
            process.restart(self._closing)
        except ServerError:
            member.failed_starts += 1
            raise
        member.failed_starts, member.hangs = 0, False

    def _send_target(self, member: Member) -> None:
        """Send it the target until it serves the target, and mark it as up."""
        while not self._closing.is_set():
            target = self.target
            info = member.client.info()
            self._refuse_if_changed(member, info)
            if target.version is None:
                return
            if not target.is_served(info):
                self._send_again(member, target, info)
                info = member.client.info()
            if not target.is_served(info) or (info.not_ready and not self.asleep):
                raise ServerGone(
                    f"{member.name} does not serve version {target.version}: {info.not_ready or info.version}"
                )
            self._refuse_if_it_computes_otherwise(member, target)
            with self._changed:
                if self.target is not target:
                    continue  # the trainer has moved on meanwhile
                if member not in self.members:
                    return
                member.info, member.is_up, member.unrecoverable, member.hangs = info, True, None, False
                member.refusals = 0
                member.wakeup.clear()
                self.recoveries += 1
                self._changed.notify_all()
            log.info("The server %s is up with version %s.", member.name, target.version)
            return

    def _refuse_if_changed(self, member: Member, info: ServerInfo) -> None:
        """The trainer has planned with what its servers were at the start; one may be restarted with other options, or join."""
        known = member.info or self._first
        for what in FIXED:
            before, now = getattr(known, what), getattr(info, what)
            if before != now:
                raise ServerRefused(
                    f"{member.name} was {'restarted' if member.info else 'added'} with {what} {now}; this run began with {before}. "
                    "Start it as it was before.",
                    400,
                )
        if info.images < known.images:
            raise ServerRefused(f"{member.name} has --images {info.images}; this run began with {known.images}.", 400)

    def _refuse_if_it_computes_otherwise(self, member: Member, target: Target) -> None:
        """Against what the others said of the same tokens, where they have been asked (`remember_scores`)."""
        if target.probe is None:
            return
        sequences, wanted = target.probe
        scored = member.client.score(sequences, target.version)
        apart = np.abs(np.concatenate(scored) - np.concatenate(wanted))
        bound = BOUNDS.get(getattr(torch, member.client.info().dtype or "", None), BOUNDS[torch.bfloat16])
        if not apart.mean() <= bound:
            raise ServerRefused(
                f"{member.name} was sent version {target.version} and its log-probs differ from those of the other servers by "
                f"{apart.mean():.3g} on average; {bound:g} would be rounding.",
                500,
            )

    def remember_scores(self, sequences: Sequence[Sequence[int]], scores: Sequence[np.ndarray], version: int) -> None:
        """What servers say of these tokens; one that comes back or joins must say the same."""
        with self._changed:
            if self.target.version == version:
                self.target.probe = (sequences, scores)

    def _send_again(self, member: Member, target: Target, info: ServerInfo) -> None:
        kept = target.kept
        if kept is None:
            state = info.not_ready or "ready"
            found = f"{member.name} serves version {info.version} ({state}) instead of {target.version}"
            if target.follows:
                raise ServerGone(f"{found}; the process that sends the weights has to send them again.")
            if target.specs or member.info is None:  # one that joins before the first update waits for it
                raise ServerGone(f"{found}; the weights are not in host memory, or not yet, to be sent again.")
            raise ServerRefused(f"{found}, and this trainer has sent none that it could send again.", 400)
        member.client.refuse_if_not_offered(kept, info)
        log.info("Sending version %s to %s again (%.1f MB).", target.version, member.name, kept.nbytes / 1e6)
        member.client.stage(kept, target.version, self._bucket(info))
        member.client.commit(kept, target.version, DRAIN)

    def _bucket(self, info: ServerInfo) -> int:
        return min(self.bucket_bytes, info.part_bytes // 2)  # a header comes on top

    # weights --------------------------------------------------------------------------------------------------------

    def load(self, kept: KeptWeights, label: int, in_flight: str = DRAIN) -> Target:
        """Two-phase on all servers that are up: stage on each, then commit on each. The others get it when they are back.

        Where it raises, the version before is the target still: servers that had committed are sent it again.
        """
        self._next_version += 1
        before = self.target
        self.labels[self._next_version] = label  # before anything is written with it
        target = Target(self._next_version, kept.fingerprint, label, kept, specs=kept.specs)
        members = self._recipients()
        with ExitStack() as held:
            for member in members:  # a watcher that finds one of these down waits until this is over
                held.enter_context(member.weights)
                member.client.refuse_if_not_offered(kept, member.info)
            staged = self._all(
                members, lambda one: one.client.stage(kept, target.version, self._bucket(one.info)), FINAL, target
            )
            committed = self._all(
                staged, lambda one: one.client.commit(kept, target.version, in_flight), FINAL_AT_COMMIT, target
            )
            self._set_target(target, committed)
        try:
            self.wait_until_up()
        except ServerError:
            self._set_target(before, [])
            raise
        return target

    def label_of(self, version: int) -> int:
        """What the trainer calls a version that a server wrote with. Of one that another process of this run has just sent, this
        one hears in a moment."""
        with self._changed:
            known = self._changed.wait_for(lambda: version in self.labels, self.deadlines.commit)
        if not known:
            raise ServerError(f"A server wrote with version {version} of the weights, which this trainer has not sent.")
        return self.labels[version]

    def can_stream(self, device: torch.device) -> bool:
        """Whether weights there can go straight into the engines of all servers that are up."""
        members = self._recipients()
        return bool(members) and all(member.client.can_stream(device) for member in members)

    def stream(
        self, read: Callable[[VersionStream], KeptWeights | None], device: torch.device, label: int, in_flight: str
    ) -> tuple[VersionStream, KeptWeights | None]:
        """A version straight into the engines of all servers that are up, as `read` reads it through the stream.

        Where `read` raises, the stream is aborted. Where the stream ends with an error, the target is still the version before, and
        no server can be counted on to serve it: the caller stages the version instead.
        """
        self._next_version += 1
        self.labels[self._next_version] = label
        members = self._recipients()
        with ExitStack() as held:
            for member in members:
                held.enter_context(member.weights)
            stream = VersionStream([member.client for member in members], device, self._next_version, in_flight)
            try:
                kept = read(stream)
            except BaseException as error:  # the export failed, or was interrupted
                stream.abort(error)
                raise
            stream.commit()
            if stream.error is None:
                specs = tuple(stream.specs)
                self._set_target(Target(stream.version, stream.fingerprint, label, kept, specs=specs), members)
        return stream, kept

    def _recipients(self) -> list[Member]:
        """Those that a new version goes to at once."""
        return self.up() or (self._reachable() if self.target.version is None else [])

    def _reachable(self) -> list[Member]:
        """Before the first version no server is up; those that answer, as they did before, can take it."""

        def ask(member: Member) -> Member:
            self._refuse_if_changed(member, member.client.info())
            return member

        found = in_parallel(ask, self.members)
        return [one for one in found if isinstance(one, Member)]

    def _all(
        self, members: Sequence[Member], act: Callable[[Member], None], final: frozenset[int], target: Target
    ) -> list[Member]:
        """Those for which it worked. A final refusal by one of them ends the update for all."""
        outcomes = in_parallel(act, members)
        done = [member for member, outcome in zip(members, outcomes) if not isinstance(outcome, Exception)]
        failures = [(member, outcome) for member, outcome in zip(members, outcomes) if isinstance(outcome, Exception)]
        for member, error in failures:
            refused = isinstance(error, ServerRefused) and error.status in final
            if refused or not isinstance(error, ServerError):
                self._roll_back(members, target)
                raise error
            self.report(member, error)
        return done

    def _roll_back(self, members: Sequence[Member], target: Target) -> None:
        """Drop what was staged. Where it was committed already, the watcher finds another version than the target's."""
        in_parallel(lambda member: member.client.abort(target.version), members)
        for member in members:
            self.report(member, f"the update to version {target.version} failed; going back to {self.target.version}.")

    def _set_target(self, target: Target, served_by: Sequence[Member]) -> None:
        with self._changed:
            first, self.target = self.target.version is None, target  # before the first version no server counts as up
            self.balancer.forget()  # what was cached is gone with the weights
            for member in self.members:
                if member in served_by and (member.is_up or first):
                    member.is_up = True
                    continue
                if member.is_up:
                    member.why = f"it has yet to be given version {target.version}."
                self._clear_failures(member)
            self._changed.notify_all()

    @staticmethod
    def _clear_failures(member: Member) -> None:
        """It is to be brought to a new target: what was wrong with the old one does not count, and its time begins."""
        member.is_up, member.unrecoverable, member.down_since = False, None, time.monotonic()
        member.wakeup.set()

    def follow(self, target: Target) -> None:
        """Wait until the servers serve what another process of this run has sent."""
        with self._changed:
            self.target = Target(target.version, target.fingerprint, target.label, follows=True)
            self.balancer.forget()
            self.labels[target.version] = target.label
            for member in self.members:
                member.why = f"it was not seen with version {target.version} yet."
                self._clear_failures(member)
        self.wait_until_up()

    # sleep ----------------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        self.asleep = True
        for member, why_not in self.ask_up(lambda member, version: member.client.sleep(level)):
            if why_not is not None:
                log.warning("%s does not sleep: %s", member.name, why_not)

    def wake(self) -> None:
        self.asleep = False
        for member, info in self.ask_up(lambda member, version: (member.client.wake(), member.client.info())[1]):
            if not self.target.is_served(info):
                self.report(member, "it woke up without its weights.")
        if self.target.version is not None:
            self.wait_until_up()

    def ask_up(self, ask: Callable[[Member, int | None], T]) -> list[tuple[Member, T]]:
        """What each server that is up answers; one that does not is reported to its watcher, and left out."""
        members, version = self.up(), self.target.version
        answers = []
        for member, answer in zip(members, in_parallel(lambda member: ask(member, version), members)):
            if isinstance(answer, ServerRefused) and answer.status in FINAL:
                raise answer
            if isinstance(answer, ServerError):
                self.report(member, answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                answers.append((member, answer))
        return answers
