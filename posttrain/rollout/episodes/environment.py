"""Environments: objects with a state that an episode plays with. Public methods are tools, `reset` begins an episode.

    class Guessing:
        def reset(self, secret, **row):          # the columns of the row; may be async
            self.secret = secret
            return "Guess a number."             # goes to the end of the prompt's last message; or None, or an image, or parts
        def guess(self, number: int) -> str:     # a tool, described by its docstring
            ...
        def get_reward(self) -> float:           # optional, may be async: a reward named after the class
            ...

Instances are pooled: one serves one episode at a time and is reset for the next one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.images.lazy_picture import with_pictures_opened
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.conversation import as_parts, is_image
from posttrain.rewards.runtime.invoke import Wants, is_async
from posttrain.rollout.episodes.call_threads import Pending
from posttrain.rollout.episodes.tool_results import kept_parts, says_images
from posttrain.rollout.episodes.tools import RunningCall, Tool, Toolbox
from posttrain.rollout.prompt_rows import PromptRow, with_pictures

RESET, GET_REWARD = "reset", "get_reward"
COLUMN = "environment"
"""The column that chooses, where there are several."""
ONLY = ""
"""Name of the environment where there is one."""

Factory = Callable[[], Any]


class EnvironmentKind:
    """What one factory makes: its tools, its reward, and the instances that are free."""

    def __init__(self, name: str, factory: Factory, shared: Toolbox) -> None:
        """`shared` are the tools that belong to no environment; its limits hold for the methods too."""
        if not callable(factory):
            raise TypeError(f"`environment_factory` must be callable without arguments; {factory!r} is not.")
        self.name, self.factory, self.shared = name, factory, shared
        first = factory()
        self.cls = type(first)
        if not callable(getattr(first, RESET, None)):
            raise TypeError(f"An environment needs a method `reset`; {self.cls.__name__} has none.")
        self.methods = [
            Tool.of(getattr(first, method), owner=self.cls.__name__)
            for method, _ in inspect.getmembers(self.cls, inspect.isroutine)
            if not method.startswith("_") and method not in (RESET, GET_REWARD)
        ]
        self.wants = Wants(first.reset)
        self.shows_images = says_images(first.reset) or any(tool.shows_images for tool in self.methods)
        self.has_reward = callable(getattr(first, GET_REWARD, None))
        self.schemas = self._toolbox(first).schemas  # and a refusal of two tools of one name
        self._free = [first]
        self.made = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the factory makes its instances."""
        return EnvironmentKind, (self.name, self.factory, self.shared)

    @property
    def needed_columns(self) -> list[str]:
        """Columns that `reset` cannot do without."""
        return sorted(self.wants.required - {"prompt"})

    def take(self) -> Environment:
        if not self._free:
            self.made += 1
        instance = self._free.pop() if self._free else self.factory()
        return Environment(self, instance, self._toolbox(instance))

    def give_back(self, environment: Environment) -> None:
        """For another episode; an instance in which a call still runs is not used again."""
        if not environment.is_busy:
            self._free.append(environment.instance)

    def _toolbox(self, instance: Any) -> Toolbox:
        bound = [Tool(tool.name, tool.schema, getattr(instance, tool.name)) for tool in self.methods]
        limits = {"timeout": self.shared.timeout, "max_result": self.shared.max_result, "images": self.shared.images}
        return Toolbox([*self.shared.tools.values(), *bound], self.shared.threads, **limits)


class Environment:
    """One instance during one episode."""

    def __init__(self, kind: EnvironmentKind, instance: Any, toolbox: Toolbox) -> None:
        self.kind, self.instance, self.toolbox = kind, instance, toolbox
        self._started: list[Pending] = []

    @property
    def is_busy(self) -> bool:
        """Whether a call that was given up still runs in it."""
        return any(call.hangs or not call.over.is_set() for call in self._started)

    def start_reset(self, row: PromptRow) -> Pending:
        offered = with_pictures_opened({"prompt": with_pictures(row.prompt, row.pictures), **row.columns})
        given = {name: value for name, value in offered.items() if self.kind.wants.accepts(name)}
        runs, runs_async = functools.partial(self._reset, given), is_async(self.instance.reset)
        self._started = [self.toolbox.threads.start(runs, self.toolbox.timeout, runs_async)]
        return self._started[0]

    def _reset(self, given: dict[str, Any]) -> Any:
        observation = self.instance.reset(**given)
        return self._awaited(observation) if inspect.isawaitable(observation) else self._observed(observation)

    async def _awaited(self, observation: Any) -> Any:
        return self._observed(await observation)

    def _observed(self, observation: Any) -> Any:
        """With its images kept, where it runs: to decode pictures must not hold up other episodes."""
        parts = kept_parts(observation, self.toolbox.images)
        return observation if parts is None else parts

    def start(self, name: Any, arguments: Any) -> RunningCall:
        """A call of one of its tools; none while an earlier one hangs in it, since two may not be safe to run at once."""
        if any(call.hangs for call in self._started):
            call = self.toolbox.start(None, {})
            call.call.name = str(name)
            call.fault = "An earlier call is still running; nothing else can be done meanwhile."
            return call
        running = self.toolbox.start(name, arguments)
        if running.pending is not None:
            self._started.append(running.pending)
        return running


class Environments:
    """All kinds of a run, and the instances that episodes hold."""

    def __init__(self, factories: Factory | Mapping[str, Factory], shared: Toolbox) -> None:
        self.several = isinstance(factories, Mapping)
        if self.several and not factories:
            raise ValueError("`environment_factory` is an empty dict: there is no environment.")
        named = factories if self.several else {ONLY: factories}
        self.kinds = {name: EnvironmentKind(name, factory, shared) for name, factory in named.items()}
        self._in_use: list[Environment] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_in_use": []}

    def take(self, row: PromptRow) -> Environment:
        name = row.columns[COLUMN] if self.several else ONLY
        self._in_use.append(self.kinds[name].take())
        return self._in_use[-1]

    def give_back(self, instances: Iterable[Any]) -> None:
        """Their episodes are over and have their rewards."""
        over = {id(instance) for instance in instances}
        for environment in [one for one in self._in_use if id(one.instance) in over]:
            environment.kind.give_back(environment)
            self._in_use.remove(environment)

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward for each class that has `get_reward`, named after it; samples of others get None."""
        classes = dict.fromkeys(kind.cls for kind in self.kinds.values() if kind.has_reward)
        return [reward_of(cls) for cls in classes]


@dataclass(frozen=True)
class PlayedElsewhere:
    """In the place of an environment that another process has: what it said there."""

    cls: str
    reward: float | None = None
    error: str | None = None

    def get_reward(self) -> float | None:
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.reward


def name_of_class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def reward_of(cls: type) -> Callable[..., Any]:
    """A reward function that asks the environments of one class. Each is asked on its own, so that they do not wait for another."""

    async def reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
        return list(await asyncio.gather(*[_asked(environment, cls) for environment in environments]))

    reward.__name__, reward.asks_environments_only = cls.__name__, True
    return reward


async def _asked(environment: Any, cls: type) -> float | None:
    if isinstance(environment, PlayedElsewhere):
        return environment.get_reward() if environment.cls == name_of_class(cls) else None
    if type(environment) is not cls:
        return None
    if is_async(environment.get_reward):
        return await environment.get_reward()
    return await asyncio.to_thread(environment.get_reward)


def extended_prompt(prompt: Sequence[dict[str, Any]], observation: Any) -> list[dict[str, Any]]:
    """The prompt with what `reset` returned at the end of its last message."""
    added = _parts(observation)
    *before, last = prompt
    content = last.get("content") or ""
    parts = [*([] if content == "" else _parts(content)), *added]
    if not any(map(is_image, parts)):
        return [*before, {**last, "content": "".join(part["text"] for part in parts)}]
    return [*before, {**last, "content": parts}]


def _parts(blocks: Any) -> list[dict[str, Any]]:
    """Content blocks as parts of texts and images; a sentence where there is something else."""
    parts = as_parts(list(blocks) if isinstance(blocks, tuple) else blocks)
    if not isinstance(parts, Sequence):
        raise TypeError(
            f"`reset` returned a {type(blocks).__name__}; it may return a text, an image, a list of both or None."
        )
    for part in parts:
        is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
        if not is_text and not (is_image(part) and isinstance(part.get("image"), RowImage)):
            raise TypeError(f"`reset` returned a block that is neither text nor image: {str(part)[:100]}.")
    return [part if is_image(part) else {"type": "text", "text": part["text"]} for part in parts]
