"""A rollout worker in a process of its own: `python -m posttrain.rollout.feed.child SOCKET PARENT_PID`.

It is handed a Blueprint, asks for work over its socket and sends back what it wrote. To the worker come pickles of the trainer;
what it answers is read as JSON and tensors only: tools are code of others, on texts that a model wrote.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.trees import tree_to_bytes
from posttrain.models.attention.ragged import install_ragged_attention
from posttrain.models.layers.tower_layers import fuse_tower_layers
from posttrain.models.load.model import innermost_model
from posttrain.models.vision.features import family_of
from posttrain.models.vision.tower import know_tower
from posttrain.rewards.runtime.frames import frame, read_frame, write_all
from posttrain.rewards.runtime.worker import _die_with
from posttrain.rollout.engines.protocol import RolloutEngine
from posttrain.rollout.episodes.environment import Environments
from posttrain.rollout.feed.arena import Arena, Layout
from posttrain.rollout.feed.board import NEWEST
from posttrain.rollout.feed.feed import MANY
from posttrain.rollout.feed.group import Work, rollouts_tree
from posttrain.rollout.feed.played import AskedHere
from posttrain.rollout.feed.worker import CONTINUE, ReadInPlace, RolloutWorker, Writing
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import Request, Rollout

BEAT_SECONDS = 1.0


@dataclass(frozen=True)
class Blueprint:
    """What a worker is made of, but for its weights."""

    name: str
    model: nn.Module  # without weights
    device: str
    make_engine: Callable[[nn.Module], RolloutEngine]
    writing: dict[str, Any]  # of Writing, but for rows and authors
    in_flight: str
    keeps_cache: bool
    trained: Layout
    fixed: Layout
    environments: Environments | None = None  # those of the episodes
    reward_timeout: float | None = None  # seconds, of the environments' rewards


def tensors_of(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Those that are trained, and all others, buffers among them; each once."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    others = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return trained, [*others, *model.buffers()]


class RemoteFeed(ABC):
    """As a worker knows the feed of another process."""

    def __init__(self) -> None:
        self.stopped = False
        self.rows: dict[int, tuple[PromptRow, list[str]]] = {}  # by number of the work
        self._asking = threading.Lock()

    @abstractmethod
    def exchange(self, question: bytes) -> bytes:
        """The trainer's answer."""

    def ask(self, call: str, **arguments: Any) -> Any:
        with self._asking:
            answer = self.exchange(tree_to_bytes({"call": call, **arguments}))
        self.stopped, found = pickle.loads(answer)
        return found

    def pull(self, worker: str, label: int, most: int = MANY) -> list[Work]:
        found = self.ask("pull", label=label, most=most)
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
        if work.counts:
            self.ask("deliver", work=[*astuple(work)], seconds=seconds, **rollouts_tree(rollouts))


class FeedOverSocket(RemoteFeed):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor, self.leaves = descriptor, False
        self._writing = threading.Lock()

    def send(self, message: bytes) -> None:
        with self._writing:
            write_all(self.descriptor, frame(message))

    def exchange(self, question: bytes) -> bytes:
        self.send(question)
        answer = read_frame(self.descriptor)
        if answer is None:
            os._exit(0)  # the trainer has ended
        return answer

    def beat(self) -> None:
        while True:
            self.send(tree_to_bytes({"call": "beat", "leaves": self.leaves}))
            threading.Event().wait(BEAT_SECONDS)


class Published(ReadInPlace):
    """Weights that are copied out of the memory in which the trainer publishes them."""

    def __init__(self, feed: RemoteFeed, own: list[Tensor], memory_of: Callable[[int], Any], layout: Layout) -> None:
        self.feed, self.own, self.memory_of, self.layout = feed, own, memory_of, layout
        self.label = self.load(NEWEST)

    @torch.no_grad()
    def load(self, label: int) -> int:
        self.label, place = self.feed.ask("reading", label=label)
        for own, kept in zip(self.own, self.layout.over(self.memory_of(place))):
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


def run(feed: RemoteFeed, plan: Blueprint, fixed_memory: Any, memory_of: Callable[[int], Any]) -> None:
    """Write until the feed is stopped. `memory_of` a place that the trainer names: where weights lie."""
    feed.ask("hello", process=os.getpid(), host=socket.gethostname())
    model = plan.model
    materialise(model, plan.device)
    trained, fixed = tensors_of(model)
    with torch.no_grad():
        for own, kept in zip(fixed, plan.fixed.over(fixed_memory)):
            own.copy_(kept)
    weights = Published(feed, trained, memory_of, plan.trained)
    for parameter in trained:
        parameter.requires_grad_(False)
    install_ragged_attention()
    if (family := family_of(innermost := innermost_model(model))) is not None:
        know_tower(innermost)
        fuse_tower_layers(innermost, family)
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
    to_deliver: tuple[Callable[..., Any], ...] = (feed.deliver,)
    if plan.environments is not None:
        asked = AskedHere(plan.environments, plan.reward_timeout, feed.deliver)
        to_deliver = asked.add, asked.poll
    RolloutWorker(plan.name, engine, weights, writing, feed, *to_deliver, **how).run()


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    sys.path[:] = pickle.loads(read_frame(descriptor))
    work(FeedOverSocket(descriptor), lambda: pickle.loads(read_frame(descriptor)))


def work(feed: FeedOverSocket, given: Callable[[], tuple[Blueprint, int, list[int]]]) -> None:
    """`given`: what it is made of, and descriptors of the memory in which weights lie."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer's to handle
    signal.signal(signal.SIGTERM, lambda *_: setattr(feed, "leaves", True))
    threading.Thread(target=feed.beat, daemon=True).start()
    try:
        plan, fixed, places = given()
        arenas = [Arena(plan.trained, place) for place in places]
        run(feed, plan, Arena(plan.fixed, fixed).memory, lambda place: arenas[place].memory)
    except BaseException as error:
        feed.stop(error)
        raise


if __name__ == "__main__":
    main()
