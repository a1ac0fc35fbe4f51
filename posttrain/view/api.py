"""The questions that the page asks, each a function of the runs and of the parameters of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain.core import __version__
from posttrain.view.data_preview import preview, sources_of
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.export import FORMATS, export
from posttrain.view.json_lines import series_of
from posttrain.view.questions import Question
from posttrain.view.rollout_detail import details, known, numbers_of, rows_with_text, texts_of
from posttrain.view.rollout_index import Snapshot
from posttrain.view.rollout_query import FLAGS, SORTS, RolloutQuery, matching, prompt_name, prompt_number
from posttrain.view.run_folder import RunFolder

Json = dict[str, Any]
MOST_ROWS = 500
BINS = 24
MOST_STEPS = 400
"""Of one prompt, in one answer."""


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
    snapshot, progress = run.rollouts.snapshot(), run.rollouts.progress
    last = run.metrics.entries[-1] if run.metrics.entries else {}
    return {
        "id": number,
        "name": run.name,
        "path": str(run.path),
        "step": last.get("step"),
        "lines": len(run.metrics.entries),
        "generation": run.metrics.generation,
        "alerts": len(run.alerts.entries),
        "rollouts": len(snapshot),
        "rollouts_version": snapshot.version,
        "steps": _extent(snapshot, "step"),
        "files": progress.files,
        "indexed": progress.indexed,
        "compared": progress.compared,
        "unreadable": progress.unreadable,
    }


def _extent(snapshot: Snapshot, name: str) -> list[float | None]:
    values = snapshot.numbers.get(name, np.zeros(0))
    values = values[np.isfinite(values)]
    return [known(values.min()), known(values.max())] if len(values) else [None, None]


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
    run = viewed.run(question)
    run.rollouts.refresh(wait=1.5, mismatch="mismatch" in (question.text("sort") or ""))
    snapshot = run.rollouts.snapshot()
    found = matching(snapshot, RolloutQuery.of(question), run.texts)
    start = question.whole("start", 0) or 0
    page = found[start : start + (question.whole("count", 100, MOST_ROWS) or 0)]
    return {
        "version": snapshot.version,
        "all": len(snapshot),
        "total": len(found),
        "start": start,
        "rows": rows_with_text(snapshot, page, run.texts),
        "rewards": list(snapshot.rewards),
        "histogram": _histogram(snapshot, found),
        "extents": {name: _extent(snapshot, name) for name in ("step", "reward", "tokens", "advantage", "mismatch")},
        "flags": list(FLAGS),
        "sorts": list(SORTS),
        "formats": list(FORMATS),
    }


def _histogram(snapshot: Snapshot, found: np.ndarray) -> Json | None:
    values = snapshot.numbers.get("reward", np.zeros(0))[found]
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    counts, edges = np.histogram(values, BINS)
    return {"counts": counts.tolist(), "edges": [known(edge, 12) for edge in edges]}


def group(viewed: Viewed, question: Question) -> Json:
    """The completions of one prompt at one step, with their tokens."""
    run = viewed.run(question)
    run.rollouts.refresh()
    snapshot = run.rollouts.snapshot()
    step, number = question.needed_whole("step"), question.needed_whole("group")
    members = _where(snapshot, step=step, group=number)
    if not len(members):
        raise NotFound(f"There is no group {number} at step {step}.")
    members = members[np.argsort(snapshot.numbers["sample"][members], kind="stable")]
    tokenizer = run.tokenizer()
    return {
        "step": step,
        "group": number,
        "has_tokenizer": tokenizer is not None,
        "rollouts": details(snapshot, members.tolist(), tokenizer),
        **_neighbours(snapshot, step, number),
    }


def _where(snapshot: Snapshot, **values: float) -> np.ndarray:
    if not len(snapshot):
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(np.logical_and.reduce([snapshot.numbers[name] == value for name, value in values.items()]))


def _neighbours(snapshot: Snapshot, step: int, number: int) -> Json:
    """The groups before and after, in the order of the run."""
    keys = np.unique(np.stack([snapshot.numbers["step"], snapshot.numbers["group"]]), axis=1).T
    place = int(np.flatnonzero((keys[:, 0] == step) & (keys[:, 1] == number))[0])

    def at(index: int) -> Json | None:
        return {"step": int(keys[index, 0]), "group": int(keys[index, 1])} if 0 <= index < len(keys) else None

    return {"before": at(place - 1), "after": at(place + 1)}


def prompt(viewed: Viewed, question: Question) -> Json:
    """One prompt at every step that it was asked in: how its completions did, and what the best of them said."""
    run = viewed.run(question)
    run.rollouts.refresh()
    snapshot = run.rollouts.snapshot()
    key = prompt_number(question.text("prompt") or "")
    members = np.flatnonzero(snapshot.prompt == np.uint64(key))
    if not len(members):
        raise NotFound("This prompt is not in the run, or no longer.")
    times = [_time(snapshot, each, run) for each in _by_group(snapshot, members)[-MOST_STEPS:]]
    asked, _ = texts_of(snapshot, int(members[0]), run.texts)
    return {"prompt": prompt_name(key), "prompt_said": asked, "times": times}


def _by_group(snapshot: Snapshot, members: np.ndarray) -> list[np.ndarray]:
    keys = np.stack([snapshot.numbers["step"][members], snapshot.numbers["group"][members]], axis=1)
    _, owner = np.unique(keys, axis=0, return_inverse=True)
    return [members[owner.reshape(-1) == number] for number in range(int(owner.max()) + 1)]


def _time(snapshot: Snapshot, members: np.ndarray, run: RunFolder) -> Json:
    rewards = snapshot.numbers["reward"][members]
    is_known = np.isfinite(rewards)
    best = members[np.where(is_known, rewards, -np.inf).argmax()]
    worst = members[np.where(is_known, rewards, np.inf).argmin()]
    rows = rows_with_text(snapshot, np.array([best, worst]), run.texts)
    full = [texts_of(snapshot, int(each), run.texts)[1] for each in (best, worst)]
    return {
        "step": int(snapshot.numbers["step"][members[0]]),
        "group": int(snapshot.numbers["group"][members[0]]),
        "completions": len(members),
        "mean": known(rewards[is_known].mean()) if is_known.any() else None,
        "rewards": [known(value) for value in rewards],
        "tokens": known(snapshot.numbers["tokens"][members].mean()),
        "best": rows[0] | {"completion_said": full[0]},
        "worst": rows[1] | {"completion_said": full[1]},
    }


def exported(viewed: Viewed, body: Json) -> Json:
    """Chosen rollouts (`ids`), or all that a filter finds (`filter`), as JSON lines."""
    words = {name: str(value) for name, value in (body.get("filter") or {}).items()}
    run = viewed.run(Question({"run": str(body.get("run", ""))}))
    run.rollouts.refresh()
    snapshot = run.rollouts.snapshot()
    ids = body.get("ids")
    if ids is not None and not isinstance(ids, list):
        raise ViewError("ids is no list of rollouts.")
    if ids is None:
        numbers = matching(snapshot, RolloutQuery.of(Question(words)), run.texts).tolist()
    else:
        numbers = numbers_of(snapshot, ids)
    kind = str(body.get("format", ""))
    made = export(kind, snapshot, numbers, run.texts)
    return {
        "name": f"{run.path.name}-{kind}.jsonl",
        "rows": len(made.rows),
        "skipped": dict(made.skipped),
        "json_lines": made.json_lines(),
    }


Asked = Callable[[Viewed, Question], Json]
GET: dict[str, Asked] = {
    "/api/runs": runs,
    "/api/metrics": metrics,
    "/api/info": info,
    "/api/data": data,
    "/api/rollouts": rollouts,
    "/api/group": group,
    "/api/prompt": prompt,
}
POST: dict[str, Callable[[Viewed, Json], Json]] = {"/api/export": exported}
