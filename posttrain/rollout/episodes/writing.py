"""Writer: a completion for each request, by an engine that plays episodes, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core import faults
from posttrain.models.inference import evaluating
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.engines.weight_sync import WeightSync
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
        weight_sync: WeightSync,
        decode: Decode,
        episodes: MakeEpisodes | None = None,
        function: Callable[[list[Any]], dict[str, Any]] | None = None,
    ) -> None:
        """`weight_sync` has the engine, wakes it and gives it the weights of a step. `episodes` makes those with tools or
        environments; `function` writes in the place of engine and episodes."""
        self.weight_sync, self.decode = weight_sync, decode
        self.episodes = episodes or self._single_turns
        self.function = function

    def write(
        self,
        rows: AnyRows,
        requests: Sequence[Request],
        params: SamplingParams,
        version: int,
        on_finished: Callable[[int, Rollout], None],
    ) -> dict[str, float]:
        """Hand each rollout over as soon as it is finished, with the number of its request; returns what it took to send the
        weights. `version` is that of the weights which write."""
        faults.fault_point("generate")
        known = rows.take(request.row for request in requests)
        mine = [known[request.row] for request in requests]
        engine = self.weight_sync.engine
        with evaluating(self.weight_sync.model):
            took = self.weight_sync.ready(version)
            try:
                if self.function is None:
                    run_episodes(engine, self.episodes(mine, requests, params), params, on_finished)
                else:
                    found = written_by_function(self.function, mine, requests, self.decode, params.stop_ids)
                    for index, rollout in enumerate(found):
                        on_finished(index, rollout)
            finally:
                engine.sleep()
        faults.fault_point("score")
        return took

    def _single_turns(
        self, rows: Sequence[PromptRow], requests: Sequence[Request], params: SamplingParams
    ) -> list[SingleTurn]:
        return [SingleTurn(row, request, self.decode) for row, request in zip(rows, requests)]
