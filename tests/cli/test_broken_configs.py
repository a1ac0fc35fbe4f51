"""Fifty ways to be wrong: each ends before a model is loaded, with exit code 2 and a sentence that names key, value, remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from posttrain.core.config_file import VARIABLES
from posttrain.models.load import model as load
from tests.cli.runs import folder_with_inputs, options_of, posttrain

LAUGHS, NINE_LINES = (
    "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, lines))
    for lines in (20, 9)
)

CASES = {
    # name: (method, what is changed in the options (None: taken out), words that must stand in the message)
    "unknown key": ("sft", {"lerning_rate": 1e-5}, ["lerning_rate", "learning_rate"]),
    "a key of another method": ("sft", {"num_generations": 4}, ["num_generations", "grpo"]),
    "text for a number": ("sft", {"learning_rate": "fast"}, ["learning_rate", "'fast'", "a number"]),
    "a fraction of a step": ("sft", {"max_steps": 2.5}, ["max_steps", "2.5", "whole number"]),
    "text for a switch": ("sft", {"packing": "perhaps"}, ["packing", "perhaps", "true or false"]),
    "a list for one value": ("sft", {"max_length": [1, 2]}, ["max_length", "[1, 2]"]),
    "a mapping for a number": ("sft", {"seed": {"a": 1}}, ["seed", "whole number"]),
    "null where a value is needed": ("sft", {"max_steps": None, "per_device_train_batch_size": "null"}, ["per_device"]),
    "a choice that does not exist": ("sft", {"lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "cosin", "cosine"]),
    "a loss that does not exist": ("dpo", {"loss_type": "sigmod"}, ["loss_type", "sigmod", "sigmoid"]),
    "an option that no loss reads": ("dpo", {"label_smoothing": 0.1}, ["label_smoothing", "sigmoid"]),
    "a pattern that nothing matches": ("sft", {"dataset_name": "data/*.jsonl"}, ["No file matches", "data/*.jsonl"]),
    "a truncation that does not exist": (
        "sft",
        {"truncation_mode": "middle"},
        ["truncation_mode", "middle", "keep_start"],
    ),
    "a negative number": ("grpo", {"temperature": -1}, ["temperature", "-1"]),
    "no group to compare": ("grpo", {"num_generations": 1}, ["num_generations", "1"]),
    "a batch that groups do not divide": ("grpo", {"per_device_train_batch_size": 3}, ["num_generations", "4"]),
    "both precisions": ("sft", {"fp16": True, "bf16": True}, ["fp16", "bf16"]),
    "two quantisations": (
        "sft",
        {"load_in_8bit": True, "load_in_4bit": True, "use_peft": True},
        ["load_in_8bit", "load_in_4bit"],
    ),
    "quantised and no adapter": ("sft", {"load_in_4bit": True}, ["load_in_4bit"]),
    "an adapter's option and no adapter": ("sft", {"lora_r": 8}, ["lora_r", "use_peft"]),
    "no model": ("sft", {"model_name_or_path": None}, ["model_name_or_path"]),
    "a model folder that is not there": ("sft", {"model_name_or_path": "./nowhere"}, ["model_name_or_path", "nowhere"]),
    "a folder without a model": ("sft", {"model_name_or_path": "."}, ["model_name_or_path", "config.json"]),
    "a dtype that does not exist": ("sft", {"dtype": "float12"}, ["dtype", "float12", "bfloat16"]),
    "no data": ("sft", {"dataset_name": None}, ["dataset_name"]),
    "a file that is not there": ("sft", {"dataset_name": "nowhere.jsonl"}, ["nowhere.jsonl"]),
    "a file that is no data": ("sft", {"dataset_name": "rewards_of_test.py"}, ["rewards_of_test.py", ".jsonl"]),
    "a line that is not JSON": ("sft", {"dataset_name": "cut.jsonl"}, ["cut.jsonl", "line 2"]),
    "a column that is missing": ("dpo", {"dataset_name": "sft.jsonl"}, ["chosen"]),
    "a mapping of a column that is missing": ("sft", {"dataset_columns": {"query": "prompt"}}, ["query", "prompt"]),
    "a row that cannot be trained on": ("sft", {"dataset_name": "empty_answer.jsonl"}, ["row"]),
    "a split of one file": (
        "sft",
        {"eval_strategy": "steps", "eval_steps": 1},
        ["eval_dataset_name", "test_split_size"],
    ),
    "a mixture's unknown key": (
        "sft",
        {"datasets": [{"path": "sft.jsonl", "wieght": 2}]},
        ["wieght", "weight", "entry 1"],
    ),
    "a mixture without a path": ("sft", {"datasets": [{"weight": 2}]}, ["path", "entry 1"]),
    "no reward": ("grpo", {"reward_funcs": None}, ["reward_funcs"]),
    "a reward that does not import": (
        "grpo",
        {"reward_funcs": ["broken_reward.py:score"]},
        ["broken_reward.py", "nothing_here"],
    ),
    "a reward that is not in its file": ("grpo", {"reward_funcs": ["rewards_of_test.py:lenght"]}, ["lenght", "length"]),
    "a built-in reward misspelt": ("grpo", {"reward_funcs": ["acuracy_reward"]}, ["acuracy_reward", "accuracy_reward"]),
    "weights of other rewards": ("grpo", {"reward_weights": [1.0, 2.0]}, ["reward_weights", "2", "1"]),
    "a tool that is not there": ("grpo", {"tools": ["tools_of_nobody.search"]}, ["tools", "tools_of_nobody"]),
    "a profile that does not exist": ("sft", {"accelerate_config": "fsdp3"}, ["accelerate_config", "fsdp3", "fsdp2"]),
    "a file for another method": ("dpo", {"method": "sft"}, ["posttrain sft", "posttrain dpo"]),
    "an option without a meaning here": (
        "grpo",
        {"use_transformers_paged": True},
        ["use_transformers_paged", "native"],
    ),
    "vLLM's mode": ("grpo", {"use_vllm": True, "vllm_mode": "colocated"}, ["vllm_mode", "colocated", "colocate"]),
}
TEXTS = {
    "a tag that runs code": ("model: !!python/object/apply:os.system ['true']\n", ["tag", "line 1"]),
    "billion laughs": (LAUGHS, ["aliases"]),
    "billion laughs in nine lines": (NINE_LINES, ["262,144 values", "aliases"]),
    "an alias of itself": ("seed: 1\nmodel_init_kwargs: &a {x: *a}\n", ["line 2", "alias"]),
    "LD_PRELOAD": ("env: {LD_PRELOAD: /tmp/evil.so}\n", ["LD_PRELOAD", "/tmp/evil.so", "shell"]),
    "HF_ENDPOINT": ("env: {HF_ENDPOINT: 'https://evil.example'}\n", ["HF_ENDPOINT", "sent", "shell"]),
    "CXX": ("env: {CXX: /tmp/evil}\n", ["CXX", "code is run"]),
    "a newline in a variable": ('env: {WANDB_NAME: "a\\nb"}\n', ["WANDB_NAME", "control characters"]),
    "PYTHONSTARTUP": ("env: {PYTHONSTARTUP: x.py}\n", ["PYTHONSTARTUP"]),
    "a key twice": ("seed: 1\nseed: 2\n", ["seed", "twice", "line 2"]),
    "no mapping": ("- seed\n", ["mapping"]),
    "not YAML": ("seed: [1\n", ["YAML"]),
    "nested without end": ("[" * 5000, ["options"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = folder_with_inputs(tmp_path_factory.mktemp("broken"))
    (folder / "cut.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "comple\n')
    (folder / "empty_answer.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": null}\n'
    )
    (folder / "broken_reward.py").write_text("import nothing_here\n")
    return folder


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails the test."""

    def refuse(*given, **named):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(load, "load_pretrained", refuse)
    monkeypatch.setattr("posttrain.trainer.base.load_model", refuse)


def sentence(capsys) -> str:
    told = capsys.readouterr().err.strip()
    assert "Traceback" not in told
    return told


@pytest.mark.parametrize("case", CASES)
def test_options_that_cannot_be(inputs, tmp_path, monkeypatch, no_model, capsys, case):
    method, changes, wanted = CASES[case]
    options = {name: value for name, value in {**options_of(method), **changes}.items() if value is not None}
    options["output_dir"] = str(tmp_path / "out")
    monkeypatch.chdir(inputs)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options))
    assert posttrain(method, str(path)) == 2
    told = sentence(capsys)
    assert all(word in told for word in wanted), told
    assert told.startswith(f"posttrain {method}: ")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("case", TEXTS)
def test_files_that_cannot_be(inputs, tmp_path, monkeypatch, no_model, capsys, case):
    text, wanted = TEXTS[case]
    monkeypatch.chdir(inputs)
    (tmp_path / "run.yaml").write_text(text)
    assert posttrain("sft", str(tmp_path / "run.yaml")) == 2
    told = sentence(capsys)
    assert all(word in told for word in wanted), told


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["sft", "--lerning_rate", "1"], ["lerning_rate", "learning_rate"]),
        (["sft", "--learning_rate"], ["learning_rate", "needs a value"]),
        (["sft", "--learning_rate", "1", "2"], ["learning_rate", "one value"]),
        (["sft", "a.yaml", "b.yaml"], ["a.yaml", "b.yaml"]),
        (["sft", "nowhere.yaml"], ["nowhere.yaml"]),
        (["sft", "--no_packing", "yes"], ["no_packing", "yes"]),
        (["stf"], ["'stf'", "'sft'"]),
    ],
)
def test_words_that_cannot_be(inputs, monkeypatch, no_model, capsys, words, wanted):
    monkeypatch.chdir(inputs)
    assert posttrain(*words) == 2
    told = sentence(capsys)
    assert all(word in told for word in wanted), told


def test_json_on_the_command_line_is_read_as_written(inputs, monkeypatch, no_model, capsys):
    monkeypatch.chdir(inputs)
    assert posttrain("sft", "--datasets", json.dumps([{"path": 3}])) == 2
    assert "path" in sentence(capsys)


def test_the_page_lists_the_variables_that_a_file_may_set():
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    listed = page.split("sets environment variables for the run", 1)[1].split("These are:", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(\w+)`", listed)) == VARIABLES
