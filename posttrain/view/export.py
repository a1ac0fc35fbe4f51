"""Rollouts as training data: JSON lines that SFTTrainer and DPOTrainer read.

`sft` keeps the texts, as `messages` or as `prompt` and `completion`; `dpo` sets the best completion of a prompt against the
worst. Of a group with two or more chosen rollouts these are compared; of one with a single chosen rollout the whole group is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from posttrain.view.errors import ViewError
from posttrain.view.rollout_detail import known, parsed_text, tools_of
from posttrain.view.rollout_index import Record, RolloutIndex
from posttrain.view.rollout_query import RolloutQuery

Json = dict[str, Any]
MAX_ROLLOUTS = 200_000
WITH_IMAGES = "about images, which rollouts name and do not hold"


@dataclass
class Exported:
    rows: list[Json] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # reason -> rollouts or groups

    def json_lines(self) -> str:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in self.rows)


def export(kind: str, index: RolloutIndex, records: list[Record]) -> Exported:
    if kind not in FORMATS:
        raise ViewError(f"There is no format {kind!r}; there are {', '.join(FORMATS)}.")
    return FORMATS[kind](index, records)


def read_whole(index: RolloutIndex, seconds: float, mismatch: bool = False) -> None:
    """All that the run has written is in the index; a sentence where that takes longer. `mismatch`: log-probs are compared, too."""
    if index.refresh(seconds, mismatch):
        return
    progress = index.progress
    raise ViewError(
        f"Of {progress.files:,} files of rollouts {progress.indexed:,} were read and {progress.compared:,} compared within "
        f"{seconds:g} s: an export would lack the others. Reading continues: export again in a while."
    )


def refuse_unreadable(index: RolloutIndex) -> None:
    """Rollouts that cannot be read cannot be found, or compared with others of their group."""
    unreadable = index.progress.unreadable
    for name, reason in unreadable.items():
        raise ViewError(
            f"{len(unreadable):,} of {index.progress.files:,} files cannot be read: an export would lack their rollouts. Move them "
            "away, export chosen rollouts for SFT, or take `posttrain rollouts`, which exports the others. The first is "
            f"{name}: {reason}"
        )


def found_by(index: RolloutIndex, query: RolloutQuery) -> list[Record]:
    (found,) = index.rows(f"SELECT count(*) AS count FROM rollouts WHERE {query.where}", **query.limits)
    if found["count"] > MAX_ROLLOUTS:
        raise ViewError(f"{found['count']:,} rollouts are more than one export takes ({MAX_ROLLOUTS:,}): filter first.")
    return query.rows(index)


def _as_messages(index: RolloutIndex, records: list[Record]) -> Exported:
    """A rollout of plain text has no messages: it becomes prompt and completion."""
    made = _as_completions(index, records)
    are_messages = [isinstance(row["prompt"], list) and isinstance(row["completion"], list) for row in made.rows]
    if all(are_messages):
        made.rows = [{"messages": [*row.pop("prompt"), *row.pop("completion")], **row} for row in made.rows]
    return made


def _as_completions(index: RolloutIndex, records: list[Record]) -> Exported:
    made = Exported()
    for record in records:
        if record["error"]:
            made.skipped["could not be written"] += 1
            continue
        if record["images"]:
            made.skipped[WITH_IMAGES] += 1
            continue
        row = {"prompt": parsed_text(record["prompt"]), "completion": parsed_text(record["completion"])}
        made.rows.append(row | _training_columns(record, row["completion"]))
    return made


def _training_columns(record: Record, *answers: str | list[Json]) -> Json:
    """Columns without which a row would be rendered or trained differently: tools, and whose turns were trained.

    The model's turns were, and results of tools between them were not; SFT and DPO would train all that follows the prompt.
    """
    tools = tools_of(record)
    spoken = [message["role"] for answer in answers if isinstance(answer, list) for message in answer]
    more: Json = {"tools": tools} if tools else {}
    return more | ({"trained_roles": ["assistant"]} if set(spoken) - {"assistant"} else {})


def _as_pairs(index: RolloutIndex, records: list[Record]) -> Exported:
    made = Exported()
    for members in _groups(index, records):
        if any(record["images"] for record in members):
            made.skipped[WITH_IMAGES] += 1
            continue
        usable = [record for record in members if known(record["reward"]) is not None and not record["error"]]
        if len(usable) < 2:
            made.skipped["fewer than two completions with a reward"] += 1
            continue
        best, worst = (pick(usable, key=lambda record: record["reward"]) for pick in (max, min))
        chosen, rejected = parsed_text(best["completion"]), parsed_text(worst["completion"])
        if best["reward"] == worst["reward"]:
            made.skipped["all rewards of the group are equal"] += 1
        elif chosen == rejected:
            made.skipped["the best and the worst say the same"] += 1
        else:
            row = {"prompt": parsed_text(best["prompt"]), "chosen": chosen, "rejected": rejected}
            made.rows.append(row | _training_columns(best, chosen, rejected))
    return made


def _groups(index: RolloutIndex, records: list[Record]) -> Iterable[list[Record]]:
    """By prompt and step; one with a single chosen rollout is completed."""
    chosen: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        chosen.setdefault((record["step"], record["group"]), []).append(record)
    single = [key for key, members in chosen.items() if len(members) == 1]
    values = {"steps": [step for step, _ in single], "groups": [group for _, group in single]}
    where = '(step, "group") IN (SELECT unnest($steps::BIGINT[]), unnest($groups::BIGINT[]))'
    whole: dict[tuple[int, int], list[Record]] = {}
    for record in RolloutQuery(where, "step, numbers, place", values).rows(index) if single else ():
        whole.setdefault((record["step"], record["group"]), []).append(record)
    return (chosen | whole).values()


FORMATS: dict[str, Callable[[RolloutIndex, list[Record]], Exported]] = {
    "sft": _as_messages,
    "prompt-completion": _as_completions,
    "dpo": _as_pairs,
}
