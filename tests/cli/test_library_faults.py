"""What a library would answer with a traceback is one sentence and the exit code 2; and a run goes on as what it was."""

from __future__ import annotations

import json
import shutil

import pytest

from posttrain.trainer.checkpoints import saving
from tests.cli.runs import flags, options_of, posttrain


def sft(**options) -> int:
    return posttrain("sft", *flags(options_of("sft") | options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"learning_rate": -1}, "`learning_rate` is -1"),
        ({"seed": -3}, "`seed` is -3"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` is 0"),
        ({"report_to": "wandbb"}, "`report_to` is 'wandbb'"),
        ({"use_peft": True, "lora_r": 0}, "`lora_r` is 0"),
        ({"use_peft": True, "lora_dropout": 1.5}, "`lora_dropout` is 1.5"),
        ({"use_peft": True, "lora_target_modules": ["nonexist"]}, "The adapter does not fit"),
        ({"model_init_kwargs": "{bad json}"}, "An option is not valid JSON"),
    ],
)
def test_values_that_mean_nothing(folder, capsys, options, sentence):
    assert sft(**options) == 2
    assert sentence in capsys.readouterr().err


def test_a_name_that_nobody_has(folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sft(model_name_or_path="nofolder/foo") == 2
    assert "nofolder/foo cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
def test_a_damaged_model(folder, capsys, damaged):
    shutil.copytree("model", "damaged")
    content = (folder / "damaged" / damaged).read_bytes()
    (folder / "damaged" / damaged).write_bytes(content[: len(content) // 2])
    assert sft(model_name_or_path="damaged") == 2
    assert "cannot be loaded" in capsys.readouterr().err


# ---- a resume under something else ---------------------------------------------------------------------------------------


FIRST = {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"lora_alpha": 128}, "adapter.lora_alpha: 16 -> 128"),
        ({"lora_r": 8}, "adapter.r: 4 -> 8"),
        ({"lora_target_modules": ["k_proj", "o_proj"]}, "adapter.target_modules"),
    ],
)
def test_another_adapter_is_no_resume(folder, capsys, changed, sentence):
    assert sft(**FIRST) == 0
    files = [folder / "out-sft" / name for name in ("posttrain.yaml", "run.json")]
    before = [file.read_text() for file in files]
    assert sft(**FIRST | {"max_steps": 2} | changed) == 2
    assert sentence in capsys.readouterr().err
    assert before == [file.read_text() for file in files]  # of the run whose weights lie there
    assert sft(**FIRST | {"max_steps": 2}) == 0


def test_an_adapter_after_whole_weights_is_no_resume(folder, capsys):
    whole = {name: value for name, value in FIRST.items() if "lora" not in name and name != "use_peft"}
    assert sft(**whole) == 0
    assert sft(**FIRST | {"max_steps": 2}) == 2
    assert "adapter: None -> {" in capsys.readouterr().err


def test_another_reward_is_no_resume(folder, capsys):
    (folder / "others.py").write_text(
        "def shortness(completions, **c):\n    return [-float(len(t)) for t in completions]\n"
    )
    options = options_of("grpo") | {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    assert posttrain("grpo", *flags(options)) == 0
    assert posttrain("grpo", *flags(options | {"max_steps": 2, "reward_funcs": ["others.py:shortness"]})) == 2
    assert "rewards: ['length'] -> ['shortness']" in capsys.readouterr().err


def test_a_model_that_is_not_finite_is_not_written(folder, capsys, monkeypatch):
    monkeypatch.setattr(saving, "nonfinite_weights", lambda model, args: ["layers.0.o_proj"])
    assert sft(max_steps=1) == 1
    assert "layers.0.o_proj (of 1 tensors) holds NaN" in capsys.readouterr().err
    assert not (folder / "out-sft/model.safetensors").exists()
    assert json.loads((folder / "out-sft/run.json").read_text())["starts"]


# ---- rewards that fail -------------------------------------------------------------------------------------------------------


def test_a_reward_that_always_fails_is_told(folder, capsys):
    (folder / "broken.py").write_text("def boom(completions, **columns):\n    raise KeyError('no such answer')\n")
    options = options_of("grpo") | {"max_steps": 1, "reward_funcs": ["broken.py:boom"]}
    assert posttrain("grpo", *flags(options)) == 0  # four samples may be bad luck
    assert "reward boom failed (error): KeyError: 'no such answer'" in capsys.readouterr().out
    assert posttrain("grpo", *flags(options | {"per_device_train_batch_size": 8, "output_dir": "other"})) == 1
    told = capsys.readouterr().err
    assert "Rewards failed for 8 of the 8 samples" in told
    assert "Traceback" not in told
