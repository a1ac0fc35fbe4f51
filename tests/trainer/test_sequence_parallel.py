"""Processes that share the tokens of each row have the gradient of one process that computes all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import wait_for_group
from tests.trainer.sequence_parallel_cells import CELLS, SAVED, STEPS, start

QUICK = ("sft", "dpo", "grpo")
COMPARED = (
    "loss", "eval_loss", "grad_norm", "num_tokens", "entropy", "eval_entropy", "reward", "eval_reward", "kl", "rewards/margins",
    "mean_token_accuracy", "completions/mean_length",
)  # fmt: skip


def of_one_process(folder: Path, names: list[str]) -> Path:
    wait_for_group(start(1, 1, folder, names), 900)
    return folder


def of_several(folder: Path, processes: int, size: int, names: list[str]) -> Path:
    wait_for_group(start(processes, size, folder, names), 1200)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(of one process, of two that share every row)"""
    home = tmp_path_factory.mktemp("shared-rows")
    groups = [start(1, 1, home / "one", list(QUICK)), start(2, 2, home / "two", list(QUICK))]
    for group in groups:
        wait_for_group(group)
    return home / "one", home / "two"


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return of_one_process(tmp_path_factory.mktemp("shared-rows") / "one", list(CELLS))


@pytest.fixture(scope="module", params=[(2, 2), (4, 2), (4, 4)], ids=["2", "2x2", "4"])
def several(request, tmp_path_factory):
    """Runs of (processes, of which so many share a row)."""
    return of_several(tmp_path_factory.mktemp("shared-rows") / "several", *request.param, list(CELLS))


def tensors(file: Path) -> dict[str, torch.Tensor]:
    if not file.exists():
        home = next(parent for parent in file.parents if (parent / "rank-0.log").exists())
        errors = [path.read_text() for path in home.glob("*.error")]
        pytest.fail("\n".join(errors) or (home / "rank-0.log").read_text()[-3000:])
    return load_file(file)


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_gradients(alone: Path, together: Path) -> None:
    for step in range(STEPS):
        file = f"gradients/gradient-{step}.safetensors"
        one, other = tensors(alone / file), tensors(together / file)
        assert one.keys() == other.keys()
        assert max(gradient.abs().max() for gradient in one.values()) > 1e-3
        for key, gradient in one.items():
            torch.testing.assert_close(
                other[key], gradient, rtol=1e-6, atol=1e-8, msg=lambda m, key=f"{step} {key}": f"{key}: {m}"
            )


def assert_same_log(alone: Path, together: Path) -> None:
    seen = set()
    for line, other in zip(logged(alone), logged(together), strict=True):
        for key in {*COMPARED} & line.keys():
            seen.add(key)
            assert other[key] == pytest.approx(line[key], rel=1e-5, abs=1e-7), key
    assert {"loss", "grad_norm", "num_tokens"} <= seen


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_have_the_gradient_of_one(name, quick):
    assert_same_gradients(*(home / name for home in quick))
    assert_same_log(*(home / name for home in quick))


@pytest.mark.parametrize("name", [name for name in QUICK if CELLS[name].resumes])
def test_two_processes_resume_exactly(name, quick):
    assert_resumed(quick[1], name)


def assert_resumed(home: Path, name: str) -> None:
    whole, resumed = (
        tensors(next((home / run / "final").glob("*model.safetensors"))) for run in (name, f"{name}-resumed")
    )
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    lines = [[line for line in logged(home / run) if "loss" in line] for run in (name, f"{name}-resumed")]
    for line, other in zip(lines[0][SAVED:], lines[1], strict=True):
        for key in COMPARED:
            assert other.get(key) == line.get(key), key


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_one_process(name, one, several):
    assert_same_gradients(one / name, several / name)
    assert_same_log(one / name, several / name)
    if CELLS[name].resumes:
        assert_resumed(several, name)
