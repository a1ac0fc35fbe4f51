"""Our numbers equal those that TRL 1.16.0 (BCO, PRM, MiniLLM, SSD: 1.10.0) logged, without TRL.

Recorded by `benchmarks/parity/run.sh --record`.

Every logged loss, metric and gradient norm of every step and the norm of every trained tensor at the end, to 1e-4. The whole
comparison, some 500 cases, is `make parity`; here are its most telling ones.
"""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path

import pytest

from benchmarks.parity import materials, served
from benchmarks.parity.cases import CASES
from benchmarks.parity.compare import compare
from benchmarks.parity.one_side import run_case
from benchmarks.parity.record import COMMAND, RECORDED
from tests.methods import model_server
from tests.rollout.served import needs_uvicorn

FILE = Path(__file__).with_name("trl_recorded.json")
THEIRS = json.loads(FILE.read_text(encoding="utf-8"))
CASE = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("parity")
    materials.write(made)
    return made


def test_the_recorded_cases_are_those_of_the_script():
    assert THEIRS["header"]["command"] == COMMAND
    assert set(THEIRS) - {"header"} == set(RECORDED)


def forked(model, folder):
    """A server that has everything imported when it starts."""
    server, options = model_server.started(model, folder)
    return server.end, options


def marks(name):
    if CASE[name].sees:
        return pytest.mark.skipif(
            util.find_spec("torchvision") is None, reason="TRL's images were made by torchvision."
        )
    return needs_uvicorn if name.startswith("server") else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in RECORDED])
def test_numbers_of_trl(name, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(served, "started", forked)
    ours = run_case("posttrain", CASE[name], folder, str(tmp_path))
    verdict = compare(CASE[name], ours, THEIRS[name])
    assert verdict.steps >= (3 if CASE[name].sees else 4)
    assert not verdict.undeclared, [(number, verdict.examples[number]) for number in verdict.undeclared]


def test_a_changed_number_would_be_noticed(folder, tmp_path):
    """The comparison itself: a metric that is 0.02% off, and one under another name."""
    case = CASE["sft-text@1x4"]
    ours = run_case("posttrain", case, folder, str(tmp_path))
    ours["logs"][2]["entropy"] *= 1.0002
    ours["logs"][1]["accuracy"] = ours["logs"][1].pop("mean_token_accuracy")
    assert {"entropy", "mean_token_accuracy"} <= set(compare(case, ours, THEIRS[case.name]).undeclared)
