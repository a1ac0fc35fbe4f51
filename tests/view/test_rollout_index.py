"""The index says of every rollout what the store says, and keeps up with a run that writes, removes and breaks files."""

from __future__ import annotations

import math
import os
import shutil

import numpy as np
import pytest

from posttrain.rollout.rollout_store import RolloutStore, read_rollouts
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.questions import Question
from posttrain.view.rollout_detail import details, identity, numbers_of, row_of
from posttrain.view.rollout_index import RolloutIndex
from posttrain.view.rollout_query import RolloutQuery, Texts, matching, prompt_name
from tests.view.made_up import make_tokenizer, write_step


@pytest.fixture(scope="module")
def index(run_folder):
    index = RolloutIndex(run_folder)
    index.refresh(wait=None, mismatch=True)
    return index


@pytest.fixture(scope="module")
def records(run_folder):
    return read_rollouts(run_folder).to_pylist()


def same(one, other):
    return (one is None and other is None) or one == pytest.approx(other, rel=1e-5)


def test_every_column_equals_the_store(index, records):
    snapshot = index.snapshot()
    assert len(snapshot) == len(records) == 480
    for number, record in enumerate(records):
        row = row_of(snapshot, number)
        for name in ("step", "row", "group", "sample", "masked", "truncated", "policy_version"):
            assert row[name] == record[name], (number, name)
        assert same(row["reward"], record["reward"])
        assert same(row["advantage"], record["advantage"])
        assert row["tokens"] == len(record["completion_ids"])
        assert row["trained_tokens"] == sum(record["trained"])
        assert row["tool_calls"] == len(record["tool_calls"])
        assert row["tool_errors"] == sum(call["error"] is not None for call in record["tool_calls"])
        assert row["failures"] == len(record["failures"])
        assert row["error"] == (record["error"] is not None)
        assert row["finish"] == record["finish_reason"]
        stored = dict(record["rewards"])
        assert all(same(row["rewards"][name], stored.get(name)) for name in ("accuracy", "format"))


def test_mismatch_is_the_mean_over_trained_tokens(index, records):
    values = index.snapshot().numbers["mismatch"]
    for value, record in zip(values, records):
        apart = [abs(a - b) for a, b, t in zip(record["sampling_logps"], record["old_logps"], record["trained"]) if t]
        assert math.isnan(value) if not apart else value == pytest.approx(np.mean(apart), rel=1e-4)


def test_log_probs_that_are_not_known(tmp_path):
    with RolloutStore(tmp_path) as store:
        common = {"group": 0, "prompt": "?", "completion": "ab", "completion_ids": [1, 2], "trained": [True, True]}
        logps = {"sampling_logps": [-1.0, math.nan], "old_logps": [-1.5, -2.0]}
        store.write(1, [{**common, "sample": 0}, {**common, "sample": 1, **logps}])
    index = RolloutIndex(tmp_path)
    index.refresh(wait=None, mismatch=True)
    missing, half = index.snapshot().numbers["mismatch"]
    assert math.isnan(missing)
    assert half == pytest.approx(0.5)  # the token without a number does not count
    assert row_of(index.snapshot(), 0)["reward"] is None
    assert row_of(index.snapshot(), 0)["rewards"] == {}


def found(index, **words):
    snapshot = index.snapshot()
    return snapshot, matching(snapshot, RolloutQuery.of(Question(words)), Texts())


FILTERS = [
    ({"q": "apples"}, lambda r: "apples" in r["prompt"].lower() or "apples" in r["completion"].lower()),
    ({"q": "ZERODIVISION"}, lambda r: "zerodivision" in r["completion"].lower()),
    ({"step_min": "2", "step_max": "3"}, lambda r: 2 <= r["step"] <= 3),
    ({"reward_min": "1", "reward_max": "1.1"}, lambda r: r["reward"] is not None and 1 <= r["reward"] <= 1.1),
    ({"flags": "tool_error"}, lambda r: any(call["error"] for call in r["tool_calls"])),
    ({"flags": "truncated,tool_calls"}, lambda r: r["truncated"] and r["tool_calls"]),
    ({"flags": "error"}, lambda r: r["error"]),
    ({"flags": "failed_reward"}, lambda r: r["failures"]),
    ({"flags": "masked"}, lambda r: r["masked"]),
    ({"flags": "no_advantage"}, lambda r: r["advantage"] == 0),
    ({"group": "7"}, lambda r: r["group"] == 7),
]


@pytest.mark.parametrize(("words", "is_wanted"), FILTERS)
def test_filters_find_what_a_loop_finds(index, records, words, is_wanted):
    snapshot, numbers = found(index, **words)
    wanted = {(r["step"], r["group"], r["sample"]) for r in records if is_wanted(r)}
    rows = [row_of(snapshot, number) for number in numbers]
    assert {(row["step"], row["group"], row["sample"]) for row in rows} == wanted
    assert len(rows) == len(wanted)


@pytest.mark.parametrize("name", ["reward", "tokens", "mismatch", "step", "advantage"])
def test_sorting_puts_what_is_unknown_last(index, name):
    for sign in (1, -1):
        snapshot, numbers = found(index, sort=("-" if sign < 0 else "") + name)
        values = snapshot.numbers[name][numbers]
        known = values[np.isfinite(values)]
        assert len(values) == 480
        assert np.all(np.isfinite(values[: len(known)]))
        assert np.all(sign * np.diff(known) >= 0)


def test_sorting_by_one_reward(index):
    snapshot, numbers = found(index, sort="-reward:format")
    values = snapshot.rewards["format"][numbers]
    assert np.all(np.diff(values[np.isfinite(values)]) <= 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"sort": "beauty"}, "cannot be sorted by 'beauty'"),
        ({"sort": "reward:no"}, "no reward 'no'"),
        ({"flags": "odd"}, "no flag 'odd'"),
        ({"reward_min": "much"}, "'much' is no number"),
        ({"prompt": "xyz"}, "no key of a prompt"),
    ],
)
def test_wrong_questions_are_named(index, words, sentence):
    with pytest.raises(ViewError, match=sentence):
        found(index, **words)


def test_the_same_prompt_has_the_same_key_at_every_step(index, records):
    snapshot = index.snapshot()
    keys = {}
    for number, record in enumerate(records):
        keys.setdefault(record["prompt"], set()).add(prompt_name(snapshot.prompt[number]))
    assert all(len(each) == 1 for each in keys.values())
    assert len({key for each in keys.values() for key in each}) == len(keys)


def test_names_lead_back_and_no_name_leads_elsewhere(index):
    snapshot = index.snapshot()
    names = [identity(snapshot, number) for number in (0, 79, 80, 479)]
    assert names == ["1/process-0/0", "1/process-0/79", "2/process-0/0", "6/process-0/79"]
    assert numbers_of(snapshot, names) == [0, 79, 80, 479]
    for name in (
        "1/process-0/80",
        "1/process-0/-1",
        "../../etc/passwd/0",
        "1/../process-0/0",
        "7/process-0/0",
        "",
        "1/process-0/٣",
    ):
        with pytest.raises(NotFound):
            numbers_of(snapshot, [name])


def test_details_have_the_tokens_of_the_store(index, records):
    for number in (0, 100, 479):
        detail = details(index.snapshot(), [number], None)[0]
        record = records[number]
        assert detail["ids"] == record["completion_ids"]
        assert detail["trained"] == [int(flag) for flag in record["trained"]]
        assert detail["sampling_logps"] == pytest.approx(record["sampling_logps"], rel=1e-4, abs=1e-9)
        assert [call["name"] for call in detail["calls"]] == [call["name"] for call in record["tool_calls"]]
        assert detail["reference_logps"] is None


# ---- while a run writes --------------------------------------------------------------------------------------------------


@pytest.fixture
def growing(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    write_step(tmp_path, tokenizer, 1, 10, prompts=2, samples=2)
    return tmp_path, tokenizer


def test_new_files_are_found_and_removed_ones_forgotten(growing):
    folder, tokenizer = growing
    index = RolloutIndex(folder)
    index.refresh(wait=None)
    assert len(index.snapshot()) == 4
    write_step(folder, tokenizer, 2, 10, prompts=3, samples=2)
    index.refresh(wait=None, mismatch=True)
    assert len(index.snapshot()) == 10
    RolloutStore(folder).forget_after(1)  # what a resumed run does
    index.refresh(wait=None)
    assert set(index.snapshot().numbers["step"]) == {1.0}


def test_a_file_that_is_written_again_is_read_again(growing):
    folder, tokenizer = growing
    index, texts = RolloutIndex(folder), Texts()
    index.refresh(wait=None)
    path = folder / "rollouts/step=000001/process-0.parquet"
    before = texts.of(path).column("completion").to_pylist()
    shutil.rmtree(path.parent)
    write_step(folder, tokenizer, 1, 5, prompts=1, samples=3)
    os.utime(path, ns=(1, 1))
    index.refresh(wait=None)
    assert len(index.snapshot()) == 3
    assert texts.of(path).column("completion").to_pylist() != before


def test_unfinished_and_broken_files_are_told_and_break_nothing(growing):
    folder, _ = growing
    good = (folder / "rollouts/step=000001/process-0.parquet").read_bytes()
    for name, content in (
        ("step=000002/.process-0.parquet.unfinished", good[:100]),
        ("step=000003/process-0.parquet", good[: len(good) // 2]),
        ("step=000004/process-0.parquet", b""),
        ("step=xyz/process-0.parquet", good),
        ("notes.txt", b"hello"),
    ):
        path = folder / "rollouts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    index = RolloutIndex(folder)
    index.refresh(wait=None, mismatch=True)
    assert len(index.snapshot()) == 4
    assert sorted(index.progress.unreadable) == ["step=000003/process-0.parquet", "step=000004/process-0.parquet"]
    (folder / "rollouts/step=000003/process-0.parquet").write_bytes(good)  # the copy of a folder went on
    index.refresh(wait=None)
    assert len(index.snapshot()) == 8
    assert sorted(index.progress.unreadable) == ["step=000004/process-0.parquet"]


def test_no_rollouts_at_all(tmp_path):
    index = RolloutIndex(tmp_path)
    index.refresh(wait=None, mismatch=True)
    snapshot, numbers = found(index, q="x", flags="error", sort="-reward")
    assert len(snapshot) == len(numbers) == 0
