"""Rollouts as training data: JSON lines that SFTTrainer and DPOTrainer read.

`sft` keeps what was said, as `messages` or as `prompt` and `completion`; `dpo` sets the best completion of a prompt against the
worst. Of a group with two or more chosen rollouts these are compared; of one with a single chosen rollout the whole group is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.view.errors import ViewError
from posttrain.view.rollout_detail import texts_of, tools_of
from posttrain.view.rollout_index import Snapshot
from posttrain.view.rollout_query import Texts

Json = dict[str, Any]
MOST_ROLLOUTS = 200_000


@dataclass
class Exported:
    rows: list[Json] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> rollouts or groups

    def json_lines(self) -> str:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)


def export(kind: str, snapshot: Snapshot, numbers: list[int], texts: Texts) -> Exported:
    if kind not in FORMATS:
        raise ViewError(f"There is no format {kind!r}; there are {', '.join(FORMATS)}.")
    if len(numbers) > MOST_ROLLOUTS:
        raise ViewError(f"{len(numbers):,} rollouts are more than one export takes ({MOST_ROLLOUTS:,}): filter first.")
    return FORMATS[kind](snapshot, numbers, texts)


def _as_messages(snapshot: Snapshot, numbers: list[int], texts: Texts) -> Exported:
    """A rollout of plain text has no messages: it becomes prompt and completion."""
    made = _as_completions(snapshot, numbers, texts)
    are_messages = [isinstance(row["prompt"], list) and isinstance(row["completion"], list) for row in made.rows]
    if all(are_messages):
        made.rows = [{"messages": [*row.pop("prompt"), *row.pop("completion")], **row} for row in made.rows]
    return made


def _as_completions(snapshot: Snapshot, numbers: list[int], texts: Texts) -> Exported:
    made = Exported()
    for number in numbers:
        if snapshot.numbers["error"][number] > 0:
            made.skipped["could not be written"] += 1
            continue
        prompt, completion = texts_of(snapshot, number, texts)
        row = {"prompt": prompt, "completion": completion}
        made.rows.append(row | _as_it_was_trained(snapshot, number, texts, completion))
    return made


def _as_it_was_trained(snapshot: Snapshot, number: int, texts: Texts, *answers: str | list[Json]) -> Json:
    """Columns without which a row would be rendered or trained differently: tools, and whose turns were trained.

    The model's turns were, and results of tools between them were not; SFT and DPO would train all that follows the prompt.
    """
    tools = tools_of(snapshot, number, texts)
    spoken = [message["role"] for answer in answers if isinstance(answer, list) for message in answer]
    more: Json = {"tools": tools} if tools else {}
    return more | ({"trained_roles": ["assistant"]} if set(spoken) - {"assistant"} else {})


def _as_pairs(snapshot: Snapshot, numbers: list[int], texts: Texts) -> Exported:
    made = Exported()
    for members in _groups(snapshot, numbers):
        rewards = snapshot.numbers["reward"][members]
        usable = members[np.isfinite(rewards) & ~(snapshot.numbers["error"][members] > 0)]
        if len(usable) < 2:
            made.skipped["fewer than two completions with a reward"] += 1
            continue
        rewards = snapshot.numbers["reward"][usable]
        best, worst = int(usable[rewards.argmax()]), int(usable[rewards.argmin()])
        prompt, chosen = texts_of(snapshot, best, texts)
        _, rejected = texts_of(snapshot, worst, texts)
        if rewards.max() == rewards.min():
            made.skipped["all rewards of the group are equal"] += 1
        elif chosen == rejected:
            made.skipped["the best and the worst say the same"] += 1
        else:
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            made.rows.append(row | _as_it_was_trained(snapshot, best, texts, chosen, rejected))
    return made


def _groups(snapshot: Snapshot, numbers: list[int]) -> Iterator[np.ndarray]:
    chosen: dict[tuple[float, float], list[int]] = {}
    for number in numbers:
        key = (snapshot.numbers["step"][number], snapshot.numbers["group"][number])
        chosen.setdefault(key, []).append(number)
    for (step, group), members in chosen.items():
        if len(members) > 1:
            yield np.array(members)
        else:
            yield np.flatnonzero((snapshot.numbers["step"] == step) & (snapshot.numbers["group"] == group))


FORMATS: dict[str, Callable[[Snapshot, list[int], Texts], Exported]] = {
    "sft": _as_messages,
    "prompt-completion": _as_completions,
    "dpo": _as_pairs,
}
