"""`posttrain view`, `posttrain run` and what commands write: mistakes are a sentence and exit code 2."""

from __future__ import annotations

import pytest

from posttrain.cli.running.output import write_json
from tests.cli.runs import posttrain

SCRIPT = """
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

if __name__ == "__main__":
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    raise ValueError("of the script")
"""


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_that_cannot_be(folder, capsys, port):
    assert posttrain("view", ".", "--port", port) == 2
    told = capsys.readouterr().err
    assert "port" in told
    assert port in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (
            ["--dataset_name", "d", "--model_name_or_path", "m", "--output_dir", "o", "--lerning_rate", "1"],
            "--lerning_rate",
        ),
    ],
)
def test_arguments_of_a_script_that_its_parser_refuses(folder, capsys, words, wanted):
    (folder / "script.py").write_text(SCRIPT)
    assert posttrain("run", "script.py", *words) == 2
    assert wanted in capsys.readouterr().err


def test_an_error_of_the_script_itself_keeps_its_traceback(folder):
    (folder / "script.py").write_text(SCRIPT)
    with pytest.raises(ValueError, match="of the script"):
        posttrain("run", "script.py", "--dataset_name", "d", "--model_name_or_path", "m", "--output_dir", "o")


def test_control_c_is_exit_code_130_and_a_sentence(folder, monkeypatch, capsys):
    def stopped(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("posttrain.cli.commands.env.main", stopped)
    assert posttrain("env") == 130
    assert "posttrain env: stopped by Control-C." in capsys.readouterr().err


def test_json_goes_into_a_folder_that_is_made(folder):
    write_json("new/folder/found.json", {"a": 1})
    assert (folder / "new/folder/found.json").read_text() == '{\n "a": 1\n}\n'


def test_a_method_may_be_written_with_a_hyphen(capsys):
    assert posttrain("online-dpo", "--help") == 0
    assert "missing_eos_penalty" in capsys.readouterr().out
