"""Which rollouts are asked for, and in which order: filters over the index, and a search in the texts."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.view.arrow_numbers import floats, whole
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.questions import Question
from posttrain.view.rollout_files import read_columns
from posttrain.view.rollout_index import Snapshot

FLAGS: dict[str, Callable[[Snapshot], np.ndarray]] = {
    "error": lambda s: s.numbers["error"] > 0,
    "failed_reward": lambda s: s.numbers["failures"] > 0,
    "tool_calls": lambda s: s.numbers["tool_calls"] > 0,
    "tool_error": lambda s: s.numbers["tool_errors"] > 0,
    "truncated": lambda s: s.numbers["truncated"] > 0,
    "masked": lambda s: s.numbers["masked"] > 0,
    "no_advantage": lambda s: s.numbers["advantage"] == 0,
}
"""What can be asked of a rollout by one word."""

RANGES = ("step", "reward", "advantage", "tokens", "mismatch")
SORTS = ("step", "group", "sample", "reward", "advantage", "tokens", "mismatch", "tool_calls", "policy_version")
REWARD = "reward:"
"""Before the name of a reward function, in a sort or a range."""
PROMPT_NAME = re.compile("[0-9a-f]{16}")
TEXT_BYTES = 256 << 20
"""Texts that are kept for the next search."""


@dataclass(frozen=True)
class RolloutQuery:
    """Limits are inclusive; an empty one limits nothing."""

    text: str | None = None
    ranges: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    prompt: int | None = None
    group: int | None = None
    order: str = "-step"

    @classmethod
    def of(cls, question: Question) -> RolloutQuery:
        flags = tuple(question.words_of("flags"))
        unknown = [flag for flag in flags if flag not in FLAGS]
        if unknown:
            raise ViewError(f"There is no flag {unknown[0]!r}; there are {', '.join(FLAGS)}.")
        ranges = {name: (question.number(f"{name}_min"), question.number(f"{name}_max")) for name in RANGES}
        prompt = question.text("prompt")
        return cls(
            text=question.text("q"),
            ranges={name: limits for name, limits in ranges.items() if limits != (None, None)},
            flags=flags,
            prompt=None if prompt is None else prompt_number(prompt),
            group=question.whole("group"),
            order=question.text("sort") or "-step",
        )


def prompt_name(number: int) -> str:
    return f"{int(number):016x}"


def prompt_number(name: str) -> int:
    if not PROMPT_NAME.fullmatch(name):
        raise ViewError(f"prompt={name[:40]!r} is no key of a prompt.")
    return int(name, 16)


class Texts:
    """Prompts and completions by file, the latest ones kept in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, int], tuple[pa.Table, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def of(self, path: Path) -> pa.Table:
        try:
            key = (path, path.stat().st_mtime_ns)  # a resumed run writes other rollouts under the same name
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key][0]
            table = read_columns(path, ["prompt", "completion", "tools"])
        except FileNotFoundError as error:
            raise NotFound("The run has removed these rollouts to make them again.") from error
        with self._lock:
            self._forget(key)
            self._kept[key] = (table, table.nbytes)
            self._bytes += table.nbytes
            while len(self._kept) > 1 and self._bytes > TEXT_BYTES:
                self._forget(next(iter(self._kept)))
        return table

    def _forget(self, key: tuple[Path, int]) -> None:
        _, size = self._kept.pop(key, (None, 0))
        self._bytes -= size


def matching(snapshot: Snapshot, query: RolloutQuery, texts: Texts) -> np.ndarray:
    """Numbers of the rollouts that the query allows, in its order."""
    allowed = np.ones(len(snapshot), dtype=bool)
    for name, (least, most) in query.ranges.items():
        values = snapshot.numbers.get(name, np.zeros(0))
        if least is not None:
            allowed &= values >= least
        if most is not None:
            allowed &= values <= most
    for flag in query.flags if len(snapshot) else ():
        allowed &= FLAGS[flag](snapshot)
    if query.prompt is not None:
        allowed &= snapshot.prompt == np.uint64(query.prompt)
    if query.group is not None and len(snapshot):
        allowed &= snapshot.numbers["group"] == query.group
    found = np.flatnonzero(allowed)
    if query.text:
        found = found[_contain(snapshot, found, query.text, texts)]
    return found[ordering(snapshot, found, query.order)]


def _contain(snapshot: Snapshot, found: np.ndarray, text: str, texts: Texts) -> np.ndarray:
    """(found,) whether prompt or completion holds the text, in whichever case."""
    holds = np.zeros(len(found), dtype=bool)
    for number in np.unique(snapshot.file[found]):
        mine = np.flatnonzero(snapshot.file[found] == number)
        table = texts.of(snapshot.files[number].path)
        inside = [
            floats(whole(pc.match_substring(table.column(name), text, ignore_case=True))) > 0
            for name in ("prompt", "completion")
        ]
        holds[mine] = (inside[0] | inside[1])[snapshot.place[found[mine]]]
    return holds


def ordering(snapshot: Snapshot, found: np.ndarray, order: str) -> np.ndarray:
    """What is not known comes last; what is equal stays in the order of steps, groups and samples."""
    name, is_falling = order.removeprefix("-"), order.startswith("-")
    if name.startswith(REWARD):
        values = snapshot.rewards.get(name.removeprefix(REWARD))
        if values is None:
            raise ViewError(f"There is no reward {name.removeprefix(REWARD)!r} in this run.")
    elif name in SORTS:
        values = snapshot.numbers.get(name, np.zeros(0))
    else:
        raise ViewError(f"Rollouts cannot be sorted by {name!r}, but by {', '.join(SORTS)} or {REWARD}NAME.")
    if not len(found):
        return np.zeros(0, dtype=np.int64)
    keys = -values[found] if is_falling else values[found]
    step, group, sample = (snapshot.numbers[each][found] for each in ("step", "group", "sample"))
    return np.lexsort((sample, group, step, np.nan_to_num(keys), np.isnan(keys)))
