"""The transports, besides the body of a request, by which the bytes of a part may arrive: one table, and its description in /info.

Whichever is used, names, shapes and checksums come over HTTP, and the bytes are verified against them.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..bodies import GpuPlace, GroupPlace, Rendezvous, SharedPlace, read
from ..errors import Busy, FieldError, TooLarge, TransportFailed
from ..wire import collective, cuda_ipc
from ..wire.host_memory import HostMemory
from ..wire.payload import COLLECTIVE, CUDA_IPC, SHARED_MEMORY, Buffer
from ..wire.shared_blocks import SharedFolder, host_id

log = logging.getLogger(__name__)


class Receiver:
    """One transport, on the server's side, whose `receive` copies bytes to where this process has them for itself.

    `TransportFailed` where they do not come, `FieldError` for a place that is none."""

    def __init__(self, shared_folder: Path | None) -> None: ...

    def describe(self) -> dict[str, Any] | None:
        """What a trainer has to know to decide whether it can use this transport; None: none can."""

    def receive(self, place: dict[str, Any], nbytes: int, seconds: float) -> Any: ...

    def close(self) -> None: ...


class SharedMemoryReceiver(Receiver):
    """To host memory, where a version is staged."""

    def __init__(self, shared_folder: Path | None) -> None:
        self._folder: SharedFolder | None = None
        self._memory = HostMemory()
        if shared_folder is not None:
            try:
                self._folder = SharedFolder(shared_folder)
            except OSError as error:
                log.warning("No weights are accepted through shared memory: %s", error)

    def describe(self) -> dict[str, Any] | None:
        return self._folder.describe() if self._folder else None

    def receive(self, place: dict[str, Any], nbytes: int, seconds: float) -> Buffer:
        """In memory that serves the next part when this one is staged."""
        name = read(place, SharedPlace, "`place`").name
        if self._folder is None:
            raise TransportFailed("This server has no folder for shared blocks.")
        into = self._memory.take(1 << (nbytes - 1).bit_length())[:nbytes]  # few sizes, so that it is found again
        self._folder.read(name, into)
        return into

    def close(self) -> None:
        if self._folder is not None:
            self._folder.sweep()
            self._folder.close()
            self._folder = None


class CudaIpcReceiver(Receiver):
    """From memory of a GPU to memory of the same GPU, on the way into the engine."""

    def describe(self) -> dict[str, Any] | None:
        gpus = cuda_ipc.gpu_ids()
        return {"gpus": gpus} if gpus else None

    def receive(self, place: dict[str, Any], nbytes: int, seconds: float) -> Tensor:
        return cuda_ipc.copied(dict(read(place, GpuPlace, "`place`")), nbytes)


class CollectiveReceiver(Receiver):
    """By a group with the trainer, to where its backend has memory: a GPU with NCCL. One group at a time: the next one takes the
    place of the last."""

    def __init__(self, shared_folder: Path | None) -> None:
        self._pair: collective.Pair | None = None
        self._key = ""
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any] | None:
        backends = collective.available_backends()
        return {"backends": backends} if backends else None

    def join(self, rendezvous: Rendezvous) -> dict[str, Any]:
        """Come to where a trainer waits; returns when the group is made."""
        if rendezvous.backend not in collective.available_backends():
            raise TransportFailed(f"This server has no {rendezvous.backend}.")
        with self._alone():
            self._drop()
            where = (rendezvous.address, rendezvous.port, rendezvous.key)
            self._pair = collective.join(rendezvous.backend, *where, rendezvous.deadline_s)
            self._key = rendezvous.key
        return {"group": self._key}

    def receive(self, place: dict[str, Any], nbytes: int, seconds: float) -> Tensor:
        key = read(place, GroupPlace, "`place`").group
        with self._alone():
            if self._pair is None or key != self._key:
                raise TransportFailed("The group that was named does not exist, or no longer.")
            try:
                buffer = self._pair.buffer(nbytes)
                self._pair.broadcast(buffer, seconds)
                return buffer.clone()  # the next part comes to the same buffer, and a late thread may write there
            except Exception:
                self._drop()  # the two ends may be out of step
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise Busy("Another part is being received from the group.")
        try:
            yield
        finally:
            self._lock.release()

    def _drop(self) -> None:
        if self._pair is not None:
            self._pair.close()
        self._pair, self._key = None, ""

    def close(self) -> None:
        self._drop()


RECEIVERS: dict[str, Callable[[Path | None], Receiver]] = {
    SHARED_MEMORY: SharedMemoryReceiver,
    CUDA_IPC: CudaIpcReceiver,
    COLLECTIVE: CollectiveReceiver,
}
"""All transports on this side; HTTP itself needs none."""
STREAMED = frozenset({CUDA_IPC, COLLECTIVE})
MAX_STREAMED_BYTES = 16 << 30
"""Of one part of a stream, which holds whole tensors: the embedding of a large model is one."""


class Transports:
    """The receivers of one server."""

    def __init__(self, shared_folder: Path | None, most_bytes: int) -> None:
        """`shared_folder` None: no shared memory. `most_bytes`: of one part that is staged."""
        self._most_bytes = most_bytes
        self._receivers: dict[str, Any] = {name: make(shared_folder) for name, make in RECEIVERS.items()}
        self._instance = secrets.token_hex(8)

    def describe(self) -> dict[str, Any]:
        """For /info. `instance`: this process, so that a trainer notices one that was started anew."""
        found = {name: receiver.describe() for name, receiver in self._receivers.items()}
        ways = {name: fields for name, fields in found.items() if fields is not None}
        return {"host": host_id(), "instance": self._instance, "ways": ways}

    def receive(self, name: str, place: dict[str, Any], nbytes: int, seconds: float) -> Any:
        """The bytes of a part, in memory of this process's own: a tensor of bytes for a stream, host memory for a part to stage."""
        most = MAX_STREAMED_BYTES if name in STREAMED else self._most_bytes
        if nbytes > most:
            raise TooLarge(f"The part has {nbytes} bytes; this server takes at most {most}.")
        if nbytes == 0:
            raise FieldError("The part has no data that could be fetched; send it with others.")
        return self._receivers[name].receive(place, nbytes, seconds)

    def join(self, rendezvous: Rendezvous) -> dict[str, Any]:
        """Let the server be one end of a trainer's group."""
        return self._receivers[COLLECTIVE].join(rendezvous)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
