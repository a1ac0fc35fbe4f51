"""Writer: a completion for each request, by an engine that plays episodes, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.core import faults
from posttrain.core.sample import Sample
from posttrain.models.inference import evaluating
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams
from posttrain.rollout.engines.weight_sync import WeightSync
from posttrain.rollout.episodes.episode import Decode, Episode, SingleTurn, as_completion, run_episodes
from posttrain.rollout.prompt_rows import COMPLETION, PromptRow, PromptRows, StreamedPrompts
from posttrain.rollout.rollout import DATASET, POLICY, POLICY_LOGPS, SAMPLING_LOGPS, Request, Rollout

AnyRows = PromptRows | StreamedPrompts
FROM_DRAFTS = "rollouts/tokens_from_drafts"
"""Tokens of one of the policy's completions that were accepted drafts, in the mean."""
MakeEpisodes = Callable[[Sequence[PromptRow], Sequence[Request], SamplingParams], Sequence[Episode]]


@dataclass(frozen=True)
class SingleTurns:
    """Makes episodes of a prompt and its completion."""

    decode: Decode

    def __call__(
        self, rows: Sequence[PromptRow], requests: Sequence[Request], params: SamplingParams
    ) -> list[SingleTurn]:
        return [SingleTurn(row, request, self.decode) for row, request in zip(rows, requests)]


class Writer:
    """Owns the engine while completions are written: awake and with the weights of this step, asleep afterwards."""

    def __init__(
        self,
        weight_sync: WeightSync,
        decode: Decode,
        episodes: MakeEpisodes | None = None,
        function: Callable[[list[Any], Any], dict[str, Any]] | None = None,
        trainer: Any = None,
        others: Mapping[str, RolloutEngine] | None = None,
        only_given: bool = False,
    ) -> None:
        """`weight_sync` has the engine, wakes it and gives it the weights of a step. `episodes` makes those with tools or
        environments; `function`, which is given `trainer`, writes in the place of engine and episodes. `others` are the engines
        of authors besides the policy. With `only_given` no engine writes: every completion is the dataset's."""
        self.weight_sync, self.decode, self.trainer = weight_sync, decode, trainer
        self.episodes = episodes or SingleTurns(decode)
        self.function, self.others, self.only_given = function, dict(others or {}), only_given

    def write(
        self,
        rows: AnyRows,
        requests: Sequence[Request],
        params: SamplingParams,
        version: int,
        on_finished: Callable[[int, Rollout], None],
        authors: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """Hand each rollout over as soon as it is finished, with the number of its request; returns numbers to log: what it took to
        send the weights, how much drafts brought. `version` is that of the weights which write. `authors`: who writes each
        request; None: the policy all."""
        faults.fault_point("generate")
        known = rows.take(request.row for request in requests)
        mine = [known[request.row] for request in requests]
        if self.only_given:
            self._write_as(DATASET, range(len(requests)), mine, requests, params, version, on_finished)
            return {}
        engine, by_author = self.weight_sync.engine, _by_author(authors or [POLICY] * len(requests))
        with evaluating(self.weight_sync.model):
            numbers, drafted_before = self.weight_sync.ready(version), _tokens_from_drafts(engine)
            try:
                if self.function is None:
                    for author, indices in by_author.items():
                        self._write_as(author, indices, mine, requests, params, version, on_finished)
                else:
                    answer = self.function([row.prompt for row in mine], self.trainer)
                    found = rollouts_from_function(answer, mine, requests, self.decode, params.stop_ids)
                    for index, rollout in enumerate(found):
                        on_finished(index, rollout)
            finally:
                engine.sleep()
        faults.fault_point("score")
        if drafted_before is not None:
            numbers |= {FROM_DRAFTS: (engine.accepted - drafted_before) / max(len(by_author[POLICY]), 1)}
        return numbers

    def _write_as(
        self,
        author: str,
        indices: Sequence[int],
        rows: Sequence[PromptRow],
        requests: Sequence[Request],
        params: SamplingParams,
        version: int,
        on_finished: Callable[[int, Rollout], None],
    ) -> None:
        """The requests of one author; rollouts are handed over under their numbers among all requests."""
        if author == DATASET:
            for index in indices:
                on_finished(index, given_rollout(rows[index], requests[index]))
            return
        is_policy = author == POLICY
        engine = self.weight_sync.engine if is_policy else self.others[author]
        if not is_policy:
            engine.load_weights(None, version)
            engine.wake()

        def hand_over(place: int, rollout: Rollout) -> None:
            rollout.author = author
            on_finished(indices[place], rollout)

        try:
            episodes = self.episodes([rows[i] for i in indices], [requests[i] for i in indices], params)
            run_episodes(engine, episodes, params, hand_over)
        finally:
            if not is_policy:
                engine.sleep()


def _tokens_from_drafts(engine: RolloutEngine) -> int | None:
    """So far; None of an engine that drafts nothing."""
    return engine.accepted if getattr(engine, "drafts", 0) else None


def _by_author(authors: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of each author's requests. The policy comes first, with or without requests: engines may be collective."""
    found: dict[str, list[int]] = {POLICY: []}
    for index, author in enumerate(authors):
        found.setdefault(author, []).append(index)
    return found


def given_rollout(row: PromptRow, request: Request) -> Rollout:
    """The row's own completion, as if it had just been written; what it would have been drawn with is not known."""
    sample, start = row.answer, len(row.ids)
    unknown = np.where(np.arange(len(sample)) < start, 0, np.nan).astype(np.float32)
    columns = {SAMPLING_LOGPS: unknown, POLICY_LOGPS: unknown}
    sample = replace(sample, per_token=sample.per_token | columns, scalars=dict(sample.scalars), group=request.number)
    own = {name: value for name, value in row.columns.items() if name != COMPLETION}
    said = {"finish_reason": "stop", "columns": own, "pictures": row.pictures}
    return Rollout(request, row.prompt, row.columns[COMPLETION], sample, start, author=DATASET, **said)


NEEDED = ("prompt_ids", "completion_ids")
KNOWN = (*NEEDED, "logprobs", "env_mask")


def rollouts_from_function(
    answer: dict[str, Any],
    rows: Sequence[PromptRow],
    requests: Sequence[Request],
    decode: Decode,
    stop_ids: tuple[int, ...],
) -> list[Rollout]:
    """One rollout for each request, from what a user's `rollout_func(prompts, trainer)` returned (`answer`).

    It is given the prompts, one for each completion that is wanted; it returns lists of that length:
    `prompt_ids`, `completion_ids`, and, where it has them, `logprobs` (of the tokens of each completion, as they were sampled),
    `env_mask` (0 for tokens of a completion that the model did not write) and any further lists, which rewards are given.
    """
    _check(answer, len(requests))
    rollouts = []
    for index, (row, request) in enumerate(zip(rows, requests)):
        one = {name: values[index] for name, values in answer.items() if values is not None}
        rollouts.append(_rollout(one, row, request, decode, stop_ids))
    return rollouts


def _check(answer: Any, wanted: int) -> None:
    if not isinstance(answer, dict) or any(name not in answer for name in NEEDED):
        found = f"a dict with {', '.join(answer)}" if isinstance(answer, dict) else f"a {type(answer).__name__}"
        raise ValueError(f"`rollout_func` returned {found}; it must return a dict with {' and '.join(NEEDED)}.")
    for name, values in answer.items():
        if values is not None and (not hasattr(values, "__len__") or len(values) != wanted):
            length = len(values) if hasattr(values, "__len__") else "no"
            raise ValueError(f"`rollout_func` returned {length} entries of {name!r} for {wanted} prompts.")


def _rollout(
    one: dict[str, Any], row: PromptRow, request: Request, decode: Decode, stop_ids: tuple[int, ...]
) -> Rollout:
    prompt_ids, completion_ids = (np.asarray(one[name], dtype=np.int32) for name in NEEDED)
    size = len(completion_ids)
    logps = np.full(size, np.nan, dtype=np.float32)
    if one.get("logprobs") is not None:
        logps = np.asarray(one["logprobs"], dtype=np.float32)
    from_model = np.asarray(one.get("env_mask", np.ones(size)), dtype=bool)
    for name, values in (("logprobs", logps), ("env_mask", from_model)):
        if len(values) != size:
            raise ValueError(
                f"`rollout_func`: sample {request.sample} of row {row.row} has {len(values)} entries of {name!r} for {size} tokens."
            )
    prompt = Sample(prompt_ids, np.zeros(len(prompt_ids), dtype=bool), row=row.row, group=request.number)
    sample = prompt.append(completion_ids, trained=True, **{SAMPLING_LOGPS: logps, POLICY_LOGPS: logps})
    sample.trained[len(prompt_ids) :] = from_model
    extra = {name: value for name, value in one.items() if name not in KNOWN}
    return Rollout(
        request,
        prompt=row.prompt,
        completion=as_completion(row.prompt, decode(completion_ids)),
        sample=sample,
        prompt_length=len(prompt_ids),
        finish_reason="stop" if size and int(completion_ids[-1]) in stop_ids else "length",
        columns={**row.columns, **extra},
    )
