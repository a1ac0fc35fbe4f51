"""The questions that the page asks, each a function of the runs and of the parameters of a request."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from posttrain.core import __version__
from posttrain.view.data_preview import picture_of_row, preview, sources_of
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.export import FORMATS, export, found_by, read_whole, refuse_unreadable
from posttrain.view.json_lines import series_of
from posttrain.view.questions import Question
from posttrain.view.rollout_detail import details, known, parsed_text, rows_with_text, stored_picture
from posttrain.view.rollout_index import Record, RolloutIndex
from posttrain.view.rollout_query import FLAGS, SORTS, RolloutQuery, prompt_key, reward_names, with_ids
from posttrain.view.run_folder import RunFolder

Json = dict[str, Any]
MAX_ROWS = 500
BINS = 24
MAX_STEPS = 400
"""Of one prompt, in one answer."""
EXPORT_SECONDS = 60.0
"""For an export, until all that was written is read."""


@dataclass
class Viewed:
    """What is looked at."""

    runs: list[RunFolder]
    data: list[str] = field(default_factory=list)

    def run(self, question: Question) -> RunFolder:
        number = question.needed_whole("run")
        if number >= len(self.runs):
            raise NotFound(f"There is no run {number}; there are {len(self.runs)}.")
        return self.runs[number]


def runs(viewed: Viewed, question: Question) -> Json:
    """Every run with how far it is; what the page asks again and again."""
    return {"version": __version__, "runs": [_state(i, run) for i, run in enumerate(viewed.runs)]}


def _state(number: int, run: RunFolder) -> Json:
    run.metrics.refresh()
    run.alerts.refresh()
    run.rollouts.refresh(wait=0.2)
    index, progress = run.rollouts, run.rollouts.progress
    last = run.metrics.entries[-1] if run.metrics.entries else {}
    return {
        "id": number,
        "name": run.name,
        "path": str(run.path),
        "step": last.get("step"),
        "lines": len(run.metrics.entries),
        "generation": run.metrics.generation,
        "alerts": len(run.alerts.entries),
        "rollouts": len(index),
        "rollouts_version": index.version,
        "steps": _extents(index, "step")["step"],
        "files": progress.files,
        "indexed": progress.indexed,
        "compared": progress.compared,
        "unreadable": progress.unreadable,
    }


def _extents(index: RolloutIndex, *names: str) -> dict[str, list[float | None]]:
    ends = [(name, end) for name in names for end in ("min", "max")]
    finite = [f"{end}({name}) FILTER (isfinite({name}::DOUBLE)) AS {name}_{end}" for name, end in ends]
    (found,) = index.rows(f"SELECT {', '.join(finite)} FROM rollouts")
    return {name: [known(found[f"{name}_min"]), known(found[f"{name}_max"])] for name in names}


def metrics(viewed: Viewed, question: Question) -> Json:
    """Curves from line `since` on; all of them if the file began anew since generation `generation`."""
    run = viewed.run(question)
    run.metrics.refresh()
    entries, since = run.metrics.entries, question.whole("since", 0) or 0
    is_same = question.whole("generation", run.metrics.generation) == run.metrics.generation and since <= len(entries)
    since = since if is_same else 0
    return {
        "generation": run.metrics.generation,
        "since": since,
        "lines": len(entries),
        "series": {name: list(pair) for name, pair in series_of(entries[since:]).items()},
    }


def info(viewed: Viewed, question: Question) -> Json:
    run = viewed.run(question)
    return run.info() | {"sources": [source.as_json() for source in sources_of(run, viewed.data)]}


def data(viewed: Viewed, question: Question) -> Json:
    return preview(viewed.run(question), viewed.data, question.needed_whole("source"), question.whole("start", 0) or 0)


def rollouts(viewed: Viewed, question: Question) -> Json:
    index = viewed.run(question).rollouts
    index.refresh(wait=1.5, mismatch="mismatch" in (question.text("sort") or ""))
    version, query, names = index.version, RolloutQuery.of(question, index), reward_names(index)
    rewards = [row["reward"] for row in query.rows(index, "reward")]
    start = question.whole("start", 0) or 0
    page = query.rows(index, start=start, count=question.whole("count", 100, MAX_ROWS) or 0)
    return {
        "version": version,
        "all": len(index),
        "total": len(rewards),
        "start": start,
        "rows": rows_with_text(page, names),
        "rewards": names,
        "histogram": _histogram(rewards),
        "extents": _extents(index, "step", "reward", "tokens", "advantage", "mismatch"),
        "flags": list(FLAGS),
        "sorts": list(SORTS),
        "formats": list(FORMATS),
    }


def _histogram(rewards: list[float | None]) -> Json | None:
    values = [value for value in rewards if known(value) is not None]
    if not values:
        return None
    counts, edges = np.histogram(values, BINS)
    return {"counts": counts.tolist(), "edges": [known(edge, 12) for edge in edges]}


def group(viewed: Viewed, question: Question) -> Json:
    """The completions of one prompt at one step, with their tokens."""
    run = viewed.run(question)
    index = run.rollouts
    index.refresh()
    step, number = question.needed_whole("step"), question.needed_whole("group")
    at = {"step": step, "group": number}
    members = RolloutQuery('step = $step AND "group" = $group', "sample, numbers, place", at).rows(index)
    if not members:
        raise NotFound(f"There is no group {number} at step {step}.")
    tokenizer = run.tokenizer()
    return {
        **at,
        "has_tokenizer": tokenizer is not None,
        "rollouts": details(members, reward_names(index), tokenizer),
        "before": _neighbour(index, at, "<", "DESC"),
        "after": _neighbour(index, at, ">", "ASC"),
    }


def _neighbour(index: RolloutIndex, at: Json, sign: str, direction: str) -> Json | None:
    """The group before or after, in the order of the run."""
    query = RolloutQuery(f'(step, "group") {sign} ($step, $group)', f'step {direction}, "group" {direction}', at)
    return next(iter(query.rows(index, 'step, "group"', count=1)), None)


def prompt(viewed: Viewed, question: Question) -> Json:
    """One prompt at every step that it was asked in: how its completions did, and the text of the best of them."""
    index = viewed.run(question).rollouts
    index.refresh()
    key = prompt_key(question.text("prompt") or "")
    members = RolloutQuery("prompt_key = $key", 'step, "group", numbers, place', {"key": key}).rows(index)
    if not members:
        raise NotFound("This prompt is not in the run, or no longer.")
    names = reward_names(index)
    groups = [list(each) for _, each in itertools.groupby(members, lambda row: (row["step"], row["group"]))]
    times = [_time(each, names) for each in groups[-MAX_STEPS:]]
    return {"prompt": key, "prompt_said": parsed_text(members[0]["prompt"]), "times": times}


def _time(members: list[Record], names: list[str]) -> Json:
    scored = [row for row in members if known(row["reward"]) is not None] or members[:1]
    best, worst = (pick(scored, key=lambda row: row["reward"] or 0.0) for pick in (max, min))
    rewards = [row["reward"] for row in scored if row["reward"] is not None]
    return {
        "step": members[0]["step"],
        "group": members[0]["group"],
        "completions": len(members),
        "mean": known(fmean(rewards)) if rewards else None,
        "rewards": [known(row["reward"]) for row in members],
        "tokens": known(fmean(row["tokens"] for row in members)),
        **{
            name: rows_with_text([row], names)[0] | {"completion_said": parsed_text(row["completion"])}
            for name, row in (("best", best), ("worst", worst))
        },
    }


def exported(viewed: Viewed, body: Json) -> Json:
    """Chosen rollouts (`ids`), or all that a filter finds (`filter`), as JSON lines."""
    words = {name: str(value) for name, value in (body.get("filter") or {}).items()}
    run = viewed.run(Question({"run": str(body.get("run", ""))}))
    index, ids, kind = run.rollouts, body.get("ids"), str(body.get("format", ""))
    read_whole(index, EXPORT_SECONDS, mismatch="mismatch" in " ".join([*words, words.get("sort", "")]))
    if ids is None or kind == "dpo":  # of one that is chosen the whole group is compared
        refuse_unreadable(index)
    if ids is not None and not isinstance(ids, list):
        raise ViewError("ids is not a list of rollouts.")
    records = with_ids(index, ids) if ids is not None else found_by(index, RolloutQuery.of(Question(words), index))
    made = export(kind, index, records)
    return {
        "name": f"{run.path.name}-{kind}.jsonl",
        "rows": len(made.rows),
        "skipped": dict(made.skipped),
        "json_lines": made.json_lines(),
    }


def picture(viewed: Viewed, question: Question) -> bytes:
    """An image of a rollout, by its key."""
    return stored_picture(viewed.run(question).path, question.text("key") or "")


def data_picture(viewed: Viewed, question: Question) -> bytes:
    """An image of a row of a dataset, by its number among the images of the row."""
    numbers = [question.needed_whole(name) for name in ("source", "row", "image")]
    return picture_of_row(viewed.run(question), viewed.data, *numbers)


Endpoint = Callable[[Viewed, Question], Json]
GET: dict[str, Endpoint] = {
    "/api/runs": runs,
    "/api/metrics": metrics,
    "/api/info": info,
    "/api/data": data,
    "/api/rollouts": rollouts,
    "/api/group": group,
    "/api/prompt": prompt,
}
PICTURES: dict[str, Callable[[Viewed, Question], bytes]] = {"/api/picture": picture, "/api/data_picture": data_picture}
"""What is answered with bytes of PICTURE_TYPE."""
POST: dict[str, Callable[[Viewed, Json], Json]] = {"/api/export": exported}
