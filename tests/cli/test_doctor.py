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
    monkeypatch.setattr(doctor, "version_of", lambda name, otherwise="": tested.get(name, otherwise))
    assert doctor.untested() == {"transformers": ("5.17.0", "5.19.0")}
    (line,) = [line for line in doctor.packages() if line.name == "versions"]
    assert line.mark == doctor.WARNED
    assert "transformers 5.17.0 (CI: 5.19.0)" in line.text


def sysfs(root, adapters, modules):
    """{adapter: [(state, rate, link layer) of each port]}, as the kernel shows them."""
    for name, ports in adapters.items():
        for number, texts in enumerate(ports, 1):
            port = root / "sys/class/infiniband" / name / "ports" / str(number)
            port.mkdir(parents=True)
            for file, text in zip(("state", "rate", "link_layer"), texts):
                (port / file).write_text(f"{text}\n")
    for name in modules:
        (root / "sys/module" / name).mkdir(parents=True)


NDR = ("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand")


@pytest.mark.parametrize(
    ("adapters", "modules", "wanted"),
    [
        ({}, ["nvidia"], [("-", "infiniband", "Ethernet")]),
        (
            {"mlx5_0": [NDR]},
            ["nvidia", "nvidia_peermem"],
            [("ok", "mlx5_0", "InfiniBand, 400 Gb/sec"), ("ok", "gpudirect", "")],
        ),
        ({"mlx5_0": [NDR]}, ["nvidia"], [("ok", "mlx5_0", ""), ("!", "gpudirect", "modprobe nvidia_peermem")]),
        ({"mlx5_0": [NDR]}, [], [("ok", "mlx5_0", "")]),
        (
            {
                "a": [("1: DOWN", "10 Gb/sec", "Ethernet")],
                "b": [("1: DOWN", "", ""), ("4: ACTIVE", "100 Gb/sec", "Ethernet")],
            },
            ["nv_peer_mem"],
            [("!", "a", "1: DOWN"), ("ok", "b", "RoCE, 100 Gb/sec"), ("ok", "gpudirect", "nv_peer_mem")],
        ),
    ],
)
def test_the_network_between_machines(tmp_path, adapters, modules, wanted):
    sysfs(tmp_path, adapters, modules)
    found = doctor.network(tmp_path)
    assert [(line.mark, line.name) for line in found] == [(mark, name) for mark, name, _ in wanted]
    assert all(part in line.text for line, (_, _, part) in zip(found, wanted))


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
    how = {"capture_output": True, "text": True, "check": True}
    shown = subprocess.run(["bash"], input=f"{script}\n{ask}", **how).stdout  # it is too long for an argument
    assert shown.split() == ["--learning_rate"]
