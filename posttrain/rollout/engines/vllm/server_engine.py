"""Rollouts by vLLM in other processes: `ServedVLLM` is an engine over one or several servers.

Every prompt that is added comes back exactly once. All that is known about a prompt belongs to the caller's thread; the
threads that wait for servers only hand over what came, and a prompt whose server went away is sent again, to whichever
server is up. Its seed depends on the prompt alone, so it does not matter which one writes it.
"""

from __future__ import annotations

import logging
import math
import queue
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posttrain.core.transport import ServerError, ServerRefused, ServerSlow
from posttrain.rollout.engines.protocol import ERROR as ENDED_BY_ERROR
from posttrain.rollout.engines.protocol import Completion, Prompt, SamplingParams
from posttrain.rollout.engines.request import Request, request_or_error
from posttrain.rollout.engines.vllm.balance import Placed
from posttrain.rollout.engines.vllm.client import (
    ABORT,
    ABORTED,
    CONTINUE,
    DRAIN,
    NOT_OFFERED,
    GenerateRequest,
    ServerCompletion,
)
from posttrain.rollout.engines.vllm.fleet import Fleet
from posttrain.rollout.engines.vllm.fleet_members import AnyClient, Member, Target
from posttrain.rollout.engines.vllm.kept_weights import BUCKET_BYTES, KeptWeights, common_checksum, spec_of
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from posttrain.rollout.engines.vllm.params import completion_logps, refuse_unknown_to_vllm, request_seed
from posttrain.rollout.engines.vllm.pictures import Pictures, placeholder_in, placeholder_sentence
from posttrain.rollout.engines.vllm.roster import Connect, Roster
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.weight_stream import VersionStream
from posttrain.serve.wire import block_sums
from posttrain.serve.wire.collective import in_background
from posttrain.serve.wire.host_memory import HostMemory

log = logging.getLogger(__name__)

PER_SERVER = 256
MAX_TRIES = 20
POLL_SECONDS = 0.1
BUSY_SECONDS = 0.2
LOOK_AHEAD = 16
"""Prompts that wait and are tried, where the first has to wait for a server that is full."""
MAX_PAUSE_SECONDS = 5.0

Weights = Iterable[tuple[str, Tensor]]
Export = Callable[[], Weights]
AdapterExport = Callable[[], tuple[dict[str, Any], Weights]]


@dataclass(frozen=True)
class ServedOptions:
    """What a user may set about server mode."""

    deadlines: Deadlines = Deadlines()
    per_server: int = PER_SERVER  # completions in flight at one server
    watch_seconds: float = 1.0  # between two looks at a server that is up
    bucket_bytes: int = BUCKET_BYTES  # of one part of the weights
    servers_file: Path | None = None  # addresses of servers that join while the run lasts
    sleep_level: int = 0  # 0: servers have GPUs of their own and stay awake while the trainer works


class ServedVLLM:
    """Completes prompts with servers.

    `servers`: clients of servers that run, or `ServerProcess`es that are this trainer's own. `export` gives the weights
    when `load_weights(None, version)` is called; `adapter_export` (config, tensors) instead where only the adapter travels.
    """

    is_foreign: ClassVar[bool] = True  # another program than the trainer: its log-probs are not quite the trainer's

    def __init__(
        self,
        servers: Sequence[AnyClient | ServerProcess],
        export: Export | None = None,
        adapter_export: AdapterExport | None = None,
        vocabulary: int | None = None,
        options: ServedOptions | None = None,
        pictures: Pictures | None = None,
        connect: Connect | None = None,
    ) -> None:
        """`connect`: makes the client of an address in `servers_file`."""
        self.show(pictures)
        self.options = options or ServedOptions()
        self._export, self._adapter_export = export, adapter_export
        members = [Member(s.client, s) if isinstance(s, ServerProcess) else Member(s) for s in servers]
        self.fleet = Fleet(members, self.options.deadlines, self.options.watch_seconds, self.options.bucket_bytes)
        self.fleet.attach()
        file = self.options.servers_file
        self._roster = Roster(file, self.fleet, connect) if file is not None and connect is not None else None
        if self._roster is not None:
            self._roster.start()
        # An engine that is no longer referenced must not send its weights over those of a later one. In a thread, because garbage
        # may be collected in any, at any moment, with any of the locks held that closing needs.
        self._when_dropped = weakref.finalize(
            self, in_background, partial(_close, self.fleet, self._roster), "close servers"
        )
        self._when_dropped.atexit = False
        info = members[0].info
        self.context, self.logprobs_mode = info.context_length, info.logprobs_mode
        self.vocabulary = info.vocabulary or vocabulary or 1 << 31
        self._memory = HostMemory()  # of the versions that are kept
        self._copying: Future[None] | None = None
        self._is_repeatable = True
        self._abandoned = False
        self.labels_tokens = (
            False  # whether running completions continue with new weights, and say which token is whose
        )

    def show(self, pictures: Pictures | None) -> None:
        """From now on prompts may have images, which `pictures` opens; None: they are texts."""
        self.pictures = pictures
        self.forbidden = frozenset() if pictures is None else frozenset(pictures.family.forbidden_ids)

    def send(
        self, export: Export | None = None, adapter_export: AdapterExport | None = None, is_repeatable: bool = True
    ) -> None:
        """What `load_weights(None, version)` sends from now on; for those who ask the servers first what they take.

        `is_repeatable`: the export can be read a second time, in any thread (not where all processes gather the weights)."""
        self._export, self._adapter_export, self._is_repeatable = export, adapter_export, is_repeatable

    @property
    def version(self) -> int:
        """Of the weights that write, as the trainer counts."""
        return self.fleet.target.label

    @property
    def dtype(self) -> torch.dtype:
        """In which the servers compute, the coarsest of theirs; one that does not say is taken for bfloat16."""
        named = [getattr(torch, member.info.dtype or "", None) for member in self.fleet.members]
        return max((one if one in BOUNDS else torch.bfloat16 for one in named), key=BOUNDS.__getitem__)

    def close(self) -> None:
        """End the watch, and the server processes that are this trainer's own; free the weights."""
        self._when_dropped.detach()
        _close(self.fleet, self._roster)

    def __enter__(self) -> ServedVLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[ServedSession]:
        refuse_unknown_to_vllm(params)
        if self.fleet.target.version is None:
            raise RuntimeError(
                "The servers have no weights in common yet, so nothing can be written: call load_weights first."
            )
        if self.fleet.asleep:
            raise RuntimeError("The servers sleep: call wake() before prompts are added.")
        session = ServedSession(self, params)
        try:
            yield session
        finally:
            self._abandoned |= session.close() > 0

    # weights --------------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Weights | None, version: int) -> None:
        """Straight into the engines of all servers, where a transport allows it (`weight_senders`). Else staged on all, then
        committed on all; where it raises, all keep (or return to) the version before."""
        self._finish_copy()
        kept = None
        if weights is None and self._adapter_export is None:
            weights, device = _peeked(self._exported()[1])
            if self.fleet.can_stream(device):
                error, kept = self._stream(weights, device, version)
                if error is None:
                    return
                if isinstance(error, ServerRefused) and error.status == NOT_OFFERED:
                    raise error  # the transport was asked for by name
                weights = None
        kept = kept or self._kept(weights)
        target = self.fleet.target
        if version == self.version and target.kept is not None and target.fingerprint == kept.fingerprint:
            return  # asked again for the same version, and nothing has changed since
        self.fleet.load(kept, version, self._in_flight)
        self._abandoned = False

    @property
    def _in_flight(self) -> str:
        return ABORT if self._abandoned else CONTINUE if self.labels_tokens else DRAIN

    def _stream(
        self, weights: Weights, device: torch.device, version: int
    ) -> tuple[Exception | None, KeptWeights | None]:
        """(what went wrong, the copy in host memory). Weights that cannot be read twice are copied on the way, others afterwards,
        while the servers write."""

        def read(stream: VersionStream) -> KeptWeights | None:
            if not self._is_repeatable:
                return KeptWeights.of(stream.through(weights), block_sums.KIND, memory=self._memory)
            deque(stream.through(weights), maxlen=0)
            return None

        stream, kept = self.fleet.stream(read, device, version, self._in_flight)
        if stream.error is None:
            self._abandoned = False
            if kept is None:
                target = self.fleet.target
                self._copying = in_background(lambda: self._copy(target), "copy of the weights")
        return stream.error, kept

    def _copy(self, target: Target) -> None:
        """For a server that has to be sent the version again."""
        kept = KeptWeights.of(self._exported()[1], block_sums.KIND, memory=self._memory)
        if kept.fingerprint == target.fingerprint:  # otherwise the trainer's weights have moved on meanwhile
            target.kept = kept

    def _finish_copy(self) -> None:
        copying, self._copying = self._copying, None
        if copying is None:
            return
        try:
            copying.result()
        except Exception as error:
            log.warning(
                "The weights could not be copied to host memory (%s: %s): a server that is restarted gets the next version only.",
                type(error).__name__,
                error,
            )

    def _kept(self, weights: Weights | None) -> KeptWeights:
        kind = common_checksum([member.info.checksums for member in self.fleet.members])
        config, weights = (None, weights) if weights is not None else self._exported()
        return KeptWeights.of(weights, kind, config, self._memory)

    def _exported(self) -> tuple[dict[str, Any] | None, Weights]:
        """(config of the adapter or None, tensors) as the trainer has them now."""
        if self._adapter_export is not None:
            return self._adapter_export()
        if self._export is None:
            raise ValueError("The servers need the weights themselves: this engine was given no way to export them.")
        return None, self._export()

    @property
    def target(self) -> Target:
        """What the servers serve; other processes of the same run hand it to `follow`."""
        return self.fleet.target

    def follow(self, target: Target) -> None:
        """Use the weights that another process of this run has sent with `load_weights`."""
        self.fleet.follow(target)

    # what a sync probe asks -----------------------------------------------------------------------------------------

    def scores_by_server(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
        """Log-probs of every token after the first at temperature 1, from every server that is up."""
        failed: list[ServerError] = []

        def ask(member: Member, version: int | None) -> list[list[float]]:
            try:
                return member.client.score(sequences, version)
            except ServerError as error:
                failed.append(error)
                raise

        tries, deadlines = 0, self.options.deadlines
        end = time.monotonic() + deadlines.completion + deadlines.back
        while True:
            found = self.fleet.ask_up(ask)
            if found:
                return {member.name: [np.asarray(one, np.float32) for one in scores] for member, scores in found}
            tries += bool(failed)
            if failed and (tries >= MAX_TRIES or time.monotonic() > end):
                raise ServerSlow(
                    f"No server has scored the tokens of the probe, which were sent {tries} times; the last time {failed[-1]}"
                ) from failed[-1]
            time.sleep(min(POLL_SECONDS * 2**tries, MAX_PAUSE_SECONDS))
            self.fleet.wait_until_up()

    def differing_tensors(self, at_most: int = 1) -> list[str]:
        """The first names of tensors in which the trainer differs from the servers, by the checksums that the servers verified."""
        held = {spec.name: spec for spec in self.fleet.target.specs}
        if not held:
            return []
        kind = (self.fleet.target.specs[0].checksum or "").partition(":")[0]
        found: list[str] = []
        for name, tensor in self._exported()[1]:
            if held.pop(name, None) != spec_of(name, tensor, kind):
                found.append(name)
        return (found + list(held))[:at_most]

    def probed(
        self, sequences: Sequence[np.ndarray]
    ) -> list[tuple[list[np.ndarray], Callable[[int], list[str]] | None]]:
        """For a sync probe: the scores of every server that is up, and a function that compares all tensors."""
        # Tensors of the first one only: one version was sent to all of them.
        compared: list[Callable[[int], list[str]] | None] = [self.differing_tensors]
        version, scored = self.fleet.target.version, self.scores_by_server(sequences).values()
        self.fleet.remember_scores(sequences, next(iter(scored)), version)
        return list(zip(scored, compared + [None] * (len(scored) - 1)))

    def sleep(self) -> None:
        self._finish_copy()  # the trainer's weights change next
        if self.options.sleep_level:
            self.fleet.sleep(self.options.sleep_level)

    def wake(self) -> None:
        if self.options.sleep_level:
            self.fleet.wake()


def _close(fleet: Fleet, roster: Roster | None) -> None:
    if roster is not None:
        roster.close()
    fleet.close()


def _peeked(weights: Weights) -> tuple[Weights, torch.device]:
    """(the same weights, the device of the first)."""
    weights = iter(weights)
    first = next(weights, None)
    if first is None:
        return [], torch.device("cpu")
    return chain([first], weights), first[1].device


@dataclass(eq=False)
class _Ticket:
    """A prompt on its way. In exactly one of: waiting, sent, handed over."""

    request: Request
    seed: int
    tries: int = 0  # that a server did not survive, or did not answer
    sent_at: float = 0.0
    label: int = 0  # of the version that it was sent to, as the trainer counts
    refused_since: float | None = None  # because servers were busy
    attempt: int = 0  # counts answers that were no completion: those are kept by the server under the old id


Outcome = ServerCompletion | Exception


class ServedSession:
    """Prompts go out as soon as a server has room, and come back in the order in which they finish."""

    room = None

    def __init__(self, engine: ServedVLLM, params: SamplingParams) -> None:
        self._engine, self._params, self._fleet = engine, params, engine.fleet
        self._id = uuid.uuid4().hex
        self._tickets = 0
        self._waiting: deque[_Ticket] = deque()
        self._sent: dict[int, _Ticket] = {}
        self._finished: list[tuple[int, Completion]] = []
        self._outcomes: queue.SimpleQueue[tuple[int, Member, Outcome]] = queue.SimpleQueue()
        self._pause_until = 0.0
        self._last_finished = 0.0  # when a completion came

    def add(self, prompt: Prompt) -> int:
        number, self._tickets = self._tickets, self._tickets + 1
        made: Request | str = (
            f"Prompt {prompt.key} has images, and this engine was made without `pictures`: it reads texts only."
        )
        if not prompt.images or self._engine.pictures is not None:
            made = request_or_error(number, prompt, self._params, self._engine.context, self._engine.vocabulary)
        if isinstance(made, str):
            self._finished.append((number, Completion.failed(made, self._engine.version)))
        else:
            self._waiting.append(_Ticket(made, request_seed(self._params, prompt)))
            self._send_waiting()
        return number

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._sent) + len(self._finished)

    def advance(self) -> list[tuple[int, Completion]]:
        if not self._finished and self.in_flight:
            self._send_waiting()
            self._collect()
            self._fleet.raise_if_unrecoverable()
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> int:
        """The number of prompts that were abandoned; what servers still write for them is ignored."""
        return len(self._sent)

    # out ------------------------------------------------------------------------------------------------------------

    def _send_waiting(self) -> None:
        place = 0  # of those before it each waits for its own server
        while place < min(len(self._waiting), LOOK_AHEAD) and time.monotonic() >= self._pause_until:
            request = self._waiting[place].request
            waiting = len(self._waiting)
            found = self._fleet.take(request.prompt, request.limit, self._engine.options.per_server, waiting)
            if found is None:
                place += 1
                continue
            ticket = self._waiting[place]
            del self._waiting[place]
            self._send(ticket, *found)

    def _send(self, ticket: _Ticket, member: Member, target: Target, placed: Placed) -> None:
        number = ticket.request.ticket
        self._sent[number] = ticket
        ticket.sent_at = time.monotonic()
        if ticket.request.started is None:
            ticket.request.started = time.perf_counter()
        ids = ticket.request.prompt.ids.tolist()
        ticket.label = target.label
        request_id = f"{self._id}-{number}-{ticket.attempt}"
        may_change = self._engine.labels_tokens
        asked = (ids, ticket.seed, ticket.request.limit, self._params, target.version)
        noise = (ticket.request.base, ticket.request.prompt.first_token)
        request = GenerateRequest(request_id, *asked, may_change=may_change, noise=noise)
        came, release = self._outcomes, self._fleet.release
        prompt, pictures = ticket.request.prompt, self._engine.pictures

        def call() -> None:
            try:
                images = pictures.sent(prompt) if prompt.images else None
                outcome: Outcome = member.client.generate(replace(request, images=images))
            except Exception as error:  # judged in the caller's thread
                outcome = error
            is_whole = isinstance(outcome, ServerCompletion) and outcome.finish_reason != ABORTED
            release(placed, len(outcome.ids) if is_whole else None)
            came.put((number, member, outcome))

        in_background(call, "completions")

    # back -----------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Handle the outcomes that have arrived; wait briefly for the first."""
        try:
            came = self._outcomes.get(timeout=POLL_SECONDS)
            while True:
                number, member, outcome = came
                self._handle_outcome(self._sent.pop(number), member, outcome)
                came = self._outcomes.get_nowait()
        except queue.Empty:
            return

    def _handle_outcome(self, ticket: _Ticket, member: Member, outcome: Outcome) -> None:
        if isinstance(outcome, ServerCompletion) and outcome.finish_reason != ABORTED:
            self._complete(ticket, outcome)
        elif isinstance(outcome, ServerCompletion):
            ticket.attempt += 1
            self._resend(ticket, member, f"{member.name} ended it: {outcome.error}")
        elif isinstance(outcome, ServerRefused):
            AFTER_REFUSAL.get(outcome.status, ServedSession._raise)(self, ticket, member, outcome)
        elif isinstance(outcome, ServerSlow) and self._is_overdue(ticket, member):
            self._too_slow(ticket, member, outcome)
        elif isinstance(outcome, ServerError):
            self._report_and_resend(ticket, member, outcome)
        else:
            raise outcome

    def _complete(self, ticket: _Ticket, written: ServerCompletion) -> None:
        request, version, self._last_finished = ticket.request, ticket.label, time.monotonic()
        spans = None
        if self._engine.labels_tokens:
            said = written.spans or ((len(written.ids), None),)  # a server that does not say keeps what it began with
            spans = tuple((end, version if v is None else self._fleet.label_of(v)) for end, v in said)
            version = spans[0][1]
        if any(math.isnan(logp) for logp in written.logps):
            sentence = f"The logits after prompt {request.prompt.key} are not numbers: the weights are broken."
            self._finished.append((request.ticket, Completion.failed(sentence, version)))
            return
        cut = placeholder_in(written.ids, self._engine.forbidden)
        reason, error = written.finish_reason, None
        if cut is not None:
            reason, error = ENDED_BY_ERROR, placeholder_sentence(request.prompt, written.ids[cut])
        sampling, policy = completion_logps(self._params, written.logprobs_mode, written.logps[:cut])
        if written.policy_logps is not None:
            policy = np.asarray(written.policy_logps[:cut], np.float32)
        seconds = request.completion(reason, version).seconds
        ids = np.asarray(written.ids[:cut], np.int32)
        if spans is not None and cut is not None:
            spans = tuple((min(end, cut), label) for end, label in spans)
        completion = Completion(ids, sampling, policy, reason, error, seconds, version, spans)
        self._finished.append((request.ticket, completion))

    def _resend(self, ticket: _Ticket, member: Member, why: str) -> None:
        ticket.tries += 1
        if ticket.tries >= MAX_TRIES:
            raise ServerSlow(
                f"Prompt {ticket.request.prompt.key} was sent {ticket.tries} times and never completed; the last time {why}"
            )
        self._waiting.appendleft(ticket)

    def _report_and_resend(self, ticket: _Ticket, member: Member, error: ServerError) -> None:
        """The server is gone, silent, answers wrongly or lost its weights: its watcher recovers it, the prompt is sent again."""
        self._fleet.report(member, error)
        self._resend(ticket, member, str(error))

    def _fail(self, ticket: _Ticket, member: Member, error: ServerRefused) -> None:
        """This prompt cannot be run; the others can."""
        self._finished.append((ticket.request.ticket, Completion.failed(str(error), self._engine.version)))

    def _wait_briefly(self, ticket: _Ticket, member: Member, error: ServerRefused) -> None:
        """Busy with our prompts, or with another's; the wait is bounded while none of ours finishes."""
        now, seconds = time.monotonic(), member.client.deadlines.completion
        if ticket.refused_since is None:
            ticket.refused_since = now
        if now - max(ticket.refused_since, self._last_finished) > seconds:
            raise ServerSlow(
                f"Prompt {ticket.request.prompt.key} was refused for more than {seconds:g} s (the deadline of one completion), in "
                f"which no other one was completed: {error}"
            ) from error
        self._pause_until = now + BUSY_SECONDS
        self._waiting.appendleft(ticket)

    def _raise(self, ticket: _Ticket, member: Member, error: ServerRefused) -> None:
        raise error

    @staticmethod
    def _is_overdue(ticket: _Ticket, member: Member) -> bool:
        """Sent again it would be as slow; a connection that is not accepted is different."""
        return time.monotonic() - ticket.sent_at >= member.client.deadlines.completion

    def _too_slow(self, ticket: _Ticket, member: Member, error: ServerError) -> None:
        seconds = member.client.deadlines.completion
        raise ServerSlow(
            f"The completion of prompt {ticket.request.prompt.key} took more than {seconds:g} s (the deadline of one "
            f"completion): {error}"
        ) from error


AFTER_REFUSAL: dict[int, Callable[[ServedSession, _Ticket, Member, ServerRefused], None]] = {
    400: ServedSession._fail,
    413: ServedSession._fail,
    408: ServedSession._report_and_resend,
    409: ServedSession._report_and_resend,
    429: ServedSession._wait_briefly,
    500: ServedSession._report_and_resend,
    502: ServedSession._report_and_resend,
    503: ServedSession._report_and_resend,
    504: ServedSession._too_slow,
}
"""What follows a refusal, by its status; all others end the run with their sentence (401: the token is wrong)."""
