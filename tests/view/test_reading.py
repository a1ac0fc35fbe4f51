"""Metrics that grow, run folders, texts of tokens, and the data preview."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from posttrain.cli.running.token_view import kinds_of
from posttrain.core.sample import Sample
from posttrain.core.secrets import without_secrets
from posttrain.data.store.token_store import StoreWriter, seal
from posttrain.trainer.checkpoints import skipped
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.trainer.report import alerts, display
from posttrain.view import api, run_folder
from posttrain.view.api import Viewed
from posttrain.view.errors import NoRunError, NotFound, ViewError
from posttrain.view.json_lines import GrowingLines, series_of
from posttrain.view.questions import Question
from posttrain.view.report import write_report
from posttrain.view.run_folder import open_runs
from posttrain.view.server import _as_json
from posttrain.view.summary import print_summary
from posttrain.view.token_text import TokenText
from tests.view.made_up import make_tokenizer


def test_names_of_files_are_those_that_trainers_write():
    assert run_folder.METRICS_FILE == display.METRICS_FILE
    assert run_folder.ALERTS_FILE == alerts.ALERTS_FILE
    assert run_folder.SKIPPED_FILE == skipped.FILE


# ---- metrics -------------------------------------------------------------------------------------------------------------


def test_lines_are_read_once_and_only_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    lines.refresh()
    assert lines.entries == []
    StepFile(path).append(1, {"loss": 2.0})
    lines.refresh()
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    lines.refresh()
    assert lines.entries == [{"step": 1, "loss": 2.0}]
    with open(path, "a") as file:
        file.write('ss": 1.5}\nnot json\n[1]\n')
    lines.refresh()
    assert [entry["step"] for entry in lines.entries] == [1, 2]
    assert lines.generation == 1


def test_a_resumed_run_begins_the_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        StepFile(path).append(step, {"loss": float(step)})
    viewed = Viewed(open_runs([str(tmp_path)]))
    first = api.metrics(viewed, Question({"run": "0"}))
    assert first["series"]["loss"] == [[1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0]]
    StepFile(path).append(6, {"loss": 6.0})
    words = {"run": "0", "since": str(first["lines"]), "generation": str(first["generation"])}
    assert api.metrics(viewed, Question(words))["series"] == {"loss": [[6], [6.0]]}
    StepFile(path).begin(3)
    StepFile(path).append(4, {"loss": 40.0})
    again = api.metrics(viewed, Question(words))
    assert again["since"] == 0
    assert again["series"]["loss"] == [[1, 2, 3, 4], [1.0, 2.0, 3.0, 40.0]]


def test_series_keep_gaps_and_leave_words():
    entries = [{"step": 1, "loss": 1.0, "note": "a", "flag": True}, {"step": 2, "loss": None}, {"loss": 3.0}]
    assert series_of(entries) == {"loss": ([1, 2], [1.0, None])}


# ---- folders -------------------------------------------------------------------------------------------------------------


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path):
    for name in ("a/one", "b/one", "b/two"):
        StepFile(tmp_path / name / "metrics.jsonl").append(1, {"loss": 1.0})
    (tmp_path / "b" / "empty").mkdir()
    runs = open_runs([str(tmp_path / "a/one"), str(tmp_path / "b")])
    assert [run.name for run in runs] == ["a/one", "b/one", "b/two"]


def test_what_is_no_run_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for path, sentence in (
        (tmp_path, "not the folder of a run"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "file", "is a file"),
    ):
        with pytest.raises(NoRunError, match=sentence):
            open_runs([str(path)])


def test_secrets_are_hidden_and_other_tokens_are_not():
    settings = {
        "hub_token": "a",
        "pad_token": "<pad>",
        "max_tokens": 5,
        "wandb": {"api_key": "b"},
        "password": "c",
        "token": None,
    }
    hidden = "(hidden)"
    assert without_secrets(settings) == {
        "hub_token": hidden, "pad_token": "<pad>", "max_tokens": 5, "wandb": {"api_key": hidden}, "password": hidden, "token": None
    }  # fmt: skip


def test_info_has_options_settings_and_alerts(tmp_path):
    StepFile(tmp_path / "metrics.jsonl").append(1, {"loss": 1.0})
    StepFile(tmp_path / "alerts.jsonl").append(1, {"kind": "loss", "seen": "it rose"})
    for step, rate in ((2, 0.1), (10, 0.2)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "training_args.json").write_text(json.dumps({"learning_rate": rate}))
    (tmp_path / "run.yaml").write_text("method: sft\nmodel: {hub_token: x}\n")
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    (tmp_path / "bad.yaml").write_text("!!python/object/apply:os.system [ls]")
    info = api.info(Viewed(open_runs([str(tmp_path)])), Question({"run": "0"}))
    assert info["options"] == {"learning_rate": 0.2}
    assert info["checkpoints"] == [2, 10]
    assert info["settings"] == {"run.yaml": {"method": "sft", "model": {"hub_token": "(hidden)"}}}
    assert info["alerts"][0]["seen"] == "it rose"


# ---- tokens --------------------------------------------------------------------------------------------------------------


def test_pieces_of_byte_level_tokens_join_to_the_text(tmp_path):
    tokenizer = make_tokenizer(tmp_path)
    text = "Ada has 3 apples — “naïve” 日本語 🎉<|im_end|>"
    ids = tokenizer.encode(text).ids
    pieces = TokenText(tmp_path / "tokenizer.json").pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert pieces[-1] == "<|im_end|>"
    assert TokenText(tmp_path / "tokenizer.json").pieces([ids[-1], 10**6]) == ["<|im_end|>", "<1000000>"]


def test_pieces_of_other_tokenizers(tmp_path):
    tokenizer = Tokenizer(
        models.Unigram([("▁hello", -1.0), ("▁", -2.0), ("wor", -2.0), ("ld", -2.0), ("<unk>", -9.0)], 4, False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("hello world").ids
    pieces = TokenText(tmp_path / "tokenizer.json").pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == "hello world"


def test_a_run_finds_its_tokenizer(tmp_path, run_folder):
    assert open_runs([str(run_folder)])[0].tokenizer().path.parent.name == "checkpoint-6"
    StepFile(tmp_path / "metrics.jsonl").append(1, {"loss": 1.0})
    assert open_runs([str(tmp_path)])[0].tokenizer() is None
    assert open_runs([str(tmp_path)], str(run_folder / "checkpoint-6"))[0].tokenizer() is not None
    (tmp_path / "posttrain.yaml").write_text(f"model_name_or_path: {run_folder / 'checkpoint-6'}\n")
    assert open_runs([str(tmp_path)])[0].tokenizer() is not None
    (tmp_path / "posttrain.yaml").write_text("model_name_or_path: nobody/has-this\n")
    assert open_runs([str(tmp_path)])[0].tokenizer() is None
    with pytest.raises(NoRunError, match=r"no tokenizer\.json"):
        open_runs([str(tmp_path)], str(tmp_path))


# ---- data ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sft_run(tmp_path):
    """An offline run: no rollouts; its configuration names a file, its preparation left one row out."""
    run = tmp_path / "sft"
    StepFile(run / "metrics.jsonl").append(1, {"loss": 1.0})
    data = tmp_path / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]}
        for i in range(50)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "run.yaml").write_text(f"dataset: [{{path: {data}}}, {{path: some/hub-name}}]\n")
    (run / "bad_rows_train.jsonl").write_text('{"row": 3, "problem": "no answer"}\n')
    return run


def ask_data(run, number, start=0, given=()):
    return api.data(
        Viewed(open_runs([str(run)]), list(given)), Question({"run": "0", "source": str(number), "start": str(start)})
    )


def test_sources_are_those_that_the_folder_names(sft_run):
    sources = api.info(Viewed(open_runs([str(sft_run)])), Question({"run": "0"}))["sources"]
    assert [(source["name"], source["kind"]) for source in sources] == [
        ("train.jsonl", "dataset"), ("some/hub-name", "elsewhere"), ("train, rows left out", "left_out")
    ]  # fmt: skip


def test_the_version_of_a_package_is_not_a_source_of_data(sft_run):
    """run.json, as `posttrain sft` writes it: the version of the package `datasets` once had a tab of its own."""
    starts = [{"command": "posttrain sft", "time": "now", "versions": {"datasets": "5.2.0", "torch": "2.13.0"}}]
    (sft_run / "run.json").write_text(json.dumps({"starts": starts}))
    sources = api.info(Viewed(open_runs([str(sft_run)])), Question({"run": "0"}))["sources"]
    assert [source["name"] for source in sources] == ["train.jsonl", "some/hub-name", "train, rows left out"]


def test_rows_of_a_dataset_and_of_those_left_out(sft_run, tmp_path):
    page = ask_data(sft_run, 0, start=40)
    assert [row["row"] for row in page["rows"]] == list(range(40, 50))
    assert page["rows"][0]["fields"]["messages"][1]["content"] == "40!"
    assert not page["more"]
    assert ask_data(sft_run, 0)["more"]
    assert ask_data(sft_run, 1)["rows"] == []
    assert ask_data(sft_run, 2)["rows"][0]["fields"]["problem"] == "no answer"
    assert ask_data(sft_run, 0, given=[str(tmp_path / "train.jsonl")])["note"] == "named on the command line"
    with pytest.raises(NotFound, match="3 sources"):
        ask_data(sft_run, 3)


def test_prepared_rows_have_the_mask_of_training(sft_run, tmp_path):
    store = tmp_path / "store"
    writer = StoreWriter(store)
    writer.add([(Sample([1, 2, 3], [False, True, True], row=7),), (Sample([4, 5], [True, True], row=9),)])
    writer.close()
    seal(store, {})
    (sft_run / "prepared_data.json").write_text(json.dumps({"train": {"store": str(store)}}))
    page = ask_data(sft_run, 0)
    assert page["name"] == "train, as trained on"
    assert page["total"] == 2
    assert page["rows"][0]["row"] == 7
    assert page["rows"][0]["samples"][0]["trained"] == [0, 1, 1]
    ((second,), checked) = page["rows"][1]["samples"], kinds_of(np.array([True, True]), 0, 2)
    assert second["trained"] == [0, 1]  # nothing predicts the first token
    assert second["trained_tokens"] == checked.count("trained") == 1  # as `posttrain check` has it
    (store / "manifest.json").unlink()
    with pytest.raises(ViewError, match="not there any more"):
        ask_data(sft_run, 0)


# ---- files that somebody else wrote ----------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
HOSTILE = {
    "metrics.jsonl": '{"step": 1, "loss": 1e999}\n{"step": 2, "loss": 2.0, "deep": ' + "[" * 900 + "]" * 900 + "}\n"
    '{"step": 3, "loss": ' + "9" * 4000 + '}\n{"step": 4, "loss": NaN, "nested": {"a": [1, {"b": -Infinity}]}}\n'
    + "[" * 100000 + '\n{"step": 5, "loss": 1.7e308}\n{"step": 6, "loss": -1.7e308}\n{"step": 7, "loss": 0.5}\n',
    "alerts.jsonl": '{"step": "<script>alert(1)</script>", "seen": "<b>x</b>\\u001b[31m", "deep": ' + "[" * 500 + "]" * 500 + "}\n"
    '{"step": {"a": [1e999]}, "seen": [1]}\n',
    "laughs.yaml": LAUGHS,
    "itself.yaml": "a: &a [*a]\n",
    "infinite.yaml": "a: .inf\nb: .nan\nwhen: 2020-01-01\n1: {2: three}\nzzKey: odd.Value.93\nurl: https://me:pw@host/x\n",
    "deep.json": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "huge.json": '{"a": 1e999, "b": [NaN, ' + "9" * 400 + "]}",
}  # fmt: skip


@pytest.fixture
def hostile(tmp_path):
    for name, text in HOSTILE.items():
        (tmp_path / name).write_text(text)
    return open_runs([str(tmp_path)])


def test_hostile_files_are_shown_as_far_as_they_can_be(hostile):
    viewed = Viewed(hostile)
    told = {
        path: _as_json(ask(viewed, Question({"run": "0"})))[0].decode()
        for path, ask in api.GET.items()
        if "metric" in path or "info" in path
    }
    assert len(told) >= 2
    info = json.loads(told["/api/info"])
    assert sorted(info["settings"]) == ["deep.json", "huge.json", "infinite.yaml"]
    assert info["settings"]["huge.json"] == {"a": None, "b": [None, None]}
    assert info["settings"]["infinite.yaml"] == {
        "a": None, "b": None, "when": "2020-01-01", "1": {"2": "three"}, "zzKey": "(hidden)", "url": "https://(hidden)@host/x"
    }  # fmt: skip
    assert "nested too deeply" in told["/api/info"]
    assert _as_json({"reward": float("inf"), "rows": [float("nan"), 1.5]})[0] == b'{"reward":null,"rows":[null,1.5]}'
    assert hostile[0].metrics.entries[-1] == {"step": 7, "loss": 0.5}


def test_a_report_and_a_summary_of_hostile_files(hostile, tmp_path, capsys):
    page = write_report(hostile, tmp_path / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    print_summary(hostile)
    assert "\x1b[31m" not in capsys.readouterr().out
