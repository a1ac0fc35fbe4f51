"""The datasets that options name: rows to evaluate on that nothing evaluates, and entries of `datasets` that cannot be."""

from __future__ import annotations

import json

import pytest
import yaml

from posttrain.cli.errors import UsageError
from posttrain.cli.options.arguments import RunConfig, parse
from posttrain.cli.running.datasets_of import datasets_of
from tests.cli.runs import flags, options_of, posttrain


def with_options(**options):
    """A config of sft, as a file of options would make it."""
    return RunConfig("sft", options, dict.fromkeys(options, "run.yaml"))


def loaded(**options):
    return datasets_of(with_options(**{"dataset_name": "sft.jsonl", **options}))


# ------------------------------------------------------------------------------------------------ rows to evaluate on


@pytest.mark.parametrize("given", [{"eval_dataset_name": "nosuch.jsonl"}, {"test_split_size": 4}])
@pytest.mark.parametrize("command", ["sft", "check"])
def test_rows_that_nothing_evaluates_are_refused(folder, capsys, command, given):
    (folder / "run.yaml").write_text(yaml.safe_dump({"method": "sft", **options_of("sft"), **given}))
    assert posttrain(command, "run.yaml") == 2
    told = capsys.readouterr().err
    name, value = next(iter(given.items()))
    assert f"run.yaml, `{name}` is {value!r}" in told.replace("4.0", "4")
    assert "`eval_strategy: steps`" in told
    with pytest.raises(UsageError, match="never evaluates"):
        loaded(**given, do_eval=True)


def test_rows_to_evaluate_on_are_read(folder):
    lines = [json.dumps({"prompt": "p", "completion": "c"}) + "\n"] * 3
    (folder / "eval.jsonl").write_text("".join(lines))
    for when in ({"eval_strategy": "steps"}, {"eval_on_start": True}):
        train, evaluation = loaded(eval_dataset_name="eval.jsonl", **when)
        assert (len(train), len(evaluation)) == (24, 3)
        train, evaluation = loaded(test_split_size=4, **when)
        assert (len(train), len(evaluation)) == (20, 4)
    with pytest.raises(UsageError, match="both name rows to evaluate on"):
        loaded(eval_dataset_name="eval.jsonl", test_split_size=4, eval_strategy="steps")
    assert loaded(eval_on_start=True)[1] is None  # tasks of `evals` are answered at the start, no rows are needed


def test_a_file_of_trl_that_holds_rows_out_for_nothing_is_warned_of(folder, caplog):
    train, evaluation = loaded(datasets=[{"path": "sft.jsonl"}], test_split_size=0.25)
    assert (len(train), len(evaluation)) == (18, 6)
    assert "`test_split_size` is 0.25, and the run never evaluates" in caplog.text
    assert "`eval_strategy: steps`" in caplog.text


def test_the_rows_that_are_trained_on_are_not_evaluated(folder):
    (folder / "parts").mkdir()
    (folder / "parts" / "a.jsonl").write_text((folder / "sft.jsonl").read_text())
    with pytest.raises(UsageError, match=r"parts is a folder without a split 'test'.*--test_split_size"):
        loaded(dataset_name="parts", eval_strategy="steps")
    (folder / "parts" / "a.jsonl").rename(folder / "parts" / "train.jsonl")
    (folder / "parts" / "eval.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    train, evaluation = loaded(dataset_name="parts", eval_strategy="steps")
    assert (len(train), len(evaluation)) == (24, 1)
    with pytest.raises(UsageError, match=r"parts of `datasets` names the split 'train', which is trained on"):
        loaded(datasets=[{"path": "parts", "split": "train"}], eval_strategy="steps")


# ---------------------------------------------------------------------------------------------------------- `datasets`


ENTRIES = {
    "a weight in words": ({"weight": "two"}, ["entry 1", "weight='two'", "a number is needed"]),
    "a weight of nothing": ({"weight": 0}, ["entry 1", "weight=0", "positive"]),
    "one column without brackets": ({"columns": "messages"}, ["entry 1", "`columns` is 'messages'", "[messages]"]),
    "columns that are numbers": ({"columns": [1]}, ["entry 1", "`columns` is [1]"]),
    "a split that is a number": ({"split": 3}, ["entry 1", "`split` is 3", "text"]),
    "a share in words": ({"fraction": "half"}, ["entry 1", "`fraction` is 'half'"]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_that_cannot_be(folder, case):
    changes, wanted = ENTRIES[case]
    with pytest.raises(UsageError) as told:
        loaded(datasets=[{"path": "sft.jsonl", **changes}])
    assert all(words in str(told.value) for words in wanted), told.value


def test_an_entry_may_be_a_path(folder):
    train, _ = loaded(datasets=["sft.jsonl", {"path": "sft.jsonl", "weight": 2}])
    assert len(train) == 72
    with pytest.raises(UsageError, match="entry 1: `fraction` is None; where one entry has a share"):
        loaded(datasets=["sft.jsonl", {"path": "sft.jsonl", "fraction": 0.5}])


def test_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    for words in (["--dataset", "~/sft.jsonl"], ["--datasets", '[{"path": "~/sft.jsonl"}]']):
        assert len(datasets_of(parse("sft", words))[0]) == 24


# ----------------------------------------------------------------------------------------------------- what is checked


def test_tools_of_one_part_are_seen_by_check(folder, capsys):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tool = {"type": "function", "function": {"name": "look", "description": 7, "parameters": {}}}
    (folder / "tools.jsonl").write_text(json.dumps({"messages": chat, "tools": ["no tool", tool]}) + "\n")
    (folder / "plain.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    options = {**options_of("sft"), "datasets": json.dumps([{"path": "tools.jsonl"}, {"path": "plain.jsonl"}])}
    del options["dataset_name"]
    assert posttrain("check", "sft", *flags(options)) == 1
    assert "tools" in capsys.readouterr().out


def test_a_file_without_rows_is_told_by_check(folder, capsys):
    (folder / "blank.jsonl").write_text("\n\n")
    options = {**options_of("sft"), "dataset_name": "blank.jsonl"}
    assert posttrain("check", "sft", *flags(options)) == 1
    assert "blank.jsonl has no rows" in " ".join(capsys.readouterr().out.split())
    assert posttrain("sft", *flags(options)) == 2
    assert "blank.jsonl has no rows" in capsys.readouterr().err
