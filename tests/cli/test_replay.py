"""`posttrain replay RUN`: an asynchronous run once more, from its journal."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.cli.commands.replay import compared
from tests.cli.runs import flags, options_of, posttrain

ASYNC = {"async_rollouts": True, "async_lead": 1, "keep_journal": True, "max_steps": 3}


def test_a_run_is_repeated_and_compared(folder, capsys):
    assert posttrain("grpo", *flags({**options_of("grpo"), **ASYNC})) == 0
    assert posttrain("replay", "out-grpo", "--output_dir=elsewhere") == 0
    assert "all weights are those of out-grpo, to the bit." in capsys.readouterr().out
    assert [(folder / name).exists() for name in ("elsewhere/model.safetensors", "out-grpo-replay")] == [True, False]
    assert posttrain("replay", "out-grpo") == 0
    assert "all weights are those of out-grpo, to the bit." in capsys.readouterr().out
    weights = load_file("out-grpo-replay/model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros_like(weights[name])}, "out-grpo-replay/model.safetensors")
    sentence, is_same = compared(folder / "out-grpo", folder / "out-grpo-replay")
    assert not is_same
    assert sentence.startswith(f"{name} in model.safetensors is not what it is in")


@pytest.mark.parametrize("words", [["nowhere"], ["."]])
def test_a_folder_without_a_run(folder, capsys, words):
    assert posttrain("replay", *words) == 2
    assert "name the folder of a run" in capsys.readouterr().err


def test_a_run_without_a_journal(folder, capsys):
    assert posttrain("grpo", *flags({**options_of("grpo"), "max_steps": 1})) == 0
    assert posttrain("replay", "out-grpo", "--async_rollouts") == 2
    assert "There is no journal in" in capsys.readouterr().err
