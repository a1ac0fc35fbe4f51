"""An engine that says what a function tells it to: for tests of whatever is built on engines, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from posttrain.rollout.engines.noise import noise_base, uniforms
from posttrain.rollout.engines.protocol import LENGTH, STOP, Completion, Prompt, SamplingParams

Script = Callable[[Prompt], Completion | Sequence[int]]


class ScriptedEngine:
    """`script(prompt)` gives token ids, or a whole Completion; `per_advance` completions finish at a time.

    Ids get log-probs in (-2, 0) that depend on the prompt's key and sample alone, end at the first stop id, and are cut to the
    allowance. With `shuffle` completions finish in an order of their own, as a real engine's do. `prompts` and `params` keep what
    was asked.
    """

    def __init__(self, script: Script, per_advance: int = 4, shuffle: int | None = None) -> None:
        self.version = 0
        self.script, self.per_advance = script, per_advance
        self.prompts: list[Prompt] = []
        self.params: list[SamplingParams] = []
        self.log: list[str] = []  # of "session", "end of session", "sleep", "wake" and "load_weights"
        self._random = None if shuffle is None else np.random.default_rng(shuffle)

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[ScriptedSession]:
        self.params.append(params)
        self.log.append("session")
        try:
            yield ScriptedSession(self, params)
        finally:
            self.log.append("end of session")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        self.version = version
        self.log.append("load_weights")

    def sleep(self) -> None:
        self.log.append("sleep")

    def wake(self) -> None:
        self.log.append("wake")


class ScriptedSession:
    """Prompts in, scripted completions out, a few at a time."""

    room = None

    def __init__(self, engine: ScriptedEngine, params: SamplingParams) -> None:
        self._engine, self._params = engine, params
        self._waiting: list[tuple[int, Prompt]] = []
        self._tickets = 0

    def add(self, prompt: Prompt) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._engine.prompts.append(prompt)
        self._waiting.append((ticket, prompt))
        return ticket

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def advance(self) -> list[tuple[int, Completion]]:
        if self._engine._random is not None:
            self._engine._random.shuffle(self._waiting)
        now, self._waiting = self._waiting[: self._engine.per_advance], self._waiting[self._engine.per_advance :]
        return [(ticket, self._completion(prompt)) for ticket, prompt in now]

    def _completion(self, prompt: Prompt) -> Completion:
        said = self._engine.script(prompt)
        if isinstance(said, Completion):
            return said
        limit = self._params.max_tokens if prompt.max_tokens is None else prompt.max_tokens
        ids = np.asarray(said, np.int32)[:limit]
        stops = np.flatnonzero(np.isin(ids, self._params.stop_ids))
        ids = ids[: stops[0] + 1] if len(stops) else ids
        base = torch.tensor(noise_base(self._params.seed, prompt.key, prompt.sample))
        logps = (-2 * uniforms(base, prompt.first_token + torch.arange(len(ids)))).float().numpy()
        seconds = {"queued": 0.0, "prefill": 0.0, "decode": 0.0}
        reason = STOP if len(stops) else LENGTH
        return Completion(ids, logps, logps.copy(), reason, None, seconds, self._engine.version)
