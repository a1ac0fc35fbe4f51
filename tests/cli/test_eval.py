"""`posttrain eval` and `evals` of a training command: equal scores, and mistakes that are named before a model is loaded."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from posttrain.cli.commands import eval as evaluating
from posttrain.models.load import model as load
from tests import tiny
from tests.cli.runs import REWARD, folder_with_inputs, options_of, posttrain
from tests.forked import start_group, wait_for_group

ODD = """
def odd(completion_ids, answer, **columns):
    return [float((sum(ids) + int(a)) & 1) for ids, a in zip(completion_ids, answer)]
"""
ENTRY = {
    "name": "odd",
    "data": "grpo.jsonl",
    "reward": "rewards_of_test.py:odd",
    "samples": 3,
    "max_new_tokens": 8,
    "limit": 6,
}
FLAGS = [
    "--data",
    "grpo.jsonl",
    "--reward",
    "rewards_of_test.py:odd",
    "--samples",
    "3",
    "--max-new-tokens",
    "8",
    "--limit",
    "6",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = folder_with_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "rewards_of_test.py").write_text(REWARD + ODD)
    (folder / "asked.csv").write_text("question,answer\n" + "".join(f"What is {i}?,{i}\n" for i in range(6)))
    return folder


def found(folder, *words):
    assert posttrain("eval", *words, "--json", "found.json", "--save-samples", "samples.jsonl") == 0
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return json.loads((folder / "found.json").read_text()), samples


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_score_of_a_run_is_that_of_its_checkpoint(folder, capsys, method):
    options = {**options_of(method), "evals": [{**ENTRY, "every": 1}], "save_strategy": "steps", "save_steps": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump({**options, "learning_rate": 0.02}))
    assert posttrain(method, "run.yaml") == 0
    lines = [json.loads(line) for line in (folder / f"out-{method}" / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "evals/odd/score" in line}
    assert list(logged) == [0, 1, 2]
    for step in (1, 2):
        by_file, _ = found(folder, f"out-{method}/checkpoint-{step}", "--evals", "run.yaml")
        by_flags, _ = found(folder, f"out-{method}/checkpoint-{step}", *FLAGS)
        for one in (by_file, by_flags):
            assert one["pass@1"]["value"] == logged[step]["evals/odd/pass@1"]
            assert one["pass@3"]["low"] == logged[step]["evals/odd/pass@3_low"]
            assert one["truncated"] == logged[step]["evals/odd/truncated"]
    state = json.loads((folder / f"out-{method}" / "checkpoint-2" / "trainer_state.json").read_text())
    best = max((1, 2), key=lambda step: logged[step]["evals/odd/score"])
    assert state["best_model_checkpoint"].endswith(f"checkpoint-{best}")


def test_two_processes_share_the_prompts_and_score_as_one(folder):
    options = {**options_of("sft"), "evals": [ENTRY], "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    (folder / "run.yaml").write_text(yaml.safe_dump({**options, "num_processes": 2, "per_device_train_batch_size": 2}))
    # as a launcher starts them; test_child_process.py has a real one
    group = start_group(2, lambda rank: sys.exit(posttrain("sft", "run.yaml")), folder / "rank")
    assert wait_for_group(group) == [0, 0], group[0].output()[-3000:]
    lines = [json.loads(line) for line in (folder / "out-sft" / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "evals/odd/score" in line]
    assert [line["step"] for line in logged] == [0, 1]
    told, _ = found(folder, "out-sft/checkpoint-1", *FLAGS)
    assert told["pass@1"]["value"] == logged[1]["evals/odd/pass@1"]
    assert told["pass@2"]["high"] == logged[1]["evals/odd/pass@2_high"]


def test_the_table_the_json_and_the_samples_say_the_same(folder, capsys):
    told, samples = found(folder, "model", *FLAGS)
    shown = capsys.readouterr().out
    passed = [one["rewards"]["odd"] for one in samples]
    assert len(samples) == 18
    assert told["pass@1"]["value"] == pytest.approx(sum(passed) / 18) == pytest.approx(told["reward"]["value"])
    assert f"{told['pass@3']['value']:.4f}" in shown
    assert "6 prompts, 18 answers" in shown
    assert told["engine"] == "NativeEngine"
    assert posttrain("eval", "model", *FLAGS, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["pass@1"] == told["pass@1"]


def test_columns_are_renamed_and_the_plain_engine_writes_the_same(folder):
    told, samples = found(folder, "model", *FLAGS, "--engine", "transformers")
    assert told["engine"] == "TransformersEngine"
    words = [*FLAGS[2:], "--data", "asked.csv", "--column", "question=prompt"]
    assert [one["completion_ids"] for one in found(folder, "model", *words)[1]] == [
        one["completion_ids"] for one in samples
    ]


def test_folders_of_outputs_are_made(folder):
    words = ["--json", "new/one/found.json", "--save-samples", "new/two/samples.jsonl"]
    assert posttrain("eval", "model", *FLAGS, *words) == 0
    assert json.loads((folder / "new/one/found.json").read_text())["answers"] == 18
    assert len((folder / "new/two/samples.jsonl").read_text().splitlines()) == 18


def test_answers_are_kept_where_their_file_cannot_be_written(folder, monkeypatch, capsys):
    monkeypatch.setattr(evaluating, "ready_to_write", lambda path, option: None)  # it became unwritable meanwhile
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert posttrain("eval", "model", *FLAGS, "--save-samples", "gone/samples.jsonl") == 0
    (kept,) = folder.glob("posttrain-answers-*.jsonl")
    assert len(kept.read_text().splitlines()) == 18
    assert str(kept) in capsys.readouterr().err


def test_where_no_answer_could_be_judged_the_first_failure_is_told(folder, capsys):
    (folder / "broken.py").write_text("def broken(**columns):\n    raise KeyError('no such thing')\n")
    words = ["--data", "grpo.jsonl", "--reward", "broken.py:broken", "--max-new-tokens", "4", "--limit", "3"]
    assert posttrain("eval", "model", *words, "--save-samples", "drawn.jsonl") == 1
    told = capsys.readouterr().err
    assert "no such thing" in told
    assert "could be judged" in told
    assert len((folder / "drawn.jsonl").read_text().splitlines()) == 3


def test_the_best_of_n_by_a_process_reward(folder, capsys):
    tiny.process_reward_model().save_pretrained(folder / "judge")
    tiny.tokenizer().save_pretrained(folder / "judge")
    picked = ["--best-of", "3", "--select-by", "judge?aggregate=mean&rule=lines"]
    words = [word for word in FLAGS if word not in ("--samples", "3")]
    told, samples = found(folder, "model", *words, *picked)
    shown = capsys.readouterr().out
    assert "best of 3 by judge; ± is one standard error, over prompts" in shown
    rows = {row: [one for one in samples if one["row"] == row] for row in range(6)}
    best = [max(answers, key=lambda one: one["rewards"]["judge"])["rewards"]["odd"] for answers in rows.values()]
    assert told["best-of-3"]["value"] == pytest.approx(sum(best) / 6)
    assert told["gain"]["value"] == pytest.approx(told["best-of-3"]["value"] - told["first-of-3"]["value"])
    steps = samples[0]["extras"]["judge steps"]
    assert sum(score for score, _ in steps) / len(steps) == pytest.approx(samples[0]["rewards"]["judge"], abs=1e-4)
    entry = {**ENTRY, "best_of": 3, "select_by": "judge?aggregate=mean&rule=lines"}
    (folder / "evals.yaml").write_text(yaml.safe_dump({"evals": [entry]}))
    assert found(folder, "model", "--evals", "evals.yaml")[0]["gain"] == told["gain"]


def test_a_reward_model_scores_answers(folder):
    tiny.reward_model().save_pretrained(folder / "whole")
    tiny.tokenizer().save_pretrained(folder / "whole")
    told, samples = found(folder, "model", "--data", "grpo.jsonl", "--reward", "./whole", "--max-new-tokens", "4")
    assert told["rewards"] == ["whole"]
    assert told["reward"]["value"] == pytest.approx(sum(one["rewards"]["whole"] for one in samples) / len(samples))


# ---- mistakes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(load, "load_pretrained", refuse)
    monkeypatch.setattr("posttrain.models.load.saved_model.load_pretrained", refuse)
    monkeypatch.setattr("posttrain.trainer.base.load_model", refuse)


def sentence(capsys) -> str:
    told = capsys.readouterr().err.strip()
    assert "Traceback" not in told
    return told


ENTRIES = {
    "an unknown key": ({"sampels": 2}, ["entry 2", "sampels", "samples"]),
    "text for a number": ({"samples": "many"}, ["entry 2", "samples", "'many'", "whole number"]),
    "a fraction for a whole number": ({"limit": 2.5}, ["entry 2", "limit", "2.5"]),
    "no data": ({"data": None}, ["entry 2", "data"]),
    "no reward": ({"reward": None}, ["entry 2", "reward"]),
    "a reward that is not there": ({"reward": "rewards_of_test.py:odds"}, ["entry 2", "odds", "'odd'"]),
    "a file that is not there": ({"data": "nowhere.jsonl"}, ["entry 2", "nowhere.jsonl"]),
    "a column that is not there": ({"data": "sft.jsonl"}, ["entry 2", "'answer'", "odd"]),
    "no prompts": ({"data": "answers.jsonl"}, ["entry 2", "prompt"]),
    "greedy and several": ({"temperature": 0}, ["entry 2", "samples", "temperature 0"]),
    "a negative number": ({"temperature": -1.0, "samples": 1}, ["entry 2", "temperature", "-1"]),
    "a name twice": ({"name": "odd"}, ["entry 2", "odd", "name"]),
    "weights of other rewards": ({"reward_weights": [1.0, 2.0]}, ["entry 2", "reward_weights"]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_that_cannot_be(folder, no_model, capsys, case):
    changes, wanted = ENTRIES[case]
    (folder / "answers.jsonl").write_text('{"answer": "1"}\n')
    second = {name: value for name, value in {**ENTRY, "name": "second", **changes}.items() if value is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump({**options_of("sft"), "evals": [ENTRY, second]}))
    assert posttrain("sft", "run.yaml") == 2
    told = sentence(capsys)
    assert all(word in told for word in wanted), told
    assert "evals" in told


def test_a_reward_model_has_no_task_scores(folder, no_model, capsys):
    (folder / "run.yaml").write_text(yaml.safe_dump({**options_of("reward"), "evals": [ENTRY]}))
    assert posttrain("reward", "run.yaml") == 2
    assert "writes nothing" in sentence(capsys)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["model"], ["--data"]),
        (["model", "--data", "grpo.jsonl"], ["--reward"]),
        (["nowhere/at/all", *FLAGS], ["nowhere/at/all"]),
        ([".", *FLAGS], ["config.json"]),
        (["model", *FLAGS, "--samples", "x"], ["samples", "'x'"]),
        (["model", *FLAGS, "--sample"], ["--sample"]),
        (["model", *FLAGS, "--dtype", "float12"], ["float12", "bfloat16"]),
        (["model", *FLAGS, "--device", "gpu0"], ["--device", "'gpu0'"]),
        (["model", *FLAGS, "--device", "cuda:99"], ["--device", "cuda:99", "cpu"]),
        (["model", *FLAGS, "--json", "model"], ["--json", "folder"]),
        (["model", *FLAGS, "--save-samples", "grpo.jsonl/x.jsonl"], ["--save-samples", "grpo.jsonl"]),
        (["model", *FLAGS, "--column", "question"], ["question", "OLD=NEW"]),
        (["model", *FLAGS, "--evals", "run.yaml"], ["--evals"]),
        (["model", "--evals", "nowhere.yaml"], ["nowhere.yaml"]),
        (["model", "--data", "sft.jsonl", "--reward", "rewards_of_test.py:odd"], ["'answer'"]),
        (["model", "--data", "grpo.jsonl", "--reward", "acuracy_reward"], ["accuracy_reward"]),
        (["model", "--data", "grpo.jsonl", "--reward", "./nowhere"], ["no folder ./nowhere"]),
        (["model", "--data", "grpo.jsonl", "--reward", "some/prm?agg=min"], ["Unknown option 'agg'", "aggregate"]),
        (["model", "--data", "grpo.jsonl", "--reward", "accuracy_reward", "--best-of", "4"], ["select_by"]),
    ],
)
def test_words_that_cannot_be(folder, no_model, capsys, words, wanted):
    (folder / "run.yaml").write_text(yaml.safe_dump({"evals": [ENTRY]}))
    assert posttrain("eval", *words) == 2
    told = sentence(capsys)
    assert all(word in told for word in wanted), told
    assert told.startswith("posttrain eval: ")
