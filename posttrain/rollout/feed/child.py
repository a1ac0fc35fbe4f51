"""A rollout worker in a process of its own: `python -m posttrain.rollout.feed.child SOCKET PARENT_PID`.

It is handed a Blueprint, asks for work over its socket and sends back what it wrote. To the worker come pickles of the trainer;
what it answers is read as JSON and tensors only: tools are code of others, on texts that a model wrote.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.trees import tree_to_bytes
from posttrain.models.attention.ragged import install_ragged_attention
from posttrain.rewards.runtime.frames import frame, read_frame, write_all
from posttrain.rewards.runtime.worker import _die_with
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.feed.arena import Arena, Layout
from posttrain.rollout.feed.board import NEWEST
from posttrain.rollout.feed.group import Work, rollouts_tree
from posttrain.rollout.feed.worker import CONTINUE, ReadInPlace, RolloutWorker, Writing
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import Request, Rollout

BEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Blueprint:
    """What a worker is made of. Weights come through memory that both sides map."""

    name: str
    model: nn.Module  # without weights
    device: str
    make_engine: Callable[[nn.Module], RolloutEngine]
    writing: dict[str, Any]  # of Writing, but for rows and authors
    in_flight: str
    keeps_cache: bool
    trained: Layout
    fixed: Layout
    fixed_arena: int  # descriptor
    arenas: tuple[int, ...]  # descriptors of what is published


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Those that are trained, and all others, buffers among them; each once."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return trained, [*others, *model.buffers()]


class FeedOverSocket:
    """As a worker knows the feed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.stopped = descriptor, False
        self.rows: dict[int, tuple[PromptRow, list[str]]] = {}  # by number of the work
        self._writing, self._asking = threading.Lock(), threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._writing:
            write_all(self.descriptor, frame(tree_to_bytes(message)))

    def ask(self, call: str, **arguments: Any) -> Any:
        with self._asking:
            self.send({"call": call, **arguments})
            answer = read_frame(self.descriptor)
        if answer is None:
            os._exit(0)  # the trainer has ended
        self.stopped, found = pickle.loads(answer)
        return found

    def pull(self, worker: str, label: int) -> list[Work]:
        found = self.ask("pull", label=label)
        self.rows |= {work.number: known for work, *known in found}
        return [work for work, *_ in found]

    def label_for(self, label: int) -> int | None:
        return self.ask("label_for", label=label)

    def give_back(self, worker: str) -> None:
        self.ask("give_back")

    def wait(self) -> None:
        self.ask("wait")

    def stop(self, error: BaseException) -> None:
        self.ask("failed", text="".join(traceback.format_exception(error)))

    def deliver(self, work: Work, rollouts: list[Rollout], seconds: float) -> None:
        self.rows.pop(work.number, None)
        given = [work.number, work.attempt, work.label, work.prompt, work.row]
        self.ask("deliver", work=given, seconds=seconds, **rollouts_tree(rollouts))

    def beat(self) -> None:
        while True:
            self.send({"call": "beat"})
            threading.Event().wait(BEAT_SECONDS)


class Mapped(ReadInPlace):
    """Weights that are copied out of the memory in which the trainer publishes them."""

    def __init__(self, feed: FeedOverSocket, own: list[Tensor], arenas: list[Arena]) -> None:
        self.feed, self.own, self.arenas = feed, own, arenas
        self.label = self.load(NEWEST)

    @torch.no_grad()
    def load(self, label: int) -> int:
        self.label, place = self.feed.ask("reading", label=label)
        for own, kept in zip(self.own, self.arenas[place].tensors):
            own.copy_(kept)
        if self.own and self.own[0].is_cuda:
            torch.cuda.synchronize()
        self.feed.ask("read")
        return self.label


def materialise(model: nn.Module, device: str) -> None:
    """Memory for every tensor of a model without weights; those that are shared inside of it stay so."""
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device=device)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: real(tensor) for name, tensor in tensors.items() if tensor is not None})


def run(feed: FeedOverSocket, plan: Blueprint) -> None:
    model = plan.model
    materialise(model, plan.device)
    trained, fixed = tensors_of(model)
    with torch.no_grad():
        for own, kept in zip(fixed, Arena(plan.fixed, plan.fixed_arena).tensors):
            own.copy_(kept)
    arenas = [Arena(plan.trained, descriptor) for descriptor in plan.arenas]
    weights = Mapped(feed, trained, arenas)
    for parameter in trained:
        parameter.requires_grad_(False)
    install_ragged_attention()
    engine = plan.make_engine(model)
    engine.labels_tokens = plan.in_flight == CONTINUE
    authors: dict[tuple[int, int], str] = {}

    def row_of(work: Work) -> PromptRow:
        row, names = feed.rows[work.number]
        authors.update({(work.prompt, sample): name for sample, name in enumerate(names)})
        return row

    def author_of(request: Request) -> str:
        return authors.pop((request.number, request.sample))

    writing = Writing(row_of=row_of, author_of=author_of, **plan.writing)
    how = {"in_flight": plan.in_flight, "keeps_cache": plan.keeps_cache}
    RolloutWorker(plan.name, engine, weights, writing, feed, feed.deliver, **how).run()


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to handle
    _die_with(parent)
    feed = FeedOverSocket(descriptor)
    sys.path[:] = pickle.loads(read_frame(descriptor))
    threading.Thread(target=feed.beat, daemon=True).start()
    try:
        run(feed, pickle.loads(read_frame(descriptor)))
    except BaseException as error:
        feed.stop(error)
        raise


if __name__ == "__main__":
    main()
