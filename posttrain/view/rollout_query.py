"""Which rollouts are asked for, and in which order: the words of a request as SQL over the index, with their values beside it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from posttrain.view.errors import NotFound, ViewError
from posttrain.view.questions import Question
from posttrain.view.rollout_index import Record, RolloutIndex

FLAGS = {
    "error": "error",
    "failed_reward": "failures > 0",
    "tool_calls": "tool_calls > 0",
    "tool_error": "tool_errors > 0",
    "images": "images > 0",
    "truncated": "truncated",
    "masked": "masked",
    "no_advantage": "advantage = 0",
}
"""What can be asked of a rollout by one word."""

RANGES = ("step", "reward", "advantage", "tokens", "mismatch")
SORTS = ("step", "group", "sample", "reward", "advantage", "tokens", "mismatch", "tool_calls", "policy_version")
REWARD = "reward:"
"""Before the name of a reward function, in a sort or a range."""
PROMPT_NAME = re.compile("[0-9a-f]{16}")
IN_ORDER = 'step, "group", sample, numbers, place'


@dataclass
class RolloutQuery:
    """`where` and `order` are made of the names above alone; what was typed is in `limits`, and `reward` for the order."""

    where: str = "true"
    order: str = IN_ORDER
    limits: dict[str, Any] = field(default_factory=dict)
    sorted_by: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, question: Question, index: RolloutIndex) -> RolloutQuery:
        """Limits are inclusive; an empty one limits nothing."""
        flags = question.comma_separated("flags")
        unknown = [flag for flag in flags if flag not in FLAGS]
        if unknown:
            raise ViewError(f"There is no flag {unknown[0]!r}; there are {', '.join(FLAGS)}.")
        conditions = [FLAGS[flag] for flag in flags]
        limits: dict[str, Any] = {}
        for name in RANGES:
            for side, sign in (("min", ">="), ("max", "<=")):
                if (limit := question.number(f"{name}_{side}")) is not None:
                    conditions.append(f"{name} {sign} ${name}_{side}")
                    limits[f"{name}_{side}"] = limit
        if (prompt := question.text("prompt")) is not None:
            conditions.append("prompt_key = $prompt")
            limits["prompt"] = prompt_key(prompt)
        if (group := question.whole("group")) is not None:
            conditions.append('"group" = $group')
            limits["group"] = group
        if text := question.text("q"):  # in whichever case
            conditions.append("(contains(lower(prompt), lower($text)) OR contains(lower(completion), lower($text)))")
            limits["text"] = text
        query = cls(" AND ".join(conditions) or "true", limits=limits)
        query.sort_by(question.text("sort") or "-step", index)
        return query

    def sort_by(self, order: str, index: RolloutIndex) -> None:
        """What is not known comes last; what is equal stays in the order of steps, groups and samples."""
        name, direction = order.removeprefix("-"), "DESC" if order.startswith("-") else "ASC"
        if name.startswith(REWARD):
            by, reward = "map_extract_value(rewards, $reward)", name.removeprefix(REWARD)
            if reward not in reward_names(index):
                raise ViewError(f"There is no reward {reward!r} in this run.")
            self.sorted_by = {"reward": reward}
        elif name in SORTS:
            by = f'"{name}"'
        else:
            raise ViewError(f"Rollouts cannot be sorted by {name!r}, but by {', '.join(SORTS)} or {REWARD}NAME.")
        self.order = f"{by} {direction} NULLS LAST, {IN_ORDER}"

    def rows(self, index: RolloutIndex, what: str = "*", start: int = 0, count: int | None = None) -> list[Record]:
        part, page = ("", {}) if count is None else (" LIMIT $count OFFSET $start", {"start": start, "count": count})
        sql = f"SELECT {what} FROM rollouts WHERE {self.where} ORDER BY {self.order}{part}"
        return index.rows(sql, **self.limits, **self.sorted_by, **page)


def prompt_key(word: str) -> str:
    if not PROMPT_NAME.fullmatch(word):
        raise ViewError(f"prompt={word[:40]!r} is not the key of a prompt.")
    return word


def reward_names(index: RolloutIndex) -> list[str]:
    """Of the reward functions, as they were first used."""
    return [row["name"] for row in index.rows(
        "SELECT name FROM (SELECT unnest(map_keys(rewards)) AS name, step, numbers, place FROM rollouts) "
        "GROUP BY name ORDER BY min((step, numbers, place)), name"
    )]  # fmt: skip


def with_ids(index: RolloutIndex, ids: list[Any]) -> list[Record]:
    """Rollouts by name (step, process and row, such as 12/process-0/3), in this order. No name becomes a path."""
    wanted = [str(name) for name in ids]
    found = {row["id"]: row for row in RolloutQuery("list_contains($ids, id)", limits={"ids": wanted}).rows(index)}
    for name in wanted:
        if name not in found:
            raise NotFound(f"There is no rollout {name[:80]!r} in this run, or no longer.")
    return [found[name] for name in wanted]
