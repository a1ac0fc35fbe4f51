"""A user's own way of writing rollouts: `rollout_func(prompts, trainer)` in the place of engine and episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.rollout.episodes.episode import Decode, as_completion
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import POLICY_LOGPS, SAMPLING_LOGPS, Request, Rollout

NEEDED = ("prompt_ids", "completion_ids")
KNOWN = (*NEEDED, "logprobs", "env_mask")


def written_by_function(
    function: Callable[..., dict[str, Any]],
    rows: Sequence[PromptRow],
    requests: Sequence[Request],
    decode: Decode,
    stop_ids: tuple[int, ...],
) -> list[Rollout]:
    """One rollout for each request, from what the function returned.

    It is given the prompts, one for each completion that is wanted; it returns lists of that length:
    `prompt_ids`, `completion_ids`, and, where it has them, `logprobs` (of the tokens of each completion, as they were sampled),
    `env_mask` (0 for tokens of a completion that the model did not say) and any further lists, which rewards are given.
    """
    answer = function([row.prompt for row in rows])
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
    said = np.asarray(one.get("env_mask", np.ones(size)), dtype=bool)
    for name, values in (("logprobs", logps), ("env_mask", said)):
        if len(values) != size:
            raise ValueError(
                f"`rollout_func`: sample {request.sample} of row {row.row} has {len(values)} entries of {name!r} for {size} tokens."
            )
    prompt = Sample(prompt_ids, np.zeros(len(prompt_ids), dtype=bool), row=row.row, group=request.number)
    sample = prompt.append(completion_ids, trained=True, **{SAMPLING_LOGPS: logps, POLICY_LOGPS: logps})
    sample.trained[len(prompt_ids) :] = said
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
