"""Every rollout is kept: what is written is read back, in any tool, after any crash, without training waiting for it."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from posttrain.core.sample import Sample
from posttrain.rollout import store as rollout_store
from posttrain.rollout.rollout import OLD_LOGPS, SAMPLING_LOGPS, Request, Rollout, ToolCall
from posttrain.rollout.store import ROLLOUT_SCHEMA, DamagedRollouts, RolloutStore, read_rollouts, record_of

NAN = float("nan")
PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def a_rollout(number: int = 3, tokens: int = 5, **fields) -> Rollout:
    rng = np.random.default_rng(number)
    sample = Sample.of_text(rng.integers(0, 250, 4), rng.integers(0, 250, tokens), row=17)
    sample.policy_version = 6
    sample.trained[-2] = False  # somebody else's token
    for name in (SAMPLING_LOGPS, OLD_LOGPS):
        sample.per_token[name] = rng.normal(size=4 + tokens).astype(np.float32)
    defaults = {
        "request": Request(row=17, number=number, sample=1),
        "prompt": "two plus two",
        "completion": "four\n\u00e9\U0001f600",
        "rewards": {"accuracy": 1.0, "style": NAN},
        "reward": 1.0,
        "advantage": 0.75,
        "seconds": {"generate": 0.5},
    }
    return Rollout(sample=sample, prompt_length=4, **{**defaults, **fields})


def written(folder, step, rollouts, process_index=0):
    with RolloutStore(folder, process_index) as store:
        store.write(step, [record_of(rollout, epoch=0.25) for rollout in rollouts])


# ---- what is kept --------------------------------------------------------------------------------------------------------


def test_a_rollout_is_read_back_as_it_was(tmp_path):
    rollout = a_rollout()
    written(tmp_path, 12, [rollout])
    table = read_rollouts(tmp_path)
    assert table.schema.equals(ROLLOUT_SCHEMA, check_metadata=True)
    (row,) = table.to_pylist()
    sample = rollout.sample
    assert row["prompt_ids"] == sample.input_ids[:4].tolist()
    assert row["completion_ids"] == sample.input_ids[4:].tolist()
    assert row["trained"] == [True, True, True, False, True]
    assert row["sampling_logps"] == sample.per_token[SAMPLING_LOGPS][4:].tolist()
    assert row["old_logps"] == sample.per_token[OLD_LOGPS][4:].tolist()
    assert row["reference_logps"] is None
    assert dict(row["rewards"]) == {"accuracy": 1.0, "style": None}
    assert dict(row["seconds"]) == {"generate": 0.5}
    plain = {
        "step": 12, "epoch": 0.25, "row": 17, "group": 3, "sample": 1, "author": "policy", "prompt": "two plus two",
        "completion": "four\n\u00e9\U0001f600", "advantage": 0.75, "reward": 1.0, "failures": [], "tool_calls": [],
        "finish_reason": "stop", "error": None, "masked": False, "truncated": False, "policy_version": 6,
    }  # fmt: skip
    assert {name: row[name] for name in plain} == plain


def test_tools_failures_and_messages_are_kept(tmp_path):
    calls = [ToolCall("add", '{"a": 2}', "4", None, 0.1), ToolCall("add", "{", "", "bad JSON", 0.0)]
    failure = SimpleNamespace(sample=0, reward="style", kind="timeout", message="took longer than 5 s")
    messages = [{"role": "user", "content": "caf\u00e9"}]
    rollout = a_rollout(
        tool_calls=calls,
        failures=[failure],
        prompt=messages,
        reward=NAN,
        masked=True,
        finish_reason="length",
        error="x",
    )
    rollout.sample.per_token["reference_logps"] = np.full(9, -1.5, np.float32)
    written(tmp_path, 1, [rollout])
    (row,) = read_rollouts(tmp_path).to_pylist()
    assert row["tool_calls"] == [vars(call) for call in calls]
    assert row["failures"] == [{"reward": "style", "kind": "timeout", "message": "took longer than 5 s"}]
    assert json.loads(row["prompt"]) == messages
    assert row["reference_logps"] == [-1.5] * 5
    assert (row["reward"], row["masked"], row["truncated"], row["error"]) == (None, True, True, "x")


def test_unknown_logps_empty_completions_and_half_characters_are_kept(tmp_path):
    silent = a_rollout(1, tokens=2)
    silent.sample.per_token[SAMPLING_LOGPS][:] = NAN
    broken = a_rollout(2, completion="\ud800!", tool_calls=[ToolCall("t", '"\udfff"', "r")])
    written(tmp_path, 1, [silent, broken])
    with RolloutStore(tmp_path) as store:
        store.write(2, [{"completion_ids": [], "trained": [], "old_logps": []}, {}])
        store.write(3, [])
    rows = read_rollouts(tmp_path).to_pylist()
    assert all(math.isnan(value) for value in rows[0]["sampling_logps"])
    assert rows[1]["completion"] == "?!"
    assert rows[1]["tool_calls"][0]["arguments"] == '"?"'
    assert (rows[2]["completion_ids"], rows[3]["completion_ids"]) == ([], None)
    assert len(rows) == 4


def test_a_column_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="no column 'colour'"):
        rollout_store.table_of([{"colour": 1}])


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_steps_processes_and_second_writes_have_files_of_their_own(tmp_path):
    for step, process, number in ((2, 0, 20), (10, 0, 100), (10, 1, 101), (10, 0, 102), (10, 10, 103), (10, 2, 104)):
        written(tmp_path, step, [a_rollout(number)], process)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet"))
    tens = [f"rollouts/step=000010/process-{name}.parquet" for name in ("0-1", "0", "1", "10", "2")]
    assert names == ["rollouts/step=000002/process-0.parquet", *sorted(tens)]
    table = read_rollouts(tmp_path)
    assert table["step"].to_pylist() == [2, 10, 10, 10, 10, 10]
    assert table["group"].to_pylist() == [20, 100, 102, 101, 104, 103]  # processes in the order of their numbers
    assert read_rollouts(tmp_path, steps=[2, 3])["group"].to_pylist() == [20]
    assert len(read_rollouts(tmp_path / "nowhere")) == 0


def test_other_tools_read_the_folder_and_find_the_step(tmp_path):
    pandas = pytest.importorskip("pandas")
    for step in (1, 2):
        written(tmp_path, step, [a_rollout(step)])
    frame = pandas.read_parquet(tmp_path / "rollouts")
    assert frame["step"].astype(int).tolist() == [1, 2]
    assert set(frame.columns) == set(ROLLOUT_SCHEMA.names)
    (file,) = (tmp_path / "rollouts" / "step=000001").glob("*.parquet")
    described = pq.read_schema(file)
    assert all(described.field(name).metadata[b"description"] for name in described.names)
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_resumed_run_forgets_what_it_will_make_again(tmp_path):
    for step in (8, 9, 10, 11):
        for process in (0, 1):
            written(tmp_path, step, [a_rollout(step)], process)
    left = tmp_path / "rollouts" / "step=000009" / ".process-0.parquet.unfinished"
    left.write_bytes(b"killed in the middle")
    with RolloutStore(tmp_path) as store:
        assert store.forget_after(9) == [10, 11]
        assert not left.exists()
        store.write(10, [record_of(a_rollout(99), 0.5)])
    assert read_rollouts(tmp_path)["group"].to_pylist() == [8, 8, 9, 9, 99]


def test_a_file_that_was_not_finished_is_not_read(tmp_path):
    written(tmp_path, 1, [a_rollout(1)])
    (tmp_path / "rollouts" / "step=000001" / ".process-0-1.parquet.unfinished").write_bytes(b"half")
    assert len(read_rollouts(tmp_path)) == 1


def test_rollouts_of_a_version_without_authors_are_read(tmp_path):
    written(tmp_path, 1, [a_rollout(1)])
    (file,) = tmp_path.rglob("process-0.parquet")
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns(["author"]), file)
    for record in tmp_path.rglob("*.xxh3"):
        record.unlink()
    (row,) = read_rollouts(tmp_path).to_pylist()
    assert (row["author"], row["prompt"]) == (None, "two plus two")


# ---- the thread ----------------------------------------------------------------------------------------------------------


def test_training_does_not_wait_for_the_disk_and_close_does(tmp_path, monkeypatch):
    go_on = threading.Event()
    real = rollout_store.write_file

    def slow(*given):
        go_on.wait(10)
        real(*given)

    monkeypatch.setattr(rollout_store, "write_file", slow)
    store = RolloutStore(tmp_path)
    for step in range(3):
        store.write(step, [record_of(a_rollout(step), 0.0)])
    assert len(read_rollouts(tmp_path)) == 0
    go_on.set()
    store.close()
    assert read_rollouts(tmp_path)["step"].to_pylist() == [0, 1, 2]


def test_a_disk_that_is_too_slow_holds_training_back_before_memory_is_full(tmp_path, monkeypatch):
    begun = []

    def slow(*given):
        begun.append(given)
        time.sleep(0.02)

    monkeypatch.setattr(rollout_store, "write_file", slow)
    with RolloutStore(tmp_path) as store:
        for step in range(12):
            store.write(step, [])
            assert step + 1 - len(begun) <= rollout_store.MAX_WAITING


def test_what_a_full_disk_does_not_take_is_written_later_or_is_an_error_at_the_end(tmp_path, monkeypatch, caplog):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(rollout_store.os, "fsync", no_space)
        store = RolloutStore(tmp_path)
        for step in (7, 8):
            store.write(step, [record_of(a_rollout(), 0.0)])
        store.flush()
        assert (
            "The rollouts of step 7 could not be written (No space left on device); they are kept in memory"
            in caplog.text
        )
        assert not list(tmp_path.rglob("*.parquet"))
        assert not list(tmp_path.rglob("*.unfinished"))
    store.write(9, [record_of(a_rollout(), 0.0)])
    store.flush()
    assert read_rollouts(tmp_path)["step"].to_pylist() == [7, 8, 9]
    with monkeypatch.context() as full:
        full.setattr(rollout_store.os, "fsync", no_space)
        store.write(10, [record_of(a_rollout(), 0.0)])
        with pytest.raises(OSError, match=r"1 collections, the first is of step 10, could not be written") as caught:
            store.close()
    assert caught.value.errno == errno.ENOSPC


def test_another_error_of_the_thread_is_raised_by_the_next_call(tmp_path):
    store = RolloutStore(tmp_path)
    store.write(7, [{"no such column": 1}])
    with pytest.raises(ValueError, match="no column 'no such column'"):
        store.flush()
    store._unwritten.clear()
    store.close()


def test_a_usual_step_costs_training_almost_nothing(tmp_path):
    """256 rollouts of 512 tokens: handing over is what training pays. In processor time, whatever else runs."""
    records = [record_of(a_rollout(number, tokens=512), 0.0) for number in range(256)]
    with RolloutStore(tmp_path) as store:
        began, all_began = time.thread_time(), time.process_time()
        store.write(1, records)
        handed_over = time.thread_time() - began
        store.flush()
        whole = time.process_time() - all_began
    assert handed_over < whole / 5
    assert len(read_rollouts(tmp_path)) == 256


# ---- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_column_as_it_is():
    found = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    expected = [(f.name, str(f.type), f.metadata[b"description"].decode()) for f in ROLLOUT_SCHEMA]
    assert found == expected


# ---- what is read back -----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_never_reads_differently(tmp_path):
    """Of 1,500 bits, 204 read as other numbers without checksums, and 8 with those of pages alone."""
    written(tmp_path, 1, [a_rollout(number) for number in range(8)])
    expected = read_rollouts(tmp_path)
    (file,) = tmp_path.rglob("*.parquet")
    content = file.read_bytes()
    dice = random.Random(0)
    for _ in range(200):
        place = dice.randrange(8 * len(content))
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        file.write_bytes(changed)
        with pytest.raises(DamagedRollouts, match="was changed after it was written"):
            read_rollouts(tmp_path)
    file.write_bytes(content)
    assert read_rollouts(tmp_path).equals(expected)


def test_pages_have_checksums_for_other_readers(tmp_path):
    written(tmp_path, 1, [a_rollout(number) for number in range(8)])
    (file,) = tmp_path.rglob("*.parquet")
    content = bytearray(file.read_bytes())
    offset = (
        pq.ParquetFile(file)
        .metadata.row_group(0)
        .column(rollout_store.FILE_SCHEMA.get_field_index("tools"))
        .data_page_offset
    )
    content[offset + 40] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(file, page_checksum_verification=True, partitioning=None)


def test_rollouts_of_a_version_without_digests_are_read(tmp_path):
    written(tmp_path, 1, [a_rollout(1)])
    for record in tmp_path.rglob("*.xxh3"):
        record.unlink()
    assert len(read_rollouts(tmp_path)) == 1
