"""One call of one reward function: which arguments it gets, what it logs, what its answer means. Standard library only.

The same code runs in the workers and in the trainer's process, so a function sees no difference but where it is.
"""

from __future__ import annotations

import functools
import inspect
import time
import traceback
from collections.abc import Callable
from typing import Any

from posttrain.rewards.runtime.values import InvalidAnswer, InvalidValue, entries_of, number_of

OURS = (
    "prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric", "log_failure",
)  # fmt: skip
"""Arguments that the runtime makes; every other one is a column of the dataset."""

ERROR, TIMEOUT, INVALID, CRASH = "error", "timeout", "invalid", "crash"
"""Kinds of failures: it raised, it took too long, its answer cannot be used, its process died."""


class Wants:
    """Which arguments a function accepts, read off its signature once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.everything = True
        self.names: set[str] = set()
        self.required: set[str] = set()
        self.positional: list[str] = []
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some builtins have none: they get everything, as from TRL
            return
        self.everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = {p.name for p in named}
        self.required = {p.name for p in named if p.default is p.empty}
        self.positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]

    def accepts(self, name: str) -> bool:
        return self.everything or name in self.names

    def missing(self, offered: set[str]) -> list[str]:
        """Required arguments that are not offered."""
        return sorted(self.required - offered)


def is_async(function: Callable[..., Any]) -> bool:
    """Is this an async function, a partial of one, or an object whose __call__ is one?"""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class CallLog:
    """What one call hands to `log_extra` and `log_metric`, and to `log_failure` where it names that argument."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.extras: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []
        self.failures: dict[int, tuple[str, str]] = {}

    def log_extra(self, column: str, values: Any) -> None:
        values = list(values)
        if len(values) != self.count:
            raise ValueError(
                f"log_extra({column!r}) got {len(values)} values for the {self.count} samples of this call."
            )
        self.extras[str(column)] = [plain(value) for value in values]

    def log_metric(self, name: str, value: Any) -> None:
        self.metrics.append((str(name), float(value)))

    def log_failure(self, place: int, message: str, kind: str = ERROR) -> None:
        """The sample at `place` could not be judged, whatever stands there in the answer."""
        if kind not in (ERROR, TIMEOUT, INVALID) or not 0 <= place < self.count:
            raise ValueError(
                f"log_failure({place}, ..., {kind!r}) is not about one of the {self.count} samples, or of no known kind."
            )
        self.failures[place] = (kind, str(message))


def plain(value: Any) -> Any:
    """Numbers, text, lists and dicts as they are; arrays as lists; anything else as its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def start_call(function: Callable[..., Any], wants: Wants, arguments: dict[str, Any], log: CallLog) -> Any:
    """Call the function with what it accepts; async functions give an awaitable."""
    offered = {**arguments, "log_extra": log.log_extra, "log_metric": log.log_metric}
    given = {name: value for name, value in offered.items() if wants.accepts(name)}
    if "log_failure" in wants.names:  # not for **kwargs, which TRL's functions have
        given["log_failure"] = log.log_failure
    first = [given.pop(name) for name in wants.positional if name in given]
    return function(*first, **given)


def invoke(function: Callable[..., Any], wants: Wants, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run one call to its end on this thread, and give its answer; nothing that it does is raised."""
    started, log = time.perf_counter(), CallLog(len(arguments["completions"]))
    try:
        returned = start_call(function, wants, arguments, log)
        if inspect.isawaitable(returned):  # a plain function that hands on the awaitable of an async one
            import asyncio  # here and below: half of a worker's start-up, and few need it

            returned = asyncio.run(_awaited(returned))
        return _answer(returned, log, started)
    except BaseException as error:  # whatever the user's function does ends in an answer, SystemExit included
        return _fault(error, started)


async def invoke_async(
    function: Callable[..., Any], wants: Wants, arguments: dict[str, Any], limit: float | None
) -> dict[str, Any]:
    """The same for an async function, cancelled when its time is over."""
    import asyncio

    started, log = time.perf_counter(), CallLog(len(arguments["completions"]))
    try:
        async with asyncio.timeout(limit) as running:
            returned = await start_call(function, wants, arguments, log)
        return _answer(returned, log, started)
    except TimeoutError as error:
        if running.expired():
            return {"fault": [TIMEOUT, timeout_message(limit)], "seconds": time.perf_counter() - started}
        return _fault(error, started)
    except BaseException as error:  # as above
        return _fault(error, started)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def _answer(returned: Any, log: CallLog, started: float) -> dict[str, Any]:
    values = [_entry(entry) for entry in entries_of(returned, log.count)]
    for place, failure in log.failures.items():
        values[place] = {"fault": failure}
    return {"values": values, "extras": log.extras, "metrics": log.metrics, "seconds": time.perf_counter() - started}


def _entry(entry: Any) -> Any:
    try:
        return number_of(entry)
    except InvalidValue as error:
        return {"fault": (INVALID, str(error))}


def _fault(error: BaseException, started: float) -> dict[str, Any]:
    kind, message = (INVALID, str(error)) if isinstance(error, InvalidAnswer) else (ERROR, described(error))
    return {"fault": [kind, message], "seconds": time.perf_counter() - started}


def timeout_message(limit: float | None) -> str:
    return f"it ran longer than {limit:g} s."


def described(error: BaseException, limit: int = 2000) -> str:
    """The error in words and the line of the user's code that raised it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose own text fails
        text = type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return text[:limit] + where
