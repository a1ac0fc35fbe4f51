"""StreamedPrompts: the prompts of a stream, by the number that each of them has in the run.

A stream has no length and is read in its own order, once after the other: when it ends, its next epoch begins. Every process reads
all of it and keeps what it is asked for, so a prompt has one number for all of them. After a resume the stream is read again up to
where the run was; what it says must not depend on when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from posttrain.core.sample import Unit
from posttrain.data.store.streaming import PreparedStream
from posttrain.rollout.prompt_rows import PromptRow, prompt_row


class StreamedPrompts:
    """In the place of PromptRows. It goes forward only: numbers are asked for in batches, each above all before it."""

    def __init__(self, prepared: PreparedStream) -> None:
        self.prepared = prepared
        self.rewind()

    def rewind(self) -> None:
        """Begin with the first prompt of the run again."""
        self._reader = self._endless()
        self._next = 0  # number of the prompt that the reader gives next

    @property
    def report(self) -> Any:
        """What became of the rows that were read in the current epoch."""
        return self.prepared.report

    def take(self, numbers: Iterable[int]) -> dict[int, PromptRow]:
        """Number -> its prompt. Those in between belong to other processes, or to the time before a resume."""
        wanted = sorted(set(numbers))
        if wanted and wanted[0] < self._next:
            raise RuntimeError(f"Prompt {wanted[0]} of the stream is asked for, but {self._next} were read already.")
        found = {}
        for number in wanted:
            while self._next <= number:
                row, unit = next(self._reader)
                self._next += 1
            found[number] = prompt_row(unit, row, self.prepared.detection)
        return found

    def _endless(self) -> Iterator[tuple[Any, Unit]]:
        epoch = 0
        while True:
            self.prepared.set_epoch(epoch)
            before = self._next
            yield from self.prepared.rows_and_units()
            if self._next == before:
                raise ValueError(
                    f"Nothing is left of {self.prepared.name}: in epoch {epoch} of the stream there was no usable prompt."
                )
            epoch += 1


class StreamOrder:
    """The order of a stream's prompts: as they come. In the place of PromptStream."""

    num_rows = None  # not known

    def row(self, number: int) -> int:
        return number
