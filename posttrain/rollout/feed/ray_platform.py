"""RayWorkers: rollout workers as actors of a Ray cluster, on any of its machines.

Ray places, starts and ends actors, reports their death, and carries weights to each machine once (its object store). What is
begun, issued again and refused is decided by the feed, as everywhere. An actor cannot call the trainer, so the trainer calls it:
`exchange` brings the answer to its last question and fetches the next one, or a sign of life. Ray does not notice an actor that
hangs; this does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from posttrain.rollout.feed.child import BEAT_SECONDS, Blueprint, RemoteFeed, run
from posttrain.rollout.feed.group import Work
from posttrain.rollout.feed.remote import LARGEST_MESSAGE, OTHERS, Child, RemoteWorkers, packed

logger = logging.getLogger(__name__)

LEAST_VERSION = (2, 59)
PLACE_SECONDS = 30.0  # without a place, before it is said
AUTO, LOCAL, LOOPBACK = "auto", "local", ("127.0.0.1", "localhost", "[::1]")
ASK_SECONDS = 0.02
"""A question costs a millisecond and more: where there is nothing new, the next one is this much later, not a token later."""
A_STRANGER = (
    "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)"
)


# ---- the cluster ----------------------------------------------------------------------------------------------------------------


def ray_module() -> ModuleType:
    """Ray, for those who ask for it."""
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "`rollout_workers='ray'` needs Ray, which is not installed: pip install 'posttrain[ray]'."
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ImportError(
            f"Ray is {ray.__version__}, and its clusters are protected from {least} on: pip install 'posttrain[ray]'."
        )
    return ray


def address_of(given: str | None) -> str:
    return given or os.environ.get("RAY_ADDRESS") or LOCAL


def connect(address: str | None) -> tuple[ModuleType, bool]:
    """Ray, connected, and whether that was done here. None: `RAY_ADDRESS`, or a cluster of this machine for this run alone."""
    ray = ray_module()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, AUTO, here):
            raise ValueError(
                f"`ray_address` is {address}, and this process has connected itself to {here}: leave one out."
            )
        refuse_strangers(ray)
        return ray, False
    address = address_of(address)
    if address == LOCAL:
        _keep_token_private()
    with _own_sigterm():
        ray.init(address=address, logging_level="WARNING", **({"include_dashboard": False} if address == LOCAL else {}))
    if address != LOCAL:
        refuse_strangers(ray)
    return ray, True


def refuse_strangers(ray: ModuleType) -> None:
    """Ray runs any code that it is sent: other machines may reach a cluster only if it asks for a token."""
    address = ray.get_runtime_context().gcs_address
    if address.rpartition(":")[0] in LOOPBACK:
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment["RAY_AUTH_MODE"] = "disabled"
    command = [sys.executable, "-c", A_STRANGER, address]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "AuthenticationError" not in asked.stderr:  # whatever else it says, the token was accepted
        raise PermissionError(
            f"The Ray cluster at {address} does not ask for a token, so anyone who reaches it can run any code on it. Start it "
            "with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE on every machine (docs/async.md), and set both here."
        )


def _keep_token_private() -> None:
    """Left alone, Ray writes its token into a file that every user of the machine can read."""
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"} & os.environ.keys():
        path = Path(tempfile.mkdtemp(prefix="posttrain-ray-"), "token")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)  # for its other processes, too


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray takes the signal by which a run is asked to save and end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, own)


# ---- in the actor ---------------------------------------------------------------------------------------------------------------


class FeedOverRay(RemoteFeed):
    """Questions wait here until the trainer fetches them."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: queue.Queue[bytes | None] = queue.Queue()
        self.replies: queue.Queue[bytes] = queue.Queue()
        self._nothing_until: dict[tuple[str, int], float] = {}

    def exchange(self, question: bytes) -> bytes:
        self.questions.put(question)
        return self.replies.get()

    def pull(self, worker: str, label: int) -> list[Work]:
        return self._seldom("pull", label, super().pull, worker) or []

    def label_for(self, label: int) -> int | None:
        return self._seldom("label_for", label, super().label_for)

    def _seldom(self, call: str, label: int, ask: Any, *given: Any) -> Any:
        """What is asked at each token. Late news costs milliseconds and nothing else: the feed refuses what no longer fits."""
        if time.monotonic() < self._nothing_until.get((call, label), 0.0):
            return None
        found = ask(*given, label)
        self._nothing_until = {} if found else {**self._nothing_until, (call, label): time.monotonic() + ASK_SECONDS}
        return found


class Writer:
    """An actor: its thread writes, and `exchange` is called again and again."""

    def __init__(self, path: list[str], plan: bytes, name: str, fixed: np.ndarray) -> None:
        for variable in OTHERS:
            os.environ.pop(variable, None)
        sys.path.extend(folder for folder in path if folder not in sys.path)
        self.feed, self.weights = FeedOverRay(), []
        threading.Thread(target=self._run, args=(plan, name, fixed), daemon=True).start()

    def _run(self, plan: bytes, name: str, fixed: np.ndarray) -> None:
        import ray

        try:
            run(self.feed, replace(*pickle.loads(plan), name=name), fixed, lambda place: ray.get(self.weights[0]))
        except BaseException as error:
            self.feed.stop(error)
        finally:
            self.feed.questions.put(None)

    def exchange(self, reply: bytes | None, weights: list[Any]) -> bytes | None:
        """The next question; empty: there is none; None: it has ended. `weights`: a reference to those that it asked for."""
        if reply is not None:
            self.weights = weights
            self.feed.replies.put(reply)
        try:
            return self.feed.questions.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            return b""


# ---- on the trainer's side ------------------------------------------------------------------------------------------------------


@dataclass
class _Actor:
    actor: Any
    asked: Any  # reference to the message that is waited for
    weights: list[Any] = field(default_factory=list)  # reference to those that it reads
    has_answered: bool = False  # before, it may wait for a place
    is_noted: bool = False  # that it waits


class RayWorkers(RemoteWorkers):
    """Actors for which the cluster has no room yet join when it has."""

    def __init__(self, *given: Any, ray_address: str | None, resources: dict[str, float], **how: Any) -> None:
        if resources.get("GPU") and address_of(ray_address) == LOCAL:
            raise ValueError(
                "A Ray cluster of this machine alone would hand out the GPUs that the training has: `rollout_workers=N` starts "
                "processes on those that are free, and `ray_address` names a cluster of several machines."
            )
        super().__init__(*given, **how)
        self.ray, self.is_ours = connect(ray_address)
        self.asked, asked = resources, dict(resources)
        options = {"num_cpus": asked.pop("CPU", 1), "num_gpus": asked.pop("GPU", 0), "resources": asked}
        self.actor = self.ray.remote(Writer).options(
            **options, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        self.fixed_there = self.ray.put(self._bytes(self.fixed))
        self.plan_there: Any = None
        self._there: dict[int, Any] = {}  # label -> its weights in Ray's object store
        self._putting = threading.Lock()

    @staticmethod
    def _bytes(arena: Any) -> np.ndarray:
        return np.frombuffer(arena.memory, np.uint8)

    def _launch(self, child: Child, plan: Blueprint) -> None:
        if self.plan_there is None:
            self.plan_there = self.ray.put(packed(plan))
        actor = self.actor.remote(sys.path, self.plan_there, child.name, self.fixed_there)
        child.handle = _Actor(actor, actor.exchange.remote(None, []))

    def _receive(self, child: Child) -> bytes | None:
        handle: _Actor = child.handle
        while True:
            try:
                found = self.ray.get(handle.asked, timeout=BEAT_SECONDS)
            except self.ray.exceptions.GetTimeoutError:
                self._note_waiting(child)
                is_silent = handle.has_answered and time.monotonic() - child.last_seen > child.patience
                if is_silent or (child.seat.stopped and not handle.has_answered):
                    child.ended_with = f"no sign of life for {child.patience:.0f} s"
                    return None
                continue
            except self.ray.exceptions.RayError as error:
                child.ended_with = f"{type(error).__name__}: {error}"
                return None
            child.last_seen, handle.has_answered = time.monotonic(), True
            if found and len(found) > LARGEST_MESSAGE:
                raise ValueError(f"A message of {len(found):,} bytes came; at most {LARGEST_MESSAGE:,} are read.")
            if found != b"":
                return found
            handle.asked = handle.actor.exchange.remote(None, [])

    def _note_waiting(self, child: Child) -> None:
        """Once, where a worker waits for a place."""
        handle: _Actor = child.handle
        if not (handle.has_answered or handle.is_noted) and time.monotonic() - child.last_seen > PLACE_SECONDS:
            handle.is_noted = True
            logger.warning(
                "Rollout %s waits for a place: it asks Ray for %s, and joins when there is room.",
                child.name,
                self.asked,
            )

    def _reply(self, child: Child, answer: bytes) -> None:
        child.handle.asked = child.handle.actor.exchange.remote(answer, child.handle.weights)

    def _kill(self, child: Child) -> None:
        self.ray.kill(child.handle.actor)

    def _on_reading(self, child: Child, label: int) -> tuple[int, int]:
        """One put a version, by the first that asks; the reference goes with the answer."""
        with self._putting, self.board.reading(label) as (label, buffer):
            if label not in self._there:
                self._there = {old: kept for old, kept in self._there.items() if old in self.board.buffers}
                arena = next(arena for arena in self.arenas if arena.tensors is buffer)
                self._there[label] = self.ray.put(self._bytes(arena))
            child.handle.weights = [self._there[label]]
        return label, 0

    def _on_read(self, child: Child) -> None:
        child.handle.weights = []

    def stop(self, seconds: float) -> None:
        super().stop(seconds)
        self._there.clear()
        if self.is_ours:
            self.ray.shutdown()
