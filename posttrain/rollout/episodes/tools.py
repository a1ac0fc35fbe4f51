"""Toolbox: functions that a model may call, described to it by their docstrings and type hints.

Whatever a call does ends in a text for the model: the result, or {"error": "..."} where there is no such tool, the arguments
do not fit, the tool raised or took too long.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from posttrain.rewards.runtime.invoke import is_async
from posttrain.rollout.episodes.call_threads import CallThreads, CallTimeout, Pending
from posttrain.rollout.rollout import ToolCall

LONGEST_ERROR = 2000
MAX_ITEMS = 100_000  # of what a tool yields: it may have no end
Schema = dict[str, Any]


class ToolFault(Exception):
    """A call that cannot be made; its text is for the model."""


@dataclass(frozen=True)
class Tool:
    """One function, and how it is described to the model."""

    name: str
    schema: Schema
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any], owner: str = "") -> Tool:
        """Reads docstring and type hints; a sentence where something is missing. `owner`: the class of a method."""
        name = getattr(function, "__name__", None)
        if not callable(function) or name is None or name == "<lambda>":
            raise TypeError(f"A tool is a function with a name, a docstring and type hints; {function!r} is not one.")
        full_name = f"{owner}.{name}" if owner else name
        try:
            schema = get_json_schema(function)
        except Exception as error:  # several classes, some of them private to transformers
            raise ValueError(
                f"Tool {full_name} cannot be described to the model: {' '.join(str(error).split()).rstrip('.')}. It needs a "
                "docstring with a line for each argument under `Args:`, and type hints."
            ) from error
        return cls(name, schema, function)

    @property
    def is_async(self) -> bool:
        return is_async(self.function)

    @property
    def properties(self) -> dict[str, Any]:
        return self.schema["function"]["parameters"].get("properties", {})


class Toolbox:
    """Tools by name. `parallel`: the calls of one turn may run at the same time; otherwise one after the other."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        threads: CallThreads | None = None,
        *,
        timeout: float | None = 60.0,
        max_result: int = 10_000,
        parallel: bool = False,
    ) -> None:
        self.threads = threads or CallThreads()
        self.timeout, self.max_result, self.parallel = timeout, max_result, parallel
        self.tools: dict[str, Tool] = {}
        for given in tools:
            tool = given if isinstance(given, Tool) else Tool.of(given)
            if tool.name in self.tools:
                raise ValueError(f"There are two tools called {tool.name!r}; a model could not tell them apart.")
            self.tools[tool.name] = tool

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self.tools.values()]

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """Name of a tool -> its arguments, as the parser of responses wants them."""
        return {name: tool.properties for name, tool in self.tools.items()}

    def start(self, name: Any, arguments: Any) -> RunningCall:
        """Begin a call; nothing that the model wrote raises here."""
        call = ToolCall(clean(str(name)), as_json(arguments))
        try:
            function, runs_async = self._bound(name, arguments)
        except ToolFault as fault:
            return RunningCall(self, call, None, str(fault))
        return RunningCall(self, call, self.threads.start(function, self.timeout, runs_async))

    def _bound(self, name: Any, arguments: Any) -> tuple[Callable[[], Any], bool]:
        tool = self.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            raise ToolFault(f"There is no tool {str(name)[:100]!r}. Known are: {', '.join(self.tools) or 'none'}.")
        if not isinstance(arguments, dict):
            raise ToolFault(f"The arguments of {name} must be an object, not {type(arguments).__name__}.")
        try:
            inspect.signature(tool.function).bind(**arguments)
        except TypeError as error:
            raise ToolFault(f"Wrong arguments for {name}: {error}.") from error
        if tool.is_async:
            return functools.partial(self._answered_async, tool, arguments), True
        return functools.partial(self._answered, tool, arguments), False

    def _answered(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """The result as a text, made where the tool runs: ten megabytes of JSON must not hold up anybody else."""
        result = tool.function(**arguments)
        return self._awaited(result) if inspect.isawaitable(result) else text_of(result, self.max_result)

    async def _answered_async(self, tool: Tool, arguments: dict[str, Any]) -> str:
        return text_of(await tool.function(**arguments), self.max_result)

    async def _awaited(self, result: Any) -> str:
        return text_of(await result, self.max_result)


@dataclass
class RunningCall:
    """A call of a tool on its way, or one that was over before it began (`fault`)."""

    toolbox: Toolbox
    call: ToolCall
    pending: Pending | None
    fault: str | None = None

    @property
    def is_over(self) -> bool:
        return self.pending is None or self.toolbox.threads.is_over(self.pending)

    def finished(self) -> ToolCall:
        """The call with what came of it."""
        call, pending = self.call, self.pending
        if pending is None:
            return self._with_error(self.fault)
        call.seconds = pending.seconds
        if pending.error is not None:
            return self._with_error(describe_error(pending.error))
        call.result = pending.result
        return call

    def given_up(self) -> ToolCall:
        """The call of an episode that is over; its result is no longer wanted."""
        if self.is_over:
            return self.finished()
        self.toolbox.threads.drop(self.pending)
        self.call.seconds = self.pending.seconds
        return self._with_error("The episode ended before the call did.")

    def _with_error(self, fault: str) -> ToolCall:
        self.call.error = clean(fault[:LONGEST_ERROR])
        self.call.result = json.dumps({"error": self.call.error}, ensure_ascii=False)
        return self.call


def text_of(result: Any, limit: int) -> str:
    """A result as a text of at most `limit` characters: texts as they are, anything else as JSON."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_plain)
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut: {len(text):,} characters, of which the first {limit:,} are shown]"
    return clean(text)


def clean(text: str) -> str:
    """Without halves of characters, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_json(arguments: Any) -> str:
    return clean(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str))


def describe_error(error: BaseException) -> str:
    if isinstance(error, CallTimeout):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose own text fails
        return type(error).__name__


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as lists and numbers, what is iterated as a list; anything else as its text.

    What has no text of its own would be shown with its address in memory: never the same twice, and nothing to learn from.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # their own order changes from process to process
    if isinstance(value, Iterator):
        return list(itertools.islice(value, MAX_ITEMS))
    has_text = type(value).__str__ is not object.__str__ or type(value).__repr__ is not object.__repr__
    if not has_text or callable(value) or inspect.isasyncgen(value):
        name = type(value).__name__
        raise TypeError(f"The tool returned a {name}, which has no text: return a string, a number, a list or a dict.")
    return str(value)
