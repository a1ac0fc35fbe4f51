"""Group: the finished completions of one prompt with their rewards, as an object and as bytes.

The bytes are the same in the journal, on a pipe and in a message. What the dataset's row says is not among them: it is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.trees import tree_from_bytes, tree_to_bytes
from posttrain.data.images.row_image import found_by_key, named_by_key
from posttrain.data.images.streamed_span import as_carried
from posttrain.rewards.runtime.results import RewardFailure, RewardResults, joined_results
from posttrain.rollout.collector import Written
from posttrain.rollout.episodes.environment import PlayedElsewhere
from posttrain.rollout.loader import pack_samples, unpack_samples
from posttrain.rollout.prompt_rows import PromptRow, shown_pictures
from posttrain.rollout.rollout import Request, Rollout, ToolCall

PLAIN = ("prompt_length", "author", "finish_reason", "error", "tools", "seconds", "rewards", "masked")
"""Fields of a Rollout that are JSON as they are."""


@dataclass(frozen=True)
class Work:
    """One prompt that a worker has a lease for."""

    number: int  # in the feed
    attempt: int
    label: int  # of the weights that it is issued for
    prompt: int  # its number in the run, over all processes: what its noise depends on
    row: int
    # False: its group is finished, and is written once more and thrown away: others, begun with it, have the same last bits then.
    counts: bool = True


@dataclass
class Group:
    """What a worker made of a Work."""

    number: int  # in the feed
    attempt: int
    label: int  # of the oldest weights that wrote a token of it
    written: Written  # of its samples, in their order
    seconds: float = 0.0  # from its issue to its last reward
    finished_step: int | None = None  # optimizer steps that were done then; None: a run before this one wrote it
    finished_at: float = 0.0  # by the feed's clock

    def to_bytes(self) -> bytes:
        written, first = self.written, self.written.rollouts[0].request
        return tree_to_bytes(
            {
                "group": [self.number, self.attempt, self.label, self.seconds],
                "request": [first.row, first.number],
                **rollouts_tree(written.rollouts),
                "values": torch.from_numpy(written.values),
                "results": _results_tree(written.results),
                "seconds": written.seconds,
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes, row_of: Any) -> Group:
        """`row_of(row)` gives the PromptRow of a row."""
        tree = tree_from_bytes(content)
        number, attempt, label, seconds = tree["group"]
        row, prompt = tree["request"]
        rollouts = rollouts_of(tree, prompt, row, row_of(row))
        results = _results_of(tree["results"])
        return cls(number, attempt, label, Written(rollouts, tree["values"].numpy(), results, tree["seconds"]), seconds)


def joined_groups(groups: Sequence[Group], waited: float) -> Written:
    """The samples of groups, one group after the other."""
    rollouts = [rollout for group in groups for rollout in group.written.rollouts]
    values = np.concatenate([group.written.values for group in groups])
    results = joined_results([group.written.results for group in groups])
    return Written(rollouts, values, results, {"generate": waited, "reward_wait": 0.0})


def nothing_written(rewards: int) -> Written:
    """No samples, of so many rewards."""
    values = np.zeros((0, rewards))
    results = RewardResults(values, np.zeros(0, dtype=bool), [], {}, {}, {})
    return Written([], values, results, {"generate": 0.0, "reward_wait": 0.0})


def rollouts_tree(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The rollouts of a group as JSON and tensors."""
    samples = pack_samples([rollout.sample for rollout in rollouts])
    return {"rollouts": [_tree_of(rollout) for rollout in rollouts], "samples": samples}


def rollouts_of(tree: dict[str, Any], prompt: int, row: int, known: PromptRow) -> list[Rollout]:
    """What `rollouts_tree` was given, `known` being the row of the dataset."""
    samples = unpack_samples(tree["samples"])
    return [
        _rollout_of(own, sample, Request(row, prompt, place), known)
        for place, (own, sample) in enumerate(zip(tree["rollouts"], samples))
    ]


def _tree_of(rollout: Rollout) -> dict[str, Any]:
    calls = [asdict(call) | {"result": _named(call.result)} for call in rollout.tool_calls]
    return {
        **{name: getattr(rollout, name) for name in PLAIN},
        "prompt": named_by_key(rollout.prompt, with_sizes=True),
        "completion": named_by_key(rollout.completion, with_sizes=True),
        "tool_calls": calls,
        "failures": [asdict(failure) for failure in rollout.failures],
        "extras": rollout.extras,
        "played": asdict(rollout.environment) if isinstance(rollout.environment, PlayedElsewhere) else None,
    }


def _rollout_of(tree: dict[str, Any], sample: Any, request: Request, row: PromptRow) -> Rollout:
    sample.images = as_carried(sample.images, row.spans)
    said = {name: found_by_key(tree[name]) for name in ("prompt", "completion")}
    calls = [ToolCall(**call | {"result": _found(call["result"])}) for call in tree["tool_calls"]]
    return Rollout(
        request,
        sample=sample,
        columns=row.columns,
        pictures=shown_pictures(row.pictures, row.media, sample),
        tool_calls=calls,
        failures=[RewardFailure(**failure) for failure in tree["failures"]],
        extras=tree["extras"],
        environment=PlayedElsewhere(**tree["played"]) if tree.get("played") else None,
        **said,
        **{name: tree[name] for name in PLAIN},
    )


def _named(result: Any) -> Any:
    """The parts of a tool's result, as those of a message."""
    return result if isinstance(result, str) else named_by_key([{"content": result}], with_sizes=True)[0]["content"]


def _found(result: Any) -> Any:
    return result if isinstance(result, str) else found_by_key([{"content": result}])[0]["content"]


def _results_tree(results: RewardResults) -> dict[str, Any]:
    return {
        "values": torch.from_numpy(results.values),
        "masked": torch.from_numpy(results.masked),
        "failures": [asdict(failure) for failure in results.failures],
        "extras": results.extras,
        "metrics": results.metrics,
        "seconds": results.seconds,
    }


def _results_of(tree: dict[str, Any]) -> RewardResults:
    failures = [RewardFailure(**failure) for failure in tree["failures"]]
    arrays = (tree["values"].numpy(), tree["masked"].numpy())
    return RewardResults(*arrays, failures, tree["extras"], tree["metrics"], tree["seconds"])
