"""`posttrain doctor` and `posttrain completion`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from posttrain.cli.commands import doctor
from tests.cli.runs import posttrain


def test_a_machine_that_works(capsys):
    assert posttrain("doctor") == 0
    shown = capsys.readouterr().out
    assert "the native engine" in shown
    assert "posttrain check" in shown
    assert "!!" not in shown


def test_what_fails_is_said_and_changes_the_exit_code(capsys, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_VLLM_PYTHON", "/nowhere/python")
    assert posttrain("doctor") == 1
    assert "/nowhere/python" in capsys.readouterr().out


def test_a_kernel_that_raises_is_named():
    def fail():
        raise RuntimeError("no kernel image\nis available")

    line = doctor._tried("attention", "torch's", fail)
    assert line.mark == doctor.BAD
    assert "no kernel image" in line.text


def test_versions_that_ci_does_not_test_are_named_with_ci_s(monkeypatch):
    tested = {"torch": "2.13.0+cpu", "transformers": "5.17.0", "pyyaml": "6.0.3"}
    monkeypatch.setattr(
        doctor, "_requirements", lambda: ["torch<2.14,>=2.11", "transformers>=5.16", "pyyaml>=6", "numpy"]
    )
    monkeypatch.setattr(doctor, "_version", lambda name: tested.get(name, doctor.NO_VERSION))
    assert doctor.untested() == {"transformers": ("5.17.0", "5.19.0")}
    (line,) = [line for line in doctor.packages() if line.name == "versions"]
    assert line.mark == doctor.WARNED
    assert "transformers 5.17.0 (CI: 5.19.0)" in line.text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_commands_and_options(shell, capsys):
    assert posttrain("completion", shell) == 0
    script = capsys.readouterr().out
    for word in ("sft", "check", "vllm-serve", "learning_rate", "num_generations"):
        assert word in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes(capsys):
    posttrain("completion", "bash")
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=(posttrain sft --learn); COMP_CWORD=2; _posttrain; echo "${COMPREPLY[@]}"'
    shown = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["--learning_rate"]
