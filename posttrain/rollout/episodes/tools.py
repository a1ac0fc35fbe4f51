"""Toolbox: functions that a model may call, described to it by their docstrings and type hints.

Whatever a call does ends in something that the model reads: the result, or {"error": "..."} where there is no such tool, the
arguments do not fit, the tool raised or took too long.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema

from posttrain.rewards.runtime.invoke import is_async
from posttrain.rollout.episodes.call_threads import CallThreads, CallTimeout, Pending
from posttrain.rollout.episodes.tool_results import Content, ShownImages, clean, content_of, raise_if_fatal, says_images
from posttrain.rollout.rollout import ToolCall

LONGEST_ERROR = 2000
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
    def shows_images(self) -> bool:
        """By its annotation; tools may return some without a word about it."""
        return says_images(self.function)

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
        images: ShownImages | None = None,
    ) -> None:
        """`images`: what becomes of images that tools return; None: the run shows none."""
        self.threads = threads or CallThreads()
        self.timeout, self.max_result, self.parallel, self.images = timeout, max_result, parallel, images
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
        return functools.partial(self._answered, tool, arguments), tool.is_async

    def _answered(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """The result as the model reads it, made where the tool runs: ten megabytes of JSON must not hold up other episodes."""
        result = tool.function(**arguments)
        return self._awaited(result) if inspect.isawaitable(result) else self.content_of(result)

    async def _awaited(self, result: Any) -> Content:
        return self.content_of(await result)

    def content_of(self, result: Any) -> Content:
        return content_of(result, self.max_result, self.images)


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
        raise_if_fatal(pending.error, f"Tool {call.name}")
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


def as_json(arguments: Any) -> str:
    return clean(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str))


def describe_error(error: BaseException) -> str:
    if isinstance(error, CallTimeout):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose own text fails
        return type(error).__name__
