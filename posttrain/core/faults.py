"""Faults on request, at the real places: `POSTTRAIN_FAULTS="kill:backward:7,oserror:save.write:3,slow:save.file:*"`.

Each entry is action:point:count. The action happens when the process passes the point for the count-th time, or every time with
`*`. Nothing happens, and nothing is counted, unless the environment variable is set (or `arm` is called, as forked tests do). This
is for tests of the library and of what is built around it: a schedule that has survived its faults can be trusted with a run.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable

VARIABLE = "POSTTRAIN_FAULTS"
SLOW_SECONDS = 0.5
EVERY = "*"

POINTS = {
    "data": "the batches of a step have been made",
    "forward": "the model has answered, the loss has not been computed",
    "backward": "autograd has begun",
    "gradient": "the gradient of a whole step is there and has not been looked at; the one point where `nan` works",
    "step.before": "right before the optimizer steps",
    "step.after": "the optimizer has stepped, the schedule has not",
    "log": "metrics are about to be written to their file",
    "log.after": "metrics have been written to their file",
    "generate": "rollouts are about to be written",
    "score": "rollouts have been written, their rewards may still be worked on",
    "journal": "beside training: finished groups are on disk, that a step takes them is not",
    "save.capture": "half of a checkpoint's state has been put aside",
    "save.file": "between two files of a checkpoint",
    "save.write": "inside a file of tensors, its header written",
    "save.manifest": "all files are there, the manifest is not",
    "save.rename": "the manifest is there, the checkpoint still has its temporary name",
    "save.published": "the checkpoint has its name, old ones have not been rotated",
    "save.rotate": "an old checkpoint has been put aside and is about to be deleted",
    "save.done": "the save is complete",
}
"""Every point and where it is. A test runs the library and asserts that each is passed."""


def _kill(point: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(point: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _interrupt(point: str) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _no_space(point: str) -> None:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (asked for at {point} by {VARIABLE})")


def _sleep(point: str) -> None:
    time.sleep(SLOW_SECONDS)


def _nothing(point: str) -> None:
    """The caller of `fault_point` acts on its answer."""


ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "term": _terminate,
    "int": _interrupt,
    "oserror": _no_space,
    "slow": _sleep,
    "nan": _nothing,
}

_plan: dict[str, list[tuple[str, str]]] | None = None  # point -> [(count or *, action)]; None: off
passed: Counter[str] = Counter()


def arm(wanted: str | None) -> None:
    """Set the faults of this process from here on; None or an empty text turns them off."""
    global _plan
    passed.clear()
    if not wanted:
        _plan = None
        return
    plan: dict[str, list[tuple[str, str]]] = {}
    for entry in wanted.split(","):
        action, point, count = _checked(entry.strip())
        plan.setdefault(point, []).append((count, action))
    _plan = plan


def _checked(entry: str) -> tuple[str, str, str]:
    parts = entry.split(":")
    if len(parts) != 3:
        raise ValueError(f"{VARIABLE}: {entry!r} is not of the form action:point:count.")
    action, point, count = parts
    if action not in ACTIONS:
        raise ValueError(f"{VARIABLE}: {action!r} in {entry!r} is no action; known are {', '.join(ACTIONS)}.")
    if point not in POINTS:
        raise ValueError(f"{VARIABLE}: {point!r} in {entry!r} is no point; known are {', '.join(POINTS)}.")
    if count != EVERY and not (count.isdigit() and int(count) > 0):
        raise ValueError(f"{VARIABLE}: {count!r} in {entry!r} must be a positive number or {EVERY}.")
    if action == "nan" and point != "gradient":
        raise ValueError(f"{VARIABLE}: {entry!r}: `nan` works at the point `gradient` only.")
    return action, point, count


def armed() -> bool:
    return _plan is not None


def fault_point(name: str) -> bool:
    """Pass a point. True where a `nan` was asked for, which is the caller's to produce."""
    if _plan is None:
        return False
    passed[name] += 1
    due = [action for count, action in _plan.get(name, ()) if count in (EVERY, str(passed[name]))]
    for action in due:
        ACTIONS[action](name)
    return "nan" in due


def in_backward(gradient: object) -> None:
    """A hook for the loss: autograd calls it when it begins."""
    fault_point("backward")


arm(os.environ.get(VARIABLE))
