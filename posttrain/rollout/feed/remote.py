"""RemoteWorkers: what child processes and actors of Ray have in common, on the trainer's side.

A worker asks (`child.RemoteFeed`), and a thread of the trainer answers it. One that dies is replaced, and what it held is issued
again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from posttrain.core.trees import tree_from_bytes
from posttrain.models.load.model import innermost_model
from posttrain.models.vision.features import family_of
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.feed.arena import Arena, Layout
from posttrain.rollout.feed.board import Board
from posttrain.rollout.feed.child import Blueprint, tensors_of
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Work, rollouts_of
from posttrain.rollout.feed.judging import Judge
from posttrain.rollout.feed.platform import THREAD, Seat
from posttrain.rollout.feed.worker import CONTINUE, Writing
from posttrain.rollout.prompt_rows import PromptRow, with_pictures
from posttrain.rollout.rollout import Request, Rollout, versions_of

logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 2**30  # bytes of a group
SILENT_SECONDS = 10.0  # without a sign of life
START_SECONDS = 150.0  # to import, and to get the weights
"""Shorter than `heartbeat_stale_after_s` is by default, so that another can take the place of one that hangs while it starts."""
STOP_SECONDS = 5.0  # to end after it was killed
DEATHS_IN_A_ROW = 3  # of one worker, without a group in between: another would die as well
POLL_SECONDS = 0.005
OUTPUT_CAPTURING = "transformers.utils.output_capturing"
OTHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that would make a worker one of the training processes."""


MESSAGES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "beat": {"leaves": bool},
    "hello": {"process": int, "host": str},
    "pull": {"label": int, "most": int},
    "label_for": {"label": int},
    "give_back": {},
    "wait": {},
    "failed": {"text": str},
    "reading": {"label": int},
    "read": {},
    "deliver": {"work": list, "seconds": (int, float), "rollouts": list, "samples": dict},
}
"""All that a worker may say, and what belongs to it."""


class WrongAnswer(ValueError):
    """What a worker sent cannot be used; what it holds is issued again, to one that takes its place."""


@dataclass
class Child:
    """A worker as the trainer sees it. `handle` is the platform's."""

    seat: Seat
    device: str
    handle: Any = None
    thread: threading.Thread | None = None
    process: int = 0  # its number, on its machine
    last_seen: float = 0.0
    deaths: int = 0
    ended_with: Any = None
    is_gone: bool = False  # and is not replaced
    reading: list[Any] = field(default_factory=list)  # labels that it copies just now
    issued: dict[int, Work] = field(default_factory=dict)  # what it was last asked for, by number

    @property
    def name(self) -> str:
        return self.seat.name

    @property
    def patience(self) -> float:
        return SILENT_SECONDS if self.seat.has_begun else START_SECONDS


def without_weights(model: nn.Module) -> nn.Module:
    """A copy that has shapes only. Hooks by which transformers looks at layers (LLaVA's tower) know a variable of this process:
    they are left out, and installed again where the first forward wants them."""
    tensors = [*model.parameters(), *model.buffers()]
    made = copy.deepcopy(model, {id(tensor): _shape_of(tensor) for tensor in tensors})
    for module in made.modules():
        hooks = module._forward_hooks
        for number in [n for n, hook in hooks.items() if getattr(hook, "__module__", "") == OUTPUT_CAPTURING]:
            del hooks[number]
        module.__dict__.pop("_output_capturing_hooks_installed", None)
    return made


def packed(plan: Blueprint, *beside: Any) -> bytes:
    """As a worker is handed it, with what goes beside it."""
    try:
        return cloudpickle.dumps((plan, *beside))
    except Exception as error:  # every type refuses to be pickled in its own way
        parts = {"the model": plan.model, "the engine": plan.make_engine, "the environments": plan.environments}
        parts |= {"what makes episodes": plan.writing["episodes"]}
        named = next((name for name, part in parts.items() if not _can_be_packed(part)), "the plan of a worker")
        raise ValueError(
            f"`rollout_workers`: {named} cannot be sent to another process ({type(error).__name__}: {error}). Make it of what can "
            "be pickled (no open file, lock or thread, nor the trainer), or leave `rollout_workers` out, and a thread writes."
        ) from error


def _can_be_packed(part: Any) -> bool:
    try:
        cloudpickle.dumps(part)
    except Exception:
        return False
    return True


def _shape_of(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class RemoteWorkers(ABC):
    """Started with the first window, ended with the training."""

    def __init__(
        self,
        devices: list[str],
        model: nn.Module,
        make_engine: Callable[[nn.Module], RolloutEngine],
        writing: Writing,
        feed: Feed,
        judge: Judge,
        labels: int,
        *,
        pieces: Sequence[Tensor] | None = None,
        sent: Callable[[PromptRow], PromptRow] = lambda row: row,
        **how: Any,
    ) -> None:
        """One worker for each of `devices`; `labels` versions of the weights may be wanted at once. `pieces`: what is
        trained, where that is sharded and `model` is a whole copy. `sent`: a row as workers get it, which have no dataset."""
        self.feed, self.judge, self.writing, self.sent = feed, judge, writing, sent
        family = family_of(innermost_model(model))
        markers = () if family is None else family.forbidden_ids  # may lie beyond the embeddings
        self.vocabulary = max(model.get_input_embeddings().weight.shape[0], 1 + max(markers, default=0))
        trained, fixed = tensors_of(model)
        self.fixed = Arena(Layout.of(fixed))
        with torch.no_grad():
            for kept, own in zip(self.fixed.tensors, fixed):
                kept.copy_(own)
        layout = Layout.of(trained)
        self.most = 2 * len(devices) + 2  # memory that was never written to costs nothing
        self.arenas = [Arena(layout) for _ in range(labels + self.most + 1)]
        spare = list(self.arenas)
        sharded = {} if pieces is None else {"sharded_dtype": layout.dtypes[0]}
        self.board = Board(trained if pieces is None else pieces, lambda: spare.pop().tensors, **sharded)
        said = {name: getattr(writing, name) for name in ("params", "episodes", "generations", "in_batches")}
        self.plan = Blueprint(
            "", without_weights(model), "", make_engine, said, **how, trained=layout, fixed=Layout.of(fixed)
        )
        self.board.publish(feed.step, oldest=feed.step)
        self.devices, self.children, self._begun = devices, [], 0
        self.answers = {
            "hello": self._on_hello,
            "pull": self._on_pull,
            "label_for": lambda child, label: child.seat.label_for(label),
            "give_back": lambda child: child.seat.give_back(child.name),
            "wait": lambda child: child.seat.wait(),
            "failed": self._on_failed,
            "reading": self._on_reading,
            "read": self._on_read,
            "deliver": self._on_deliver,
        }
        self.watch = threading.Thread(target=self._watch, name=THREAD, daemon=True)

    # ---- what a platform does ----------------------------------------------------------------------------------------

    @abstractmethod
    def _launch(self, child: Child, plan: Blueprint) -> None:
        """Begin it; `child.handle` is set."""

    @abstractmethod
    def _receive(self, child: Child) -> bytes | None:
        """Its next message; None: it has ended, or shows no sign of life."""

    @abstractmethod
    def _reply(self, child: Child, answer: bytes) -> None: ...

    @abstractmethod
    def _kill(self, child: Child) -> None:
        """It and all that it started are gone afterwards; `child.ended_with` says how."""

    def _forget(self, child: Child) -> None:  # noqa: B027 (not every platform has something to do)
        """It has ended, and its thread no longer reads what it says."""

    def _look_after(self, child: Child) -> None:  # noqa: B027
        """Again and again."""

    # ---- start and end -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.feed.expect(len(self.devices))
        for _ in self.devices:
            self.join()
        self.watch.start()

    def join(self) -> str:
        if sum(not child.is_gone for child in self.children) >= self.most:
            raise ValueError(
                f"There is room for {self.most} workers, twice as many as the run began with and two more."
            )
        child = Child(Seat(f"worker-{self._begun}", self.feed), self.devices[self._begun % len(self.devices)])
        self._begun += 1
        self._start(child)
        self.children.append(child)  # one that could not be launched need not be ended
        return child.name

    def _start(self, child: Child) -> None:
        child.last_seen, child.seat.has_begun = time.monotonic(), False
        self._launch(child, replace(self.plan, name=child.name, device=child.device))
        child.thread = threading.Thread(target=self._serve, args=(child,), name=THREAD, daemon=True)
        child.thread.start()

    def leave(self, name: str, seconds: float) -> None:
        child = next(child for child in self.children if child.name == name)
        if not child.seat.leave(seconds, lambda: child.is_gone):
            self._kill(child)  # which the thread that serves it notices

    def members(self) -> list[str]:
        return [child.name for child in self.children if child.seat.has_begun and not child.is_gone]

    def stop(self, seconds: float) -> None:
        """Workers notice it at their next question; those that do not are killed."""
        self.feed.stop()
        deadline = time.monotonic() + seconds
        for child in self.children:
            while not child.is_gone and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            if not child.is_gone:
                self._kill(child)
            child.thread.join(STOP_SECONDS)
        if self.watch.is_alive():
            self.watch.join(seconds)
        for arena in (self.fixed, *self.arenas):
            arena.close()

    # ---- one worker --------------------------------------------------------------------------------------------------

    def _serve(self, child: Child) -> None:
        """Answer its questions until it ends."""
        try:
            while (message := self._next_message(child)) is not None:
                child.last_seen = time.monotonic()
                call = message.pop("call")
                if call == "beat":
                    child.seat.leaves |= message["leaves"]
                    continue
                child.last_seen = math.inf  # who is being answered, perhaps with many images, is not silent
                found = self.answers[call](child, **message)
                child.last_seen = time.monotonic()
                self._reply(child, pickle.dumps((child.seat.stopped, found)))
        except OSError:
            logger.info("Rollout %s ended in the middle of a message.", child.name)
        except WrongAnswer as error:
            logger.warning("Rollout %s is ended: %s", child.name, error)
        except Exception as error:
            self.feed.stop(error)
        self._on_end(child)

    def _next_message(self, child: Child) -> dict[str, Any] | None:
        try:
            payload = self._receive(child)
            message = None if payload is None else tree_from_bytes(payload)
        except OSError:
            raise
        except Exception as error:  # longer than any message, or no message at all
            raise WrongAnswer(f"it sent what cannot be read. {type(error).__name__}: {error}") from error
        if message is None:
            return None
        wanted = MESSAGES.get(message.get("call") if isinstance(message, dict) else None)
        if wanted is None or message.keys() != {"call", *wanted}:
            raise WrongAnswer(f"it sent what no worker says: {str(message)[:200]}")
        if wrong := [name for name, kind in wanted.items() if not isinstance(message[name], kind)]:
            raise WrongAnswer(f"`{wrong[0]}` of {message['call']!r} is a {type(message[wrong[0]]).__name__}.")
        return message

    def _on_end(self, child: Child) -> None:
        self._on_read(child)
        self._kill(child)
        self._forget(child)
        held = self.feed.being_written(child.name) or "nothing"
        child.issued.clear()
        self.feed.give_back(child.name)
        if self.feed.stopped or child.seat.leaves:
            child.is_gone = True
            return
        child.deaths += 1
        if child.deaths >= DEATHS_IN_A_ROW:
            child.is_gone = True
            how = f"Rollout {child.name} ended {child.deaths} times in a row, the last time with {child.ended_with}"
            return self.feed.stop(RuntimeError(f"{how}. It held: {held}."))
        logger.warning("Rollout %s ended with %s. Another takes its place.", child.name, child.ended_with)
        try:
            self._start(child)
        except Exception as error:
            child.is_gone = True
            self.feed.stop(error)

    def _watch(self) -> None:
        """Hand over what is judged."""
        while not self.feed.stopped:
            try:
                self.judge.poll()
            except BaseException as error:
                self.feed.stop(error)
            for child in [*self.children]:
                self._look_after(child)
            time.sleep(POLL_SECONDS)

    # ---- its questions -----------------------------------------------------------------------------------------------

    def _on_hello(self, child: Child, process: int, host: str) -> None:
        child.process = process
        logger.info("Rollout %s is process %d of %s.", child.name, process, host)

    def _on_pull(self, child: Child, label: int, most: int) -> list[tuple[Work, Any, list[str]]]:
        given = child.seat.pull(child.name, label, most)
        child.issued |= {work.number: work for work in given if work.counts}
        return [(work, self.sent(self.writing.row_of(work)), self._authors(work)) for work in given]

    def _authors(self, work: Work) -> list[str]:
        samples = range(self.writing.generations)
        return [self.writing.author_of(Request(work.row, work.prompt, sample)) for sample in samples]

    def _on_failed(self, child: Child, text: str) -> None:
        self.feed.stop(RuntimeError(f"Rollout {child.name} failed:\n{text}"))

    def _on_reading(self, child: Child, label: int) -> tuple[int, int]:
        """The label that it gets, and the number of the arena."""
        reading = contextlib.ExitStack()
        label, buffer = reading.enter_context(self.board.reading(label))
        child.reading.append(reading)
        return label, next(place for place, arena in enumerate(self.arenas) if arena.tensors is buffer)

    def _on_read(self, child: Child) -> None:
        while child.reading:
            child.reading.pop().close()

    def _on_deliver(self, child: Child, work: list[int], seconds: float, **tree: Any) -> None:
        number = work[0] if work else None
        done = child.issued.get(number) if isinstance(number, int) else None
        if done is None or [*astuple(done)] != work:
            raise WrongAnswer(f"it handed in {work}, which it was not asked for.")
        row = self.writing.row_of(done)
        try:
            rollouts = rollouts_of(tree, done.prompt, done.row, row)
            self._refuse_wrong(done, rollouts)
            refuse_other_images(row, rollouts)
        except Exception as error:
            raise WrongAnswer(
                f"what it made of prompt {number} cannot be used. {type(error).__name__}: {error}"
            ) from error
        del child.issued[number]
        child.deaths = 0
        self.judge.add(done, rollouts, seconds)

    def _refuse_wrong(self, done: Work, rollouts: list[Rollout]) -> None:
        """Raise for a group that no worker can have been asked for."""
        newest = self.board.newest if self.plan.in_flight == CONTINUE else done.label
        if len(rollouts) != self.writing.generations:
            raise ValueError(f"It has {len(rollouts)} completions, and {self.writing.generations} were asked for.")
        for rollout in rollouts:
            sample, versions = rollout.sample, versions_of(rollout)
            written = versions[sample.trained]
            if len(versions) != len(sample) or len(sample.trained) != len(sample):
                raise ValueError("A completion has other tokens than versions of weights that wrote them.")
            if len(sample) and not 0 <= sample.input_ids.min() <= sample.input_ids.max() < self.vocabulary:
                raise ValueError(f"A token is none of the {self.vocabulary} that the model knows.")
            if rollout.is_given:
                continue
            if len(written) > self.writing.params.max_tokens:
                raise ValueError(
                    f"A completion has {len(written)} tokens, and may have {self.writing.params.max_tokens}."
                )
            labels = [*written, sample.policy_version]
            if not all(done.label <= label <= newest for label in labels):
                raise ValueError(f"Its tokens name weights that it did not have; those were {done.label} to {newest}.")


def refuse_other_images(row: PromptRow, rollouts: Sequence[Rollout]) -> None:
    """Raise for images that neither the row has nor a tool has returned: no batch could be made of them, and no reward look."""
    known = {(span.key, span.size, span.grid) for span in row.spans}
    for rollout in rollouts:
        for said in (rollout.prompt, rollout.completion):
            with_pictures(said, rollout.pictures)
    for span in (span for rollout in rollouts for span in rollout.sample.images):
        if (span.key, span.size, span.grid) not in known and (row.media is None or not row.media.has(span.key)):
            raise ValueError(f"It shows an image {span.key.hex()[:40]} that is not among those of its row.")
