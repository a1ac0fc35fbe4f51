"""Two tokenisations of one text, aligned by its bytes: what a student and a teacher of another vocabulary can be compared at.

A group is a run of tokens on either side that covers the same bytes, and the smallest such: it ends at the first byte where a token
ends on both sides. Groups follow one another without a gap. Where a group begins, both models have read the same text and say what
comes next: their distributions can be compared there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Group(NamedTuple):
    """Tokens `student` and `teacher` of the two sides that cover `text`, each as (first, one past the last)."""

    student: tuple[int, int]
    teacher: tuple[int, int]
    text: bytes


@dataclass(frozen=True)
class Alignment:
    groups: tuple[Group, ...]
    sizes: tuple[int, int]  # tokens of each side

    @property
    def is_whole(self) -> bool:
        """Whether every token of both sides is in a group."""
        return self.sizes == ((self.groups[-1].student[1], self.groups[-1].teacher[1]) if self.groups else (0, 0))

    @property
    def boundaries(self) -> list[tuple[int, int]]:
        """Tokens that both models are asked to foretell from the same text: the first of each group, and behind the last one."""
        places = [(0, 0), *((group.student[1], group.teacher[1]) for group in self.groups)]
        return [place for place in places if place[0] < self.sizes[0] and place[1] < self.sizes[1]]


def align(student: Sequence[bytes], teacher: Sequence[bytes]) -> Alignment:
    """Align the bytes of the tokens of two sides, as far as the texts agree.

    A tokenizer that puts a space before every text has one byte more at the beginning, which is left out. Tokens without bytes, as
    special ones are, belong to the group that begins behind them.
    """
    ours, theirs = b"".join(student), b"".join(teacher)
    ahead = _leading_space(ours, theirs), _leading_space(theirs, ours)
    ours, theirs = ours[ahead[0] :], theirs[ahead[1] :]
    agreed = next((place for place, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    ends = [_ends(pieces, skipped) for pieces, skipped in zip((student, teacher), ahead)]
    groups, first, begin = [], (0, 0), 0
    for end in sorted(ends[0].keys() & ends[1].keys()):
        if not begin < end <= agreed:
            continue
        stop = ends[0][end], ends[1][end]
        groups.append(Group((first[0], stop[0]), (first[1], stop[1]), ours[begin:end]))
        first, begin = stop, end
    return Alignment(tuple(groups), (len(student), len(teacher)))


def _leading_space(text: bytes, other: bytes) -> int:
    """1 where `text` is `other` behind a space, as far as both go."""
    return int(text[:1] == b" " and other[:1] not in (b" ", b""))


def _ends(pieces: Sequence[bytes], skipped: int) -> dict[int, int]:
    """Byte at which tokens end -> one past the first of them that ends there."""
    found: dict[int, int] = {}
    for place, end in enumerate(accumulate(map(len, pieces)), 1):
        found.setdefault(end - skipped, place)
    return found
