"""The index says of every rollout what the store says, and keeps up with a run that writes, removes and breaks files."""

from __future__ import annotations

import math
import os
import shutil

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.rollout.store import RolloutStore, read_rollouts
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.questions import Question
from posttrain.view.rollout_detail import details, row_of
from posttrain.view.rollout_index import RolloutIndex
from posttrain.view.rollout_query import RolloutQuery, reward_names, with_ids
from tests.view.made_up import make_tokenizer, write_step


@pytest.fixture(scope="module")
def index(run_folder):
    index = RolloutIndex(run_folder)
    index.refresh(wait=None, mismatch=True)
    return index


@pytest.fixture(scope="module")
def records(run_folder):
    return read_rollouts(run_folder).to_pylist()


def in_order(index):
    """As the store has them."""
    return RolloutQuery(order="step, numbers, place").rows(index)


def values(rows, name):
    return np.array([math.nan if row[name] is None else row[name] for row in rows], dtype=float)


def same(one, other):
    return (one is None and other is None) or one == pytest.approx(other, rel=1e-5)


def test_every_column_equals_the_store(index, records):
    assert len(index) == len(records) == 480
    names = reward_names(index)
    for number, (found, record) in enumerate(zip(in_order(index), records, strict=True)):
        row = row_of(found, names)
        for name in ("step", "row", "group", "sample", "author", "masked", "truncated", "policy_version"):
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
    for value, record in zip(values(in_order(index), "mismatch"), records, strict=True):
        apart = [abs(a - b) for a, b, t in zip(record["sampling_logps"], record["old_logps"], record["trained"]) if t]
        assert math.isnan(value) if not apart else value == pytest.approx(np.mean(apart), rel=1e-4)


def test_log_probs_that_are_not_known(tmp_path):
    with RolloutStore(tmp_path) as store:
        common = {"group": 0, "prompt": "?", "completion": "ab", "completion_ids": [1, 2], "trained": [True, True]}
        logps = {"sampling_logps": [-1.0, math.nan], "old_logps": [-1.5, -2.0]}
        store.write(1, [{**common, "sample": 0}, {**common, "sample": 1, **logps}])
    index = RolloutIndex(tmp_path)
    index.refresh(wait=None, mismatch=True)
    rows = in_order(index)
    missing, half = values(rows, "mismatch")
    assert math.isnan(missing)
    assert half == pytest.approx(0.5)  # the token without a number does not count
    assert row_of(rows[0], reward_names(index))["reward"] is None
    assert row_of(rows[0], reward_names(index))["rewards"] == {}


def found(index, **words):
    return RolloutQuery.of(Question(words), index).rows(index)


FILTERS = [
    ({"q": "apples"}, lambda r: "apples" in r["prompt"].lower() or "apples" in r["completion"].lower()),
    ({"q": "ZERODIVISION"}, lambda r: "zerodivision" in r["completion"].lower()),
    ({"step_min": "2", "step_max": "3"}, lambda r: 2 <= r["step"] <= 3),
    ({"reward_min": "1", "reward_max": "1.1"}, lambda r: r["reward"] is not None and 1 <= r["reward"] <= 1.1),
    ({"flags": "tool_error"}, lambda r: any(call["error"] for call in r["tool_calls"])),
    ({"flags": "truncated,tool_calls"}, lambda r: r["truncated"] and r["tool_calls"]),
    ({"flags": "images"}, lambda r: r["images"]),
    ({"flags": "error"}, lambda r: r["error"]),
    ({"flags": "failed_reward"}, lambda r: r["failures"]),
    ({"flags": "masked"}, lambda r: r["masked"]),
    ({"flags": "no_advantage"}, lambda r: r["advantage"] == 0),
    ({"group": "7"}, lambda r: r["group"] == 7),
]


@pytest.mark.parametrize(("words", "is_wanted"), FILTERS)
def test_filters_find_what_a_loop_finds(index, records, words, is_wanted):
    rows = found(index, **words)
    wanted = {(r["step"], r["group"], r["sample"]) for r in records if is_wanted(r)}
    assert {(row["step"], row["group"], row["sample"]) for row in rows} == wanted
    assert len(rows) == len(wanted)


@pytest.mark.parametrize("name", ["reward", "tokens", "mismatch", "step", "advantage"])
def test_sorting_puts_what_is_unknown_last(index, name):
    for sign in (1, -1):
        sorted_values = values(found(index, sort=("-" if sign < 0 else "") + name), name)
        known = sorted_values[np.isfinite(sorted_values)]
        assert len(sorted_values) == 480
        assert np.all(np.isfinite(sorted_values[: len(known)]))
        assert np.all(sign * np.diff(known) >= 0)


def test_sorting_by_one_reward(index):
    rewards = [row["rewards"].get("format") for row in found(index, sort="-reward:format")]
    known = [reward for reward in rewards if reward is not None]
    assert len(known) < len(rewards) == 480
    assert known == sorted(known, reverse=True)
    assert rewards[: len(known)] == known


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"sort": "beauty"}, "cannot be sorted by 'beauty'"),
        ({"sort": "reward:no"}, "no reward 'no'"),
        ({"flags": "odd"}, "no flag 'odd'"),
        ({"reward_min": "much"}, "'much' is not a number"),
        ({"prompt": "xyz"}, "not the key of a prompt"),
    ],
)
def test_wrong_questions_are_named(index, words, sentence):
    with pytest.raises(ViewError, match=sentence):
        found(index, **words)


def test_the_same_prompt_has_the_same_key_at_every_step(index, records):
    keys = {}
    for row, record in zip(in_order(index), records, strict=True):
        keys.setdefault(record["prompt"], set()).add(row["prompt_key"])
    assert all(len(each) == 1 for each in keys.values())
    assert len({key for each in keys.values() for key in each}) == len(keys)


def test_names_lead_back_and_no_name_leads_elsewhere(index):
    rows = in_order(index)
    names = [rows[number]["id"] for number in (0, 79, 80, 479)]
    assert names == ["1/process-0/0", "1/process-0/79", "2/process-0/0", "6/process-0/79"]
    assert with_ids(index, names[::-1]) == [rows[number] for number in (479, 80, 79, 0)]
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
            with_ids(index, [name])


def test_details_have_the_tokens_of_the_store(index, records):
    for number in (0, 100, 479):
        (detail,) = details(in_order(index)[number : number + 1], [], None)
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
    assert len(index) == 4
    write_step(folder, tokenizer, 2, 10, prompts=3, samples=2)
    index.refresh(wait=None, mismatch=True)
    assert len(index) == 10
    RolloutStore(folder).forget_after(1)  # what a resumed run does
    index.refresh(wait=None)
    assert {row["step"] for row in in_order(index)} == {1}


def test_a_file_that_is_written_again_is_read_again(growing):
    folder, tokenizer = growing
    index = RolloutIndex(folder)
    index.refresh(wait=None)
    path = folder / "rollouts/step=000001/process-0.parquet"
    before = [row["completion"] for row in in_order(index)]
    shutil.rmtree(path.parent)
    write_step(folder, tokenizer, 1, 5, prompts=1, samples=3)
    os.utime(path, ns=(1, 1))
    index.refresh(wait=None)
    assert len(index) == 3
    assert [row["completion"] for row in in_order(index)] != before


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
    assert len(index) == 4
    assert sorted(index.progress.unreadable) == ["step=000003/process-0.parquet", "step=000004/process-0.parquet"]
    (folder / "rollouts/step=000003/process-0.parquet").write_bytes(good)  # the copy of a folder went on
    index.refresh(wait=None)
    assert len(index) == 8
    assert sorted(index.progress.unreadable) == ["step=000004/process-0.parquet"]


def test_no_rollouts_at_all(tmp_path):
    index = RolloutIndex(tmp_path)
    index.refresh(wait=None, mismatch=True)
    assert len(index) == len(found(index, q="x", flags="error", sort="-reward")) == 0


# ---- what somebody typed, or wrote into a file -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["' OR true --", "%", "_", "*", "$text", "'; DROP TABLE rollouts; --", "\\", "\0"])
def test_what_was_typed_is_data(index, records, text):
    wanted = sum(text in record["prompt"] or text in record["completion"] for record in records)
    assert len(found(index, q=text)) == wanted < 480
    for word in ("sort", "flags", "prompt"):
        with pytest.raises(ViewError):
            found(index, **{word: f"step {text}"})
    with pytest.raises(NotFound):
        with_ids(index, [text])
    assert len(index) == 480


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('{file}')",
        "SELECT * FROM '{file}'",
        "COPY rollouts TO '{file}'",
        "ATTACH '{file}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
    ],
)
def test_sql_reaches_no_file_and_loads_nothing(index, tmp_path, sql):
    (tmp_path / "secret.csv").write_text("a,b")
    with pytest.raises(duckdb.Error, match=r"disabled|locked|Cannot change|cannot be"):
        index.rows(sql.format(file=tmp_path / "secret.csv"))
    assert (tmp_path / "secret.csv").read_text() == "a,b"


def test_a_file_with_columns_of_other_kinds_is_named_and_the_others_are_read(growing):
    folder, _ = growing
    path = folder / "rollouts/step=000002/process-0.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"reward": ["much"], "group": [1]}), path)
    index = RolloutIndex(folder)
    index.refresh(wait=None, mismatch=True)
    assert len(index) == 4
    assert list(index.progress.unreadable) == ["step=000002/process-0.parquet"]
    assert "much" in index.progress.unreadable["step=000002/process-0.parquet"]
