"""Scripts of the kind that TRL's users have, unmodified, through `posttrain run`. Each runs in a process of its own."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path

import pytest

from tests.cli.runs import folder_with_inputs
from tests.forked import run_command, run_function

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.name for path in SCRIPTS.glob("*.py"))
ARGUMENTS = {
    "sft_with_parser.py": [
        "--config", "recipe.yaml", "--model_name_or_path", "model", "--dataset_name", "sft.jsonl", "--use_peft", "--lora_r", "4",
    ],
    "reward_with_parser.py": [
        "--model_name_or_path", "model", "--dataset_name", "reward.jsonl", "--output_dir", "out", "--max_steps", "2",
        "--report_to", "none", "--use_cpu", "True", "--save_strategy", "no",
    ],
    "grpo_with_parser.py": [
        "--config", "recipe.yaml", "--model_name_or_path", "model", "--dataset_name", "grpo.jsonl", "--num_generations", "4",
        "--per_device_train_batch_size", "4", "--max_completion_length", "6", "--use_peft", "--logging_steps", "1",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = folder_with_inputs(tmp_path_factory.mktemp("scripts"))
    (folder / "recipe.yaml").write_text(
        "output_dir: out\nmax_steps: 2\nlearning_rate: 1e-3\nreport_to: none\nuse_cpu: true\nsave_strategy: 'no'\n"
        "env: {WANDB_PROJECT: 'recipe'}\n"
    )
    return folder


JUDGES = ("trl", "trl.judges", "trl.trainer", "trl.trainer.judges", "trl.experimental.judges")
WIN_RATES = ("trl", "trl.trainer", "trl.trainer.callbacks", "trl.experimental.winrate_callback")
"""Where TRL had these, from 0.10 to 1.0."""


def ran(script: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    return run_command("run", str(script), *words, cwd=folder)


def test_there_are_ten():
    assert len(NAMES) >= 10
    for name in NAMES:
        assert "posttrain" not in (SCRIPTS / name).read_text(), f"{name} is meant to know nothing of posttrain"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_unmodified(inputs, tmp_path, name):
    for each in inputs.iterdir():
        (tmp_path / each.name).symlink_to(each)
    ended = ran(SCRIPTS / name, tmp_path, *ARGUMENTS.get(name, []))
    assert ended.returncode == 0, ended.stdout[-1500:] + ended.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line or "train_loss" in line for line in lines)
    assert (tmp_path / "ended").read_text() == "yes"  # the script's own last line


@pytest.mark.slow
def test_the_numbers_are_those_of_the_import_that_was_changed(inputs, tmp_path):
    """`posttrain run` on a script for TRL, and that script with its import changed: the same losses."""
    losses = []
    for name, change in (("run", "trl"), ("import", "posttrain")):
        folder = tmp_path / name
        folder.mkdir()
        for each in inputs.iterdir():
            (folder / each.name).symlink_to(each)
        script = folder / "script.py"
        script.write_text((SCRIPTS / "sft_plain.py").read_text().replace("from trl", f"from {change}"))
        by_hand = lambda script=script: runpy.run_path(str(script), run_name="__main__")  # noqa: E731
        ended = ran(script, folder) if change == "trl" else run_function(by_hand, cwd=folder)
        assert ended.returncode == 0, ended.stderr
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if "loss" in line])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "script.py").write_text("from trl import AutoModelForCausalLMWithValueHead\n")
    ended = ran(tmp_path / "script.py", tmp_path)
    assert ended.returncode == 2
    assert "AutoModelForCausalLMWithValueHead" in ended.stderr
    assert "PPOTrainer puts a value head on a plain causal model itself" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ran(tmp_path / "nowhere.py", tmp_path).returncode == 2


def test_modules_are_attributes(tmp_path):
    """`import trl` alone gives trl.rewards, as TRL does."""
    (tmp_path / "script.py").write_text(
        "import trl\nprint(trl.rewards.accuracy_reward.__module__, trl.trainer.SFTTrainer.__name__)\nprint(trl.oddity)\n"
    )
    ended = ran(tmp_path / "script.py", tmp_path)
    assert ended.stdout.split() == ["posttrain.rewards.builtin.accuracy", "SFTTrainer"]
    assert ended.returncode == 2
    assert "imports oddity from trl" in ended.stderr


def test_judges_are_found_in_all_their_homes(tmp_path):
    names = "AllTrueJudge BaseBinaryJudge BaseJudge BasePairwiseJudge BaseRankJudge HfPairwiseJudge OpenAIPairwiseJudge PairRMJudge"
    lines = [f"from {home} import {', '.join(names.split())}" for home in JUDGES]
    lines += [f"from {home} import WinRateCallback" for home in WIN_RATES]
    (tmp_path / "script.py").write_text("\n".join([*lines, "print(BaseJudge.__module__, WinRateCallback.__module__)"]))
    ended = ran(tmp_path / "script.py", tmp_path)
    assert ended.stdout.split() == ["posttrain.rewards.judging", "posttrain.trainer.online.win_rate"], ended.stderr


def test_an_error_of_the_script_keeps_its_traceback(tmp_path):
    (tmp_path / "script.py").write_text("import trl\nassert trl.SFTTrainer\nraise KeyError('mine')\n")
    ended = ran(tmp_path / "script.py", tmp_path)
    assert ended.returncode == 1
    assert "KeyError: 'mine'" in ended.stderr
