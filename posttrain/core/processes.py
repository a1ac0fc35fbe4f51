"""What the processes of a run tell each other, where it is not a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
WAITS, HERE = "waits", "here"
WORD_BYTES = 2048
RESTART = "The run ends here: `resume_from_checkpoint=True` continues it."


class ProcessLost(RuntimeError):
    """Another process of the run has failed or ended."""


def of_every_process(mine: T, world_size: int, group: Any = None) -> list[T]:
    """What each process (of a group) has to say, in the order of the processes. Collective when there are several."""
    if world_size == 1:
        return [mine]
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine, group=group)
    return every


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """An error of a collective whose other end is gone says so in a sentence."""
    try:
        yield
    except RuntimeError as error:
        if "gloo/transport" not in str(error) and not isinstance(error, dist.DistBackendError | dist.DistNetworkError):
            raise
        raise ProcessLost(
            f"Another process of this run has ended, or answers no more, and its own log says why. {RESTART}"
        ) from error


class RollCall:
    """For processes of which each waits for something of its own, perhaps for hours.

    In a collective those that have it already would be ended by its watchdog, and a process that has died would not be missed. So
    every few seconds each says to the first whether it still waits, and the first tells all of them who is missing.
    """

    def __init__(self, rank: int, world_size: int, seconds: float) -> None:
        """Collective. A process that says nothing for so many `seconds` counts as lost."""
        self.rank, self.world_size, self.seconds = rank, world_size, seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)) if world_size > 1 else None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around a wait of each process's own: all leave it at once, or all with an error."""
        if self._group is None:
            yield
            return
        try:
            yield
        except ProcessLost:
            raise
        except Exception as error:
            with contextlib.suppress(ProcessLost):
                self._round(f"Process {self.rank} has failed: {type(error).__name__}: {error}")
            raise
        while self._round(HERE) != HERE:
            pass

    def waits(self) -> None:
        """To be called every few seconds by a process that still waits."""
        if self._group is not None:
            self._round(WAITS)

    def _round(self, word: str) -> str:
        """Every process says WAITS, HERE or what is wrong; the answer is HERE where all said so."""
        if self.rank == 0:
            words = [word, *(self._received_from(rank) for rank in range(1, self.world_size))]
            answer = next((said for said in words if said not in (WAITS, HERE)), WAITS if WAITS in words else HERE)
            for rank in range(1, self.world_size):
                self._say(answer, rank)
        else:
            self._say(word, 0)
            answer = self._received_from(0)
        if answer not in (WAITS, HERE):
            raise ProcessLost(f"{answer.rstrip('.')}. {RESTART}")
        return answer

    def _say(self, word: str, rank: int) -> None:
        content = word.encode()[:WORD_BYTES].ljust(WORD_BYTES, b"\0")
        with contextlib.suppress(RuntimeError):  # a process that is gone is noticed when its message is received
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), rank, self._group)

    def _received_from(self, rank: int) -> str:
        received = torch.empty(WORD_BYTES, dtype=torch.uint8)
        try:
            dist.recv(received, rank, self._group)
        except RuntimeError as error:
            is_late = "timed out" in str(error).lower()
            how = f"has said nothing for {self.seconds:g} s" if is_late else "has ended without a word"
            return f"Process {rank} {how}, while others waited for rollouts: its own log says why."
        return received.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
