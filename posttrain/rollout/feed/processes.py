"""WorkerProcesses: rollout workers as child processes of this machine. One that dies is replaced, and what it held issued again."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from posttrain import core
from posttrain.core.trees import tree_from_bytes
from posttrain.rewards.runtime.frames import frame, read_frame, write_all
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.feed.arena import Arena, Layout
from posttrain.rollout.feed.board import Board
from posttrain.rollout.feed.child import Blueprint, tensors_of
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Work, rollouts_of
from posttrain.rollout.feed.judging import Judge
from posttrain.rollout.feed.worker import Writing
from posttrain.rollout.rollout import Request

logger = logging.getLogger(__name__)

LARGEST_MESSAGE = 2**30  # bytes of a group
SILENT_SECONDS = 10.0  # without a sign of life
START_SECONDS = 300.0  # to import, and to get the weights
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
    """A worker as the trainer sees it."""

    name: str
    device: str
    process: subprocess.Popen | None = None
    socket: socket.socket | None = None
    thread: threading.Thread | None = None
    last_seen: float = 0.0
    has_begun: bool = False
    deaths: int = 0
    reading: list[Any] = field(default_factory=list)  # labels that it copies just now


def without_weights(model: nn.Module) -> nn.Module:
    """A copy that has shapes only."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _shape_of(tensor) for tensor in tensors})


def _shape_of(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class WorkerProcesses:
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
        self.arenas = [Arena(layout) for _ in range(labels + len(devices) + 1)]
        spare = list(self.arenas)
        self.board = Board(trained, lambda: spare.pop().tensors)
        said = {name: getattr(writing, name) for name in ("params", "episodes", "generations")}
        descriptors = tuple(arena.descriptor for arena in self.arenas)
        self.plan = Blueprint(
            "", without_weights(model), "", make_engine, said, **how,
            trained=layout, fixed=Layout.of(fixed), fixed_arena=self.fixed.descriptor, arenas=descriptors,
        )  # fmt: skip
        self.board.publish(feed.step, oldest=feed.step)
        self.children = [Child(f"worker-{number}", device) for number, device in enumerate(devices)]
        self.answers = {
            "pull": self._on_pull,
            "label_for": self._on_label_for,
            "give_back": self._on_give_back,
            "wait": self._on_wait,
            "failed": self._on_failed,
            "reading": self._on_reading,
            "read": self._on_read,
            "deliver": self._on_deliver,
        }
        self.watch = threading.Thread(target=self._watch, name="posttrain rollouts", daemon=True)

    # ---- start and end -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        for child in self.children:
            self._start(child)
        self.watch.start()

    def _start(self, child: Child) -> None:
        ours, its = socket.socketpair()
        package = str(Path(core.__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
        with its:
            child.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "posttrain.rollout.feed.child", str(its.fileno()), str(os.getpid())],
                pass_fds=(its.fileno(), self.fixed.descriptor, *self.plan.arenas),
                env=environment,
                start_new_session=True,
            )
        child.socket, child.last_seen, child.has_begun = ours, time.monotonic(), False
        plan = replace(self.plan, name=child.name, device=child.device)
        write_all(ours.fileno(), frame(pickle.dumps(sys.path)) + frame(cloudpickle.dumps(plan)))
        child.thread = threading.Thread(target=self._serve, args=(child,), name="posttrain rollouts", daemon=True)
        child.thread.start()

    def stop(self, seconds: float) -> None:
        """Workers notice it at their next question; those that do not are killed."""
        self.feed.stop()
        deadline = time.monotonic() + seconds
        for child in self.children:
            if child.thread is None:
                continue
            try:
                child.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                self._kill(child)
            child.thread.join(seconds)
            child.socket.close()
        if self.watch.is_alive():
            self.watch.join(seconds)
        for arena in (self.fixed, *self.arenas):
            arena.close()

    def _kill(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):  # it and all that it started are gone already
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()

    # ---- one worker --------------------------------------------------------------------------------------------------

    def _serve(self, child: Child) -> None:
        """Answer its questions until it ends."""
        descriptor = child.socket.fileno()
        try:
            while (payload := read_frame(descriptor, LARGEST_MESSAGE)) is not None:
                child.last_seen = time.monotonic()
                message = tree_from_bytes(payload)
                call = message.pop("call")
                if call != "beat":
                    found = self.answers[call](child, **message)
                    write_all(descriptor, frame(pickle.dumps((self.feed.stopped, found))))
        except OSError:
            logger.info("Rollout %s ended in the middle of a message.", child.name)
        except Exception as error:  # it sent something else, or what it sent cannot be used: nothing is guessed
            self.feed.stop(error)
        self._on_end(child)

    def _on_end(self, child: Child) -> None:
        for reading in child.reading:
            reading.close()
        child.reading.clear()
        self._kill(child)
        self.feed.give_back(child.name)
        if self.feed.stopped:
            return
        child.deaths += 1
        if child.deaths >= DEATHS_IN_A_ROW:
            code = child.process.returncode
            self.feed.stop(
                RuntimeError(f"Rollout {child.name} ended {child.deaths} times in a row, the last time with {code}.")
            )
            return
        child.socket.close()
        self._start(child)

    def _watch(self) -> None:
        """Hand over what is judged, and kill workers that show no sign of life: whoever reads their socket then sees their end."""
        while not self.feed.stopped:
            try:
                self.judge.poll()
            except BaseException as error:
                self.feed.stop(error)
            now = time.monotonic()
            for child in self.children:
                limit = SILENT_SECONDS if child.has_begun else START_SECONDS
                if now - child.last_seen > limit and child.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.process.pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    # ---- its questions -----------------------------------------------------------------------------------------------

    def _on_pull(self, child: Child, label: int) -> list[tuple[Work, Any, list[str]]]:
        child.has_begun = True
        return [(work, self.writing.row_of(work), self._authors(work)) for work in self.feed.pull(child.name, label)]

    def _authors(self, work: Work) -> list[str]:
        samples = range(self.writing.generations)
        return [self.writing.author_of(Request(work.row, work.prompt, sample)) for sample in samples]

    def _on_label_for(self, child: Child, label: int) -> int | None:
        return self.feed.label_for(label)

    def _on_give_back(self, child: Child) -> None:
        self.feed.give_back(child.name)

    def _on_wait(self, child: Child) -> None:
        self.feed.wait()

    def _on_failed(self, child: Child, text: str) -> None:
        self.feed.stop(RuntimeError(f"Rollout {child.name} failed:\n{text}"))

    def _on_reading(self, child: Child, label: int) -> tuple[int, int]:
        reading = contextlib.ExitStack()
        label, buffer = reading.enter_context(self.board.reading(label))
        child.reading.append(reading)
        return label, next(place for place, arena in enumerate(self.arenas) if arena.tensors is buffer)

    def _on_read(self, child: Child) -> None:
        child.reading.pop().close()

    def _on_deliver(self, child: Child, work: list[int], seconds: float, **tree: Any) -> None:
        child.deaths = 0
        done = Work(*work)
        rollouts = rollouts_of(tree, done.prompt, done.row, self.writing.row_of(done))
        self.judge.add(done, rollouts, seconds)
