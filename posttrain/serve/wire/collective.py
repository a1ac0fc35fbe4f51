"""A torch.distributed group of two: the trainer, which sends (rank 0), and one server, which receives (rank 1).

The group is made of its own store and its own process group object, so that a default group of either process is neither used nor
needed. Only bytes are broadcast, never objects: what they mean, and their checksums, come over HTTP, where a token is asked for.
An intruder in the group can spoil an update, which is then noticed, and cannot send one.

Every wait is made in a thread that can be left behind: a peer that is gone costs the deadline and not the process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportFailed

T = TypeVar("T")

GLOO, NCCL = "gloo", "nccl"
SENDER, RECEIVER, SIZE = 0, 1, 2
POLL_SECONDS = 0.0005
CLOSE_SECONDS = 0.1
NCCL_SECONDS = 600.0
"""No broadcast of NCCL takes longer; most are given less."""
NCCL_DEVICE = 0
"""The GPU that the server's engine uses: the first that its process sees."""
_NCCL_SETTINGS = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Otherwise torch's watchdog ends the whole process where a peer does not answer in time."""
_environment = threading.Lock()


def available_backends() -> list[str]:
    """The best first. NCCL only where this process has CUDA at work already: asking for it here would take memory of a GPU."""
    if not dist.is_available():
        return []
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized() and dist.is_nccl_available()
    return ([NCCL] if cuda else []) + ([GLOO] if dist.is_gloo_available() else [])


def in_background(function: Callable[[], T], name: str) -> Future[T]:
    """What it returns or raises, on a daemon thread that can be abandoned: one that hangs does not keep the process alive."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # handed to the caller, who may have given up meanwhile
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def within(seconds: float, what: str, function: Callable[[], T]) -> T:
    """`function()`, waited for that long; TransportFailed where it fails or takes longer."""
    outcome = in_background(function, f"collective: {what}")
    try:
        return outcome.result(seconds)
    except Exception as error:
        if not outcome.done():
            raise TransportFailed(f"{what} took more than {seconds:g} s.") from error
        raise TransportFailed(f"{what} failed ({type(error).__name__}: {str(error)[:300]}).") from error


class Pair:
    """One end of the group, once both are there. Used by one thread at a time."""

    def __init__(self, backend: str, group: Any, store: Any, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self._group, self._store = group, store
        self._buffer: Tensor | None = None

    @property
    def is_closed(self) -> bool:
        return self._group is None

    def buffer(self, nbytes: int) -> Tensor:
        """Bytes where the backend wants them; the same memory every time, as far as it suffices."""
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:nbytes]

    def broadcast(self, data: Tensor, seconds: float) -> None:
        """From rank 0 to rank 1. After a failure the two ends may be out of step: close the pair."""
        group = self._group
        if group is None:
            raise TransportFailed("The group was closed.")
        within(seconds, "A broadcast of weights", lambda: _BROADCAST[self.backend](group, data, seconds))

    def close(self) -> None:
        """A thread that still waits keeps the group until its own time is over; no other thread waits for it."""
        group, self._group, self._store, self._buffer = self._group, None, None, None
        if group is not None and self.backend == NCCL:
            threading.Thread(target=group.abort, name="collective: abort", daemon=True).start()


def _options(seconds: float) -> Any:
    options = dist.BroadcastOptions()
    options.timeout = timedelta(seconds=seconds)
    options.rootRank, options.rootTensor = SENDER, 0
    return options


def _gloo_broadcast(group: Any, data: Tensor, seconds: float) -> None:
    work = group.broadcast([data], _options(seconds))
    try:
        work.wait(timedelta(seconds=seconds))
    finally:  # the end of a group waits for its work: only this thread may end it
        while not work.is_completed():
            time.sleep(CLOSE_SECONDS)


def _nccl_broadcast(group: Any, data: Tensor, seconds: float) -> None:
    end = time.monotonic() + seconds
    with torch.cuda.device(data.device):
        work = group.broadcast([data], _options(seconds))
        while not work.is_completed():
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(POLL_SECONDS)
        work.wait()
        torch.cuda.current_stream().synchronize()


_BROADCAST: dict[str, Callable[[Any, Tensor, float], None]] = {GLOO: _gloo_broadcast, NCCL: _nccl_broadcast}


def _gloo_group(store: Any, rank: int, own_address: str, seconds: float) -> Any:
    """`seconds`: to connect. A thread that waits for an end that never comes ends then; each broadcast has its own limit."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
    options._timeout, options._threads = timedelta(seconds=seconds), 1
    return ProcessGroupGloo(store, rank, SIZE, options)


def _nccl_group(store: Any, rank: int, own_address: str, seconds: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_SECONDS)
    with torch.cuda.device(NCCL_DEVICE), _nccl_settings():
        return ProcessGroupNCCL(store, rank, SIZE, options)


@contextmanager
def _nccl_settings() -> Any:
    """Of this group alone: they are read when it is made."""
    with _environment:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


_GROUP: dict[str, Callable[[Any, int, str, float], Any]] = {GLOO: _gloo_group, NCCL: _nccl_group}


class Rendezvous:
    """Where the two find each other: a store in the trainer's process, on the address by which it reaches the server."""

    def __init__(self, server_host: str, server_port: int, key: str, seconds: float) -> None:
        self.key, self.address = key, address_towards(server_host, server_port)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        listener = socket.create_server((self.address, 0), family=family)  # on this address, not on all of them
        self.port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            self.address,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def pair(self, backend: str, seconds: float, device: torch.device) -> Pair:
        """The trainer's end; returns when the server's is there."""
        return _pair(backend, self._store, self.key, SENDER, self.address, seconds, device)


def join(backend: str, address: str, port: int, key: str, seconds: float) -> Pair:
    """The server's end."""

    def connect() -> Any:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)

    store = within(seconds, "The connection to the trainer's store", connect)
    device = torch.device("cuda", NCCL_DEVICE) if backend == NCCL else torch.device("cpu")
    return _pair(backend, store, key, RECEIVER, address_towards(address, port), seconds, device)


def _pair(
    backend: str, store: Any, key: str, rank: int, own_address: str, seconds: float, device: torch.device
) -> Pair:
    named = dist.PrefixStore(key, store)  # the key travels over HTTP: a stranger at the store does not know it
    group = within(seconds, "Making the group", lambda: _GROUP[backend](named, rank, own_address, seconds))
    pair = Pair(backend, group, store, device)
    try:
        pair.broadcast(pair.buffer(1).zero_(), seconds)  # connects, and shows that both ends are there
    except TransportFailed:
        pair.close()
        raise
    return pair


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which packets to that one would go; none is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return probe.getsockname()[0]
