"""Writer: a completion for each request, by an engine that plays episodes, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from posttrain.core import faults
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams
from posttrain.rollout.episodes.episode import Decode, Episode, SingleTurn, run_episodes
from posttrain.rollout.episodes.rollout_function import written_by_function
from posttrain.rollout.prompt_rows import PromptRow, PromptRows
from posttrain.rollout.rollout import Request, Rollout
from posttrain.rollout.streamed_prompts import StreamedPrompts

AnyRows = PromptRows | StreamedPrompts
MakeEpisodes = Callable[[Sequence[PromptRow], Sequence[Request], SamplingParams], Sequence[Episode]]


class Writer:
    """Owns the engine while completions are written: awake and with the weights of this step, asleep afterwards."""

    def __init__(
        self,
        engine: RolloutEngine,
        model: nn.Module,
        ready: Callable[[], dict[str, float]],
        decode: Decode,
        episodes: MakeEpisodes | None = None,
        function: Callable[[list[Any]], dict[str, Any]] | None = None,
    ) -> None:
        """`ready` wakes the engine and gives it this step's weights, and says what that took. `episodes` makes those with tools or
        environments; `function` writes in the place of engine and episodes."""
        self.engine, self.model, self.ready, self.decode = engine, model, ready, decode
        self.episodes = episodes or self._single_turns
        self.function = function

    def write(
        self,
        rows: AnyRows,
        requests: Sequence[Request],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None],
    ) -> dict[str, float]:
        """Hand each rollout over as soon as it is finished, with the number of its request; returns what `ready` took."""
        faults.fault_point("generate")
        known = rows.take(request.row for request in requests)
        mine = [known[request.row] for request in requests]
        with evaluating(self.model):
            took = self.ready()
            try:
                if self.function is None:
                    run_episodes(self.engine, self.episodes(mine, requests, params), params, on_finished)
                else:
                    found = written_by_function(self.function, mine, requests, self.decode, params.stop_ids)
                    for index, rollout in enumerate(found):
                        on_finished(index, rollout)
            finally:
                self.engine.sleep()
        faults.fault_point("score")
        return took

    def _single_turns(
        self, rows: Sequence[PromptRow], requests: Sequence[Request], params: SamplingParams
    ) -> list[SingleTurn]:
        return [SingleTurn(row, request, self.decode) for row, request in zip(rows, requests)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout, and as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
