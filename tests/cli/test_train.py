"""Training from the command line: every method, with a file and with flags; the same command again; help in no time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from posttrain.cli.commands.train import _resume
from posttrain.cli.errors import UsageError
from posttrain.cli.main import main
from posttrain.cli.options.arguments import parse
from posttrain.cli.options.table import method_names, table_of
from posttrain.methods.table import METHODS
from scripts import option_specs
from tests.cli.runs import flags, options_of, posttrain


def steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_every_method_has_a_command_and_every_option_stands_in_the_table():
    assert list(method_names()) == list(METHODS)
    assert option_specs.FILE.read_text() == option_specs.written(), "run `make docs`"


@pytest.mark.parametrize("method", METHODS)
def test_a_file_and_flags_train_the_same(folder, method):
    options = options_of(method)
    (folder / "run.yaml").write_text(yaml.safe_dump({**options, "output_dir": "by-file"}))
    assert posttrain(method, "run.yaml") == 0
    assert posttrain(method, *flags({**options, "output_dir": "by-flags"})) == 0
    by_file, by_flags = (steps(folder / name) for name in ("by-file", "by-flags"))
    assert len(by_file) == 2
    assert [line["loss"] for line in by_file] == [line["loss"] for line in by_flags]
    for name in ("model.safetensors", "posttrain.yaml", "run.json"):
        assert (folder / "by-file" / name).exists()
    record = yaml.safe_load((folder / "by-flags" / "posttrain.yaml").read_text())
    assert record == {"method": method, **options, "output_dir": "by-flags"}
    assert json.loads((folder / "by-file" / "run.json").read_text())["starts"][0]["versions"]["torch"]


def test_a_filter_of_groups_is_named_like_a_reward(folder, capsys):
    (folder / "filters.py").write_text(
        "def shortest(group_completions, group_rewards):\n    return [[-len(c) for c in group] for group in group_completions]\n"
    )
    words = flags({**options_of("grpo"), "max_steps": 1, "num_remains_in_group": 2})
    assert posttrain("grpo", *words, "--group_filter_func", "filters.py:shortest") == 0
    (line,) = steps(folder / "out-grpo")
    assert line["rollouts/filtered"] == 0.5
    capsys.readouterr()
    assert posttrain("grpo", *words) == 2
    assert "--group_filter_func and --num_remains_in_group need each other" in capsys.readouterr().err


def test_flags_go_before_the_file_and_the_file_before_defaults(folder):
    options = {**options_of("sft"), "max_steps": 3, "learning_rate": "1e-4"}
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    assert posttrain("sft", "run.yaml", "--max_steps", "1", "--lr-scheduler-type=constant") == 0
    (line,) = steps(folder / "out-sft")
    assert line["learning_rate"] == 1e-4


RECIPES = {
    "sft": """
# as TRL's users have them
model_name_or_path: Qwen/Qwen2-0.5B
torch_dtype: bfloat16
attn_implementation: sdpa
dataset_name: trl-lib/Capybara
dataset_train_split: train
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
eos_token: '<|im_end|>'
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
output_dir: Qwen2-0.5B-SFT
push_to_hub: false
accelerate_config: zero3
num_processes: 4
env: {WANDB_PROJECT: value1}
""",
    "dpo": """
model_name_or_path: Qwen/Qwen2-0.5B-Instruct
datasets:
  - path: trl-lib/ultrafeedback_binarized
    split: train
    fraction: 0.5
  - path: trl-lib/tldr-preference
    columns: [prompt, chosen, rejected]
    fraction: 0.5
test_split_size: 0.1
loss_type: [sigmoid, sft]
loss_weights: [1.0, 0.1]
beta: 0.1
learning_rate: 5e-7
precompute_ref_log_probs: true
report_to: [trackio]
""",
    "grpo": """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward]
num_generations: 8
max_completion_length: 256
use_vllm: true
vllm_mode: colocate
loss_type: dapo
epsilon_high: 0.28
scale_rewards: none
""",
}


@pytest.mark.parametrize("method", RECIPES)
def test_files_of_trl_are_taken(tmp_path, method):
    (tmp_path / "recipe.yaml").write_text(RECIPES[method])
    given = yaml.safe_load(RECIPES[method])
    config = parse(method, ["--config", str(tmp_path / "recipe.yaml")])
    given.pop("env", None)
    names = {"torch_dtype": "dtype"}
    assert set(config.values) == {names.get(name, name) for name in given}
    assert config.get("learning_rate") == pytest.approx(float(given.get("learning_rate", config.get("learning_rate"))))


@pytest.mark.parametrize("method", RECIPES)
def test_the_schema_takes_what_the_command_takes(method, capsys):
    jsonschema = pytest.importorskip("jsonschema")
    assert posttrain("schema", method) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    recipe = yaml.safe_load(RECIPES[method])
    jsonschema.validate({"method": method, **recipe}, schema)
    for wrong in ({"lerning_rate": 1.0}, {"max_steps": "many"}, {"seed": [1]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**recipe, **wrong}, schema)
    assert posttrain("schema", "stf") == 2


def test_the_same_command_again_goes_on(folder, capsys):
    words = ["sft", *flags({**options_of("sft"), "save_strategy": "steps", "save_steps": 1, "max_steps": 2})]
    assert main(words) == 0
    before = (folder / "out-sft" / "model.safetensors").read_bytes()
    assert main(words) == 0
    assert (folder / "out-sft" / "model.safetensors").read_bytes() == before
    assert [line["step"] for line in steps(folder / "out-sft")] == [1, 2]
    assert len(json.loads((folder / "out-sft" / "run.json").read_text())["starts"]) == 2
    assert main([*words, "--learning_rate", "0.5"]) == 2  # another run: refused, not mixed
    assert "learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], True),
        (["--fresh"], False),
        (["--fresh", "--resume_from_checkpoint", "none"], False),
        (["--no_fresh"], True),
        *((["--resume_from_checkpoint", word], False) for word in ("none", "None", "null", "false", "False", "no")),
        *((["--resume_from_checkpoint", word], True) for word in ("true", "True", "auto")),
        (["--resume_from_checkpoint", "elsewhere/checkpoint-4"], "elsewhere/checkpoint-4"),
    ],
)
def test_whether_a_run_continues(tmp_path, words, wanted):
    """In a folder that holds a checkpoint; `none` and `false` mean what they say."""
    (tmp_path / "checkpoint-2").mkdir()
    assert _resume(parse("sft", words), tmp_path) == wanted


def test_a_file_of_trl_that_says_null_starts_afresh(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "run.yaml").write_text("resume_from_checkpoint: null\n")
    assert _resume(parse("sft", [str(tmp_path / "run.yaml")]), tmp_path) is False


def test_fresh_and_a_checkpoint_contradict_each_other(tmp_path):
    with pytest.raises(UsageError, match=r"`fresh` starts from the beginning.*give one of them"):
        _resume(parse("sft", ["--fresh", "--resume_from_checkpoint", "true"]), tmp_path)


def test_a_fresh_start_is_not_written_down(folder):
    """What a run leaves behind continues it: a start from the beginning is asked for each time."""
    options = {**options_of("sft"), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    assert posttrain("sft", *flags(options), "--fresh") == 0
    assert "fresh" not in yaml.safe_load((folder / "out-sft" / "posttrain.yaml").read_text())


def test_a_run_starts_again_from_what_it_left_behind(folder):
    assert posttrain("sft", *flags(options_of("sft"))) == 0
    assert posttrain("sft", "out-sft/posttrain.yaml", "--output_dir", "again") == 0
    assert steps(folder / "again")[-1]["loss"] == steps(folder / "out-sft")[-1]["loss"]


def test_lora_mixtures_columns_and_held_out_rows(folder):
    rows = [{"question": f"Q{i}?", "reply": f" A{i}."} for i in range(20)]
    (folder / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        **options_of("sft"), "use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"],
        "test_split_size": 6, "eval_strategy": "steps", "eval_steps": 1,
        "datasets": [
            {"path": "sft.jsonl", "columns": ["prompt", "completion"]},
            {"path": "other.jsonl", "columns": {"question": "prompt", "reply": "completion"}, "weight": 2},
        ],
    }  # fmt: skip
    del options["dataset_name"]
    (folder / "run.yaml").write_text(yaml.safe_dump(options))
    assert posttrain("sft", "run.yaml") == 0
    assert (folder / "out-sft" / "adapter_model.safetensors").exists()
    lines = [json.loads(line) for line in (folder / "out-sft" / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_loss" in line for line in lines) == 2


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_by_flags(folder, bits):
    options = {**options_of("sft"), "use_peft": True, f"load_in_{bits}bit": True, "lora_target_modules": "all-linear"}
    assert posttrain("sft", *flags(options)) == 0
    assert (folder / "out-sft" / "adapter_model.safetensors").exists()
    assert len(steps(folder / "out-sft")) == 2


def test_shares_of_a_mixture_are_trls(folder):
    from posttrain.cli.running.datasets_of import datasets_of

    (folder / "many.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 100)
    (folder / "few.jsonl").write_text('{"prompt": "c", "completion": "d"}\n' * 10)
    listed = [{"path": "many.jsonl", "fraction": 3}, {"path": "few.jsonl", "fraction": 1}]
    config = parse("sft", ["--datasets", json.dumps(listed)])
    train, evaluation = datasets_of(config)
    assert evaluation is None
    assert sorted(train["prompt"]) == ["a"] * 30 + ["c"] * 10


@pytest.mark.parametrize("method", METHODS)
def test_help_shows_every_option_within_a_second(method):
    before = os.times()
    command = [sys.executable, "-m", "posttrain.cli.main", method, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    now = os.times()
    took = now.children_user + now.children_system - before.children_user - before.children_system
    missing = [name for name in table_of(method).shown if f"--{name}" not in shown]
    assert not missing
    assert " ".join(shown.split()).count("(default: ") == len(table_of(method).shown)
    assert took < 3, f"{took:.1f} s of processor time"  # less than a second on most; torch alone would take longer


def test_the_command_line_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'datasets', 'numpy', 'yaml'}"
    code = f"import sys, posttrain.cli.main, posttrain.cli.commands.train; print({heavy} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
