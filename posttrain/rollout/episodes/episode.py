"""Episodes: a prompt, the model's words, perhaps a tool's or a user's answer, the model's words again. Each advances on its own.

An Episode says which tokens the engine is to continue, takes what was written, and decides whether it is over. Its Sample grows by
appending token ids: nothing is ever decoded and tokenised again, so what was sampled is what is trained.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain.core.sample import Sample
from posttrain.rollout.engines.protocol import Completion, Prompt, RolloutEngine, SamplingParams, Session
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import POLICY_LOGPS, POLICY_VERSIONS, SAMPLING_LOGPS, Request, Rollout

Decode = Callable[[Any], str]  # token ids -> text without control tokens
IDLE_SECONDS = 0.002


class Episode(Protocol):
    """One rollout in the making."""

    request: Request

    def prompt(self) -> Prompt | None:
        """What the engine is to continue next; None as long as a tool or an environment has not answered, and when it is over."""

    def on_completion(self, completion: Completion) -> None:
        """What the engine wrote."""

    @property
    def is_over(self) -> bool: ...

    def rollout(self) -> Rollout:
        """The finished episode."""


def run_episodes(
    engine: RolloutEngine,
    episodes: Sequence[Episode],
    params: SamplingParams,
    on_finished: Callable[[int, Rollout], None],
) -> None:
    """Run all of them to their ends; `on_finished(index, rollout)` is called for each as soon as it is over."""
    with engine.session(params) as session:
        running = RunningEpisodes(session)
        for index, episode in enumerate(episodes):
            running.add(episode, functools.partial(on_finished, index))
        while running:
            running.advance()


class RunningEpisodes:
    """Episodes in a session, each at its own pace; others may join at any time."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._writing: dict[int, _Joined] = {}  # by ticket of the session
        self._waiting: list[_Joined] = []  # for a tool, an environment or the session
        self.joining = 0  # of those, who has not been asked yet

    def __bool__(self) -> bool:
        return bool(self._writing or self._waiting)

    def add(self, episode: Episode, on_finished: Callable[[Rollout], None]) -> None:
        self._waiting.append((episode, on_finished))
        self.joining += 1

    def advance(self) -> None:
        """Start what can start, write some, and hand over what is over. Short where all wait for tools."""
        still_waiting, self.joining = [], 0
        for episode, on_finished in self._waiting:
            prompt = episode.prompt()
            if prompt is not None:
                self._writing[self.session.add(prompt)] = (episode, on_finished)
            elif episode.is_over:  # the answer was the end of it
                on_finished(episode.rollout())
            else:
                still_waiting.append((episode, on_finished))
        self._waiting = still_waiting
        for ticket, completion in self.session.advance() if self._writing else ():
            episode, on_finished = self._writing.pop(ticket)
            episode.on_completion(completion)
            if episode.is_over:
                on_finished(episode.rollout())
            else:
                self._waiting.append((episode, on_finished))
        if self._waiting and not self._writing:
            time.sleep(IDLE_SECONDS)


_Joined = tuple[Episode, Callable[[Rollout], None]]


class SingleTurn:
    """The usual episode: one prompt, one completion."""

    def __init__(self, row: PromptRow, request: Request, decode: Decode) -> None:
        self.row, self.request, self.decode = row, request, decode
        self.completion: Completion | None = None

    def prompt(self) -> Prompt:
        row, request = self.row, self.request
        return Prompt(row.ids, request.number, request.sample, images=row.images, positions=row.positions)

    def on_completion(self, completion: Completion) -> None:
        self.completion = completion

    @property
    def is_over(self) -> bool:
        return self.completion is not None

    def rollout(self) -> Rollout:
        completion = self.completion
        return Rollout(
            self.request,
            prompt=self.row.prompt,
            completion=as_completion(self.row.prompt, self.decode(completion.ids)),
            sample=written_sample(self.row, self.request, completion),
            prompt_length=len(self.row.ids),
            finish_reason=completion.finish_reason,
            error=completion.error,
            columns=self.row.columns,
            pictures=self.row.pictures,
            seconds=dict(completion.seconds),
            masked=completion.error is not None,
        )


def written_sample(row: PromptRow, request: Request, completion: Completion) -> Sample:
    """Prompt and completion as a Sample; the completion is trained, with the engine's log-probs beside it."""
    prompt = row.sample(request.number)
    prompt.policy_version = completion.version
    return prompt.append(completion.ids, trained=True, **columns_of(completion))


def columns_of(completion: Completion) -> dict[str, np.ndarray]:
    """What is known of each token: its log-probs and, where several versions of the weights may have written, which one did."""
    found = {SAMPLING_LOGPS: completion.sampling_logps, POLICY_LOGPS: completion.policy_logps}
    return found if completion.spans is None else found | {POLICY_VERSIONS: completion.versions()}


def as_completion(prompt: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    """Text as rewards see it: of a conversation, the message that it is; a message that the prompt began is shown whole."""
    if isinstance(prompt, str):
        return text
    opening = prompt[-1].get("content") if prompt and prompt[-1].get("role") == "assistant" else ""
    return [{"role": "assistant", "content": f"{opening}{text}" if isinstance(opening, str) else text}]
