"""`posttrain rollouts RUN --to dpo`: the rows of the page's export, from the command line."""

from __future__ import annotations

import json

import pytest

from posttrain.rollout.store import RolloutStore
from tests.cli.runs import posttrain
from tests.view.test_export import rollout


@pytest.fixture
def run(tmp_path):
    with RolloutStore(tmp_path / "run") as store:
        store.write(1, [rollout(0, 0, " 5", 0.0), rollout(0, 1, " 4", 1.0), rollout(0, 2, " four", 0.5)])
        store.write(2, [rollout(1, 0, " 9", 1.0, "3 + 6 ="), rollout(1, 1, " 9", 1.0, "3 + 6 =")])
    return tmp_path / "run"


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_pairs_go_to_the_standard_output_and_what_was_left_out_is_said(run, capsys):
    assert posttrain("rollouts", str(run), "--to", "dpo") == 0
    said = capsys.readouterr()
    assert rows_of(said.out) == [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
    assert said.err == "1 rows for dpo, 1 left out (all rewards of the group are equal).\n"


def test_what_was_said_goes_to_a_file_within_limits(run, tmp_path):
    file = tmp_path / "new" / "rows.jsonl"
    assert (
        posttrain("rollouts", str(run), "--to", "sft", "--output", str(file), "--reward-min", "0.5", "--step-max", "1")
        == 0
    )
    assert rows_of(file.read_text()) == [
        {"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "2 + 2 =", "completion": " four"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "csv"], "invalid choice: 'csv'"),
        (["--to", "dpo", "--flags", "lost"], "There is no flag 'lost'"),
        (["--to", "dpo", "--reward-min", "high"], "reward_min='high' is not a number"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(run, capsys, words, said):
    assert posttrain("rollouts", str(run), *words) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_rollouts(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert posttrain("rollouts", str(tmp_path), "--to", "dpo") == 2
    assert "has no rollouts" in capsys.readouterr().err


def test_a_damaged_file_is_named(run, capsys):
    damaged = next((run / "rollouts").rglob("*.parquet"))
    damaged.write_bytes(b"PAR1")
    assert posttrain("rollouts", str(run), "--to", "sft") == 1
    said = capsys.readouterr().err
    assert f"{damaged.parent.name}/{damaged.name} cannot be read, and its rollouts are missing" in said


def test_nothing_within_the_limits_is_no_success(run, capsys):
    assert posttrain("rollouts", str(run), "--to", "sft", "--step-min", "9") == 1
    assert capsys.readouterr().err == "0 rows for sft.\n"
