"""RemoteWorkers: what child processes and actors of Ray have in common, on the trainer's side.

A worker asks (`child.RemoteFeed`), and a thread of the trainer answers it. One that dies is replaced, and what it held is issued
again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.trees import tree_from_bytes
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.feed.arena import Arena, Layout
from posttrain.rollout.feed.board import Board
from posttrain.rollout.feed.child import Blueprint, tensors_of
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Work, rollouts_of
from posttrain.rollout.feed.judging import Judge
from posttrain.rollout.feed.platform import THREAD, Seat
from posttrain.rollout.feed.worker import Writing
from posttrain.rollout.rollout import Request

logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 2**30  # bytes of a group
SILENT_SECONDS = 10.0  # without a sign of life
START_SECONDS = 300.0  # to import, and to get the weights
STOP_SECONDS = 5.0  # to end after it was killed
DEATHS_IN_A_ROW = 3  # of one worker, without a group in between: another would die as well
POLL_SECONDS = 0.005
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
    is_gone: bool = False  # and nobody takes its place
    reading: list[Any] = field(default_factory=list)  # labels that it copies just now

    @property
    def name(self) -> str:
        return self.seat.name

    @property
    def patience(self) -> float:
        return SILENT_SECONDS if self.seat.has_begun else START_SECONDS


def without_weights(model: nn.Module) -> nn.Module:
    """A copy that has shapes only."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _shape_of(tensor) for tensor in tensors})


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
        **how: Any,
    ) -> None:
        """One worker for each of `devices`; `labels` versions of the weights may be wanted at once."""
        self.feed, self.judge, self.writing = feed, judge, writing
        trained, fixed = tensors_of(model)
        self.fixed = Arena(Layout.of(fixed))
        with torch.no_grad():
            for kept, own in zip(self.fixed.tensors, fixed):
                kept.copy_(own)
        layout = Layout.of(trained)
        self.most = 2 * len(devices) + 2  # memory that nobody has written to costs nothing
        self.arenas = [Arena(layout) for _ in range(labels + self.most + 1)]
        spare = list(self.arenas)
        self.board = Board(trained, lambda: spare.pop().tensors)
        said = {name: getattr(writing, name) for name in ("params", "episodes", "generations")}
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
        self.children.append(child)
        self._start(child)
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
            while (payload := self._receive(child)) is not None:
                child.last_seen = time.monotonic()
                message = tree_from_bytes(payload)
                call = message.pop("call")
                if call == "beat":
                    child.seat.leaves |= message["leaves"]
                    continue
                found = self.answers[call](child, **message)
                self._reply(child, pickle.dumps((child.seat.stopped, found)))
        except OSError:
            logger.info("Rollout %s ended in the middle of a message.", child.name)
        except Exception as error:  # it sent something else, or what it sent cannot be used: nothing is guessed
            self.feed.stop(error)
        self._on_end(child)

    def _on_end(self, child: Child) -> None:
        self._on_read(child)
        self._kill(child)
        self._forget(child)
        self.feed.give_back(child.name)
        if self.feed.stopped or child.seat.leaves:
            child.is_gone = True
            return
        child.deaths += 1
        if child.deaths >= DEATHS_IN_A_ROW:
            child.is_gone = True
            how = f"Rollout {child.name} ended {child.deaths} times in a row, the last time with {child.ended_with}."
            return self.feed.stop(RuntimeError(how))
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

    def _on_pull(self, child: Child, label: int) -> list[tuple[Work, Any, list[str]]]:
        return [(work, self.writing.row_of(work), self._authors(work)) for work in child.seat.pull(child.name, label)]

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
        child.deaths = 0
        done = Work(*work)
        rollouts = rollouts_of(tree, done.prompt, done.row, self.writing.row_of(done))
        self.judge.add(done, rollouts, seconds)
