"""ToolEpisode: the model speaks, its calls are run, their results are appended, the model speaks again.

    prompt | what the model wrote ... <stop> | results, generation prompt | what the model wrote ... <stop> | ...
             trained                          foreign, not trained         trained

Episodes do not wait for each other: while the tools of one episode work, the engine writes the turns of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.data.images.streamed_span import as_carried
from posttrain.data.render.conversation import Conversation, RenderError
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.turn_suffix import ToolResult, TurnSuffix
from posttrain.data.rows.message_checks import read_template_kwargs, read_tools
from posttrain.rollout.engines.protocol import ERROR, LENGTH, STOP, Completion, Prompt, SamplingParams
from posttrain.rollout.episodes.call_threads import Pending
from posttrain.rollout.episodes.environment import Environment, extended_prompt
from posttrain.rollout.episodes.episode import columns_of
from posttrain.rollout.episodes.tool_results import raise_if_fatal
from posttrain.rollout.episodes.tools import RunningCall, Toolbox, describe_error
from posttrain.rollout.prompt_rows import PromptRow, shown_pictures
from posttrain.rollout.rollout import POLICY_LOGPS, SAMPLING_LOGPS, Request, Rollout, ToolCall

PREFIX_TOKENS = 64  # of a prompt: its end may open what the turn continues, such as reasoning
MALFORMED = "This call cannot be read: it must be one JSON object in the form that was shown."


@dataclass(frozen=True)
class EpisodeRules:
    """What holds for every episode of a run."""

    renderer: Renderer
    suffix: TurnSuffix | None  # None: there are no tools
    toolbox: Toolbox  # of episodes without an environment
    stop_ids: frozenset[int] = frozenset()
    max_completion: int = 0  # tokens of all turns and results together
    max_rounds: int | None = None  # of calls
    max_prompt: int | None = None  # tokens of a prompt that an environment has changed
    context: int | None = None  # tokens that the model can see
    timeout: float | None = None  # seconds of a whole episode
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    renders_by_row: bool = False  # prompts were encoded without tools, as these depend on the row's environment


@dataclass(frozen=True)
class ToolEpisodes:
    """Makes the episodes of a window; `take_environment` gives the environment of a row, where there are environments."""

    rules: EpisodeRules
    take_environment: Callable[[PromptRow], Environment] | None = None

    def __call__(
        self, rows: Sequence[PromptRow], requests: Sequence[Request], params: SamplingParams
    ) -> list[ToolEpisode]:
        rules = replace(self.rules, stop_ids=frozenset(params.stop_ids), max_completion=params.max_tokens)
        return [ToolEpisode(row, request, rules, self.take_environment) for row, request in zip(rows, requests)]


class ToolEpisode:
    """One rollout with tools, and perhaps an environment."""

    def __init__(
        self,
        row: PromptRow,
        request: Request,
        rules: EpisodeRules,
        take_environment: Callable[[PromptRow], Environment] | None = None,
    ) -> None:
        """`take_environment` gives the environment of a row."""
        self.row, self.request, self.rules = row, request, rules
        self.messages: list[dict[str, Any]] = list(row.prompt)
        self._encoded = row.sample(request.number)
        self.environment: Environment | None = None
        self.calls: list[ToolCall] = []
        self.new_messages: list[dict[str, Any]] = []
        self.finish_reason, self.error, self.masked = STOP, None, False
        self._take_environment = take_environment
        self._parts: list[Completion | Sample] = []  # what the model wrote, and the foreign tokens in between
        self._length = self._sampled = self._rounds = 0
        self._resetting: Pending | None = None
        self._asked: list[tuple[Any, Any]] = []  # (name, arguments) of this turn's calls that have not begun
        self._running: list[RunningCall] = []
        self._answered: list[ToolCall] = []
        self.is_over = False
        self._began: float | None = None
        self._seconds = {"tools": 0.0} if take_environment is None else {"tools": 0.0, "reset": 0.0}
        own_kwargs = read_template_kwargs(row.columns.get("chat_template_kwargs"), "chat_template_kwargs", [])
        self._kwargs = own_kwargs or {}

    # ---- as an Episode -----------------------------------------------------------------------------------------------

    def prompt(self) -> Prompt | None:
        if self._take_environment is not None and self.environment is None:
            self._begin_reset()
        if self._is_late():
            self._end(LENGTH, self._too_late())
        elif self._resetting is not None:
            self._poll_reset()
        elif self._asked or self._running or self._answered:
            self._poll_calls()
        if self.is_over or self._resetting is not None or self._asked or self._running:
            return None
        written = self._sample()
        return Prompt(
            written.input_ids,
            key=self.request.number,
            sample=self.request.sample,
            first_token=self._sampled,
            max_tokens=self.rules.max_completion - self._length,
            images=written.images,
            positions=written.positions,
        )

    @property
    def prompt_ids(self) -> np.ndarray:
        return self._encoded.input_ids

    def on_completion(self, completion: Completion) -> None:
        self._parts.append(completion)
        self._length += len(completion.ids)
        self._sampled += len(completion.ids)
        if self._began is None:  # the time that the first turn waited for the engine does not count
            own = completion.seconds.get("prefill", 0.0) + completion.seconds.get("decode", 0.0)
            self._began = time.monotonic() - own
        for phase, seconds in completion.seconds.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        if completion.finish_reason == ERROR:
            self.masked = True
            return self._end(ERROR, completion.error)
        text = self.rules.renderer.tokenizer.decode(completion.ids, skip_special_tokens=False)
        message = self._parsed(text)
        self.new_messages.append(message)
        if completion.finish_reason == LENGTH:
            return self._end(LENGTH)
        self._asked = self._calls_of(message, text)
        if not self._asked or self._rounds == self.rules.max_rounds:
            return self._end(STOP)
        if self._is_late():
            return self._end(LENGTH, self._too_late())
        self._rounds += 1
        self._start_calls()

    def rollout(self) -> Rollout:
        self._seconds["tools"] = sum(call.seconds for call in self.calls)
        sample = self._sample()
        return Rollout(
            self.request,
            prompt=self.messages,
            completion=self._completion(),
            sample=sample,
            prompt_length=len(self.prompt_ids),
            finish_reason=self.finish_reason,
            error=self.error,
            columns=self.row.columns,
            environment=None if self.environment is None else self.environment.instance,
            pictures=self._pictures(sample),
            tool_calls=self.calls,
            tools=self._schemas(),
            seconds=self._seconds,
            masked=self.masked,
        )

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def _begin_reset(self) -> None:
        try:
            self.environment = self._take_environment(self.row)
            self._resetting = self.environment.start_reset(self.row)
        except Exception as error:  # the factory is the user's
            self._take_environment = None
            self._fail(f"The environment could not be made: {describe_error(error)}")

    def _poll_reset(self) -> None:
        reset = self._resetting
        if not self.environment.toolbox.threads.is_over(reset):
            return
        self._resetting, self._seconds["reset"] = None, reset.seconds
        raise_if_fatal(reset.error, f"reset of {self.environment.kind.cls.__name__}")
        if reset.error is not None:
            return self._fail(f"reset of {self.environment.kind.cls.__name__} failed: {describe_error(reset.error)}")
        try:
            self._encode_prompt(reset.result)
        except (RenderError, TypeError) as error:
            self._fail(f"The prompt after reset of {self.environment.kind.cls.__name__} cannot be used: {error}")

    def _encode_prompt(self, observation: Any) -> None:
        if observation is not None:
            self.messages = extended_prompt(self.messages, observation)
        elif not self.rules.renders_by_row:
            return
        chat = Conversation(self.messages, self._schemas(), {**self.rules.template_kwargs, **self._kwargs} or None)
        (prompt,) = self.rules.renderer.encode_prompts([chat])
        if isinstance(prompt, RenderError):
            raise prompt
        if self.rules.max_prompt is not None and len(prompt) > self.rules.max_prompt:
            raise RenderError(f"It has {len(prompt)} tokens; `max_length` is {self.rules.max_prompt}.")
        shown = as_carried(prompt.images, self.row.images)
        self._encoded = replace(prompt, row=self.row.row, group=self.request.number, images=shown)

    def _schemas(self) -> list[dict[str, Any]] | None:
        """Of the tools that the prompt was written with: the row's own, or those of the run."""
        return read_tools(self.row.columns.get("tools"), "tools", []) or self._toolbox.schemas or None

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _parsed(self, text: str) -> dict[str, Any]:
        rules = self.rules
        before = self._parts[-2].input_ids if len(self._parts) > 1 else self.prompt_ids
        prefix = rules.renderer.tokenizer.decode(before[-PREFIX_TOKENS:], skip_special_tokens=False)
        return rules.renderer.response_parser.parse(text, prefix, self._toolbox.properties)

    @property
    def _toolbox(self) -> Toolbox:
        return self.rules.toolbox if self.environment is None else self.environment.toolbox

    def _calls_of(self, message: dict[str, Any], text: str) -> list[tuple[Any, Any]]:
        """What the model asks for. A call that cannot be read is answered with an error, like any other mistake."""
        if self.rules.suffix is None:
            return []
        if "tool_calls" in message:
            return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        if self.rules.renderer.response_parser.begins_call(message["content"]):
            return [(None, text)]
        return []

    def _start_calls(self) -> None:
        together = self.environment is None and self._toolbox.parallel
        while self._asked and (together or not self._running):
            name, arguments = self._asked.pop(0)
            if name is None:
                running = RunningCall(self._toolbox, ToolCall("", arguments), None, MALFORMED)
            else:
                running = (self.environment or self._toolbox).start(name, arguments)
            self._running.append(running)

    def _poll_calls(self) -> None:
        while self._running and self._running[0].is_over:
            self._answered.append(self._running.pop(0).finished())
            self._start_calls()
        if not self._running and not self._asked:
            self._append_results()

    def _append_results(self) -> None:
        answered, self._answered = self._answered, []
        self.calls += answered
        last = self._parts[-1]
        is_closed = bool(len(last.ids)) and int(last.ids[-1]) in self.rules.stop_ids
        added = self._suffix(answered, is_closed)
        if self._length + len(added) >= self.rules.max_completion:
            return self._end(LENGTH)  # no room for another word: the results, and their images, are left out
        if self.rules.context is not None and len(self.prompt_ids) + self._length + len(added) >= self.rules.context:
            return self._end(LENGTH)
        self._parts.append(added)
        self._length += len(added)
        self.new_messages += self.rules.suffix.messages(_results(answered))

    def _suffix(self, answered: list[ToolCall], is_closed: bool) -> Sample:
        try:
            return self.rules.suffix.sample(_results(answered), is_closed, self._kwargs)
        except RenderError as error:  # the template, or the tokenizer, refuses what a tool returned
            for call in answered:
                call.error = call.error or f"The result cannot be written in this chat template: {error.reason}"
                call.result = '{"error": "The result cannot be shown."}'
            return self.rules.suffix.sample(_results(answered), is_closed, self._kwargs)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        limit, began = self.rules.timeout, self._began
        return not self.is_over and limit is not None and began is not None and time.monotonic() - began > limit

    def _too_late(self) -> str:
        return f"The episode took longer than {self.rules.timeout:g} s."

    def _fail(self, error: str) -> None:
        self.masked = True
        self._end(ERROR, error)

    def _end(self, reason: str, error: str | None = None) -> None:
        self.calls += [*self._answered, *(running.given_up() for running in self._running)]
        self._running, self._asked, self._answered = [], [], []
        self.is_over, self.finish_reason, self.error = True, reason, error

    def _sample(self) -> Sample:
        nothing = np.zeros(len(self._encoded), dtype=np.float32)
        sample = replace(self._encoded, per_token={SAMPLING_LOGPS: nothing, POLICY_LOGPS: nothing.copy()})
        for part in self._parts:
            if isinstance(part, Sample):
                sample = sample.append(part.input_ids, False, images=part.images, positions=part.positions)
                continue
            sample = sample.append(part.ids, trained=True, **columns_of(part))
        versions = (part.version for part in self._parts if isinstance(part, Completion))
        sample.policy_version = min(versions, default=sample.policy_version)  # the oldest of its trained tokens
        return sample

    def _pictures(self, sample: Sample) -> dict[bytes, Any]:
        """Of the row, and those that tools returned."""
        shown = self._toolbox.images
        return shown_pictures(self.row.pictures, None if shown is None else shown.media, sample)

    def _completion(self) -> list[dict[str, Any]]:
        """All new messages; one that the prompt began is shown whole."""
        messages = self.new_messages or [{"role": "assistant", "content": ""}]
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and isinstance(last.get("content"), str):
            messages = [{**messages[0], "content": last["content"] + messages[0]["content"]}, *messages[1:]]
        return messages


def _results(answered: list[ToolCall]) -> list[ToolResult]:
    return [ToolResult(call.name, call.result) for call in answered]
