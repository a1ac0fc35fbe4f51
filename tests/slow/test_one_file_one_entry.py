"""A method is one file and one entry of METHODS: the rest of the library finds it there. Shown on a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.docs.fenced_blocks import ROOT

pytestmark = pytest.mark.slow
FILE = '''"""Best answer: preferences without a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import PREFERENCE
from posttrain.losses.formulas import Formula, Totals, number
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig, option
from posttrain.trainer.report.model_card import Paper


@dataclass
class BestConfig(BaseConfig):
    """Options of best answer."""

    keenness: float = option(2.0, "Scale of the mean log-prob of an answer.")


class BestTrainer(BaseTrainer):
    """-log sigmoid(keenness (mean log p(chosen) - mean log p(rejected)))."""

    method, title = "best", "best-answer optimisation"
    paper = Paper("someone2026best", "The Best Answer", "Someone", 2026, "2611.00001")
    config_class = BestConfig
    formats = (PREFERENCE,)
    roles = ("chosen", "rejected")

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        means = self.args.keenness * batch.sequence_mean(policy.logps)
        chosen, rejected = (batch.role(means, name) for name in self.roles)
        return LossOutput(-F.logsigmoid(chosen - rejected), per="unit", metrics={"rewards/margins": chosen - rejected})

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        term = f"-log sigmoid({number(args.keenness)} (m_c - m_r))"
        return Formula((term,), (f"sum over pairs / {totals['units']} pairs of the step",), (("m", "mean log-prob"),))
'''
ENTRY = '    "best": ours("best", "Best", "Preferences without a reference"),\n'


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tracked files with the new method, its pages written; (folder, a function that runs a command there)."""
    folder = tmp_path_factory.mktemp("copy")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "posttrain/methods/best.py").write_text(FILE)
    table = folder / "posttrain/methods/table.py"
    table.write_text(table.read_text().replace('    "sft": ours', ENTRY + '    "sft": ours', 1))
    tiny.causal_lm(0).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }

    def run(*words: str) -> str:
        ended = subprocess.run(
            words if Path(words[0]).is_file() else [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{' '.join(words)}:\n{(ended.stdout + ended.stderr)[-4000:]}"
        return ended.stdout + ended.stderr

    run("-m", "scripts.write_docs")
    return folder, run


OPTIONS = [
    "--model_name_or_path",
    "model",
    "--dataset_name",
    "examples/data/pairs.jsonl",
    "--use_cpu",
    "--report_to",
    "none",
]
OPTIONS += ["--max_steps", "2", "--max_length", "64", "--per_device_train_batch_size", "2", "--output_dir", "runs/best"]


COMMANDS = """
import sys
from posttrain.cli.main import main
for words in {commands}:
    print(">>>", *words[:2], flush=True)
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    if code:
        sys.exit(f"{{words}} ended with {{code}}")
"""


@pytest.fixture(scope="module")
def said(copy):
    """What each command says, by its first two words; one process runs them all, for the imports of each take ten seconds."""
    _, run = copy
    commands = [
        ["--help"], ["--version"], ["best", "--help"], ["check", "best", *OPTIONS],
        ["explain", "best", *OPTIONS, "--keenness", "3"], ["best", *OPTIONS],
    ]  # fmt: skip
    parts = run("-c", COMMANDS.format(commands=commands)).split(">>> ")[1:]
    return dict(part.split("\n", 1) for part in parts)


@pytest.fixture(scope="module")
def tested(copy):
    """What the tests of the copy say that concern every method."""
    _, run = copy
    files = (
        "docs/test_method_pages.py",
        "docs/test_option_tables.py",
        "test_public_names.py",
        "trainer/test_gradient_matrix.py",
    )
    chosen = "not test_gradient_matrix or best or missing"
    return run("-m", "pytest", "-q", "-rA", "-m", "not trust", "-k", chosen, *(f"tests/{name}" for name in files))


def test_it_is_a_command_with_options_checks_and_arithmetic(said):
    assert "Preferences without a reference" in said["--help"]
    assert said["--version"].strip()
    assert "--keenness" in said["best --help"]
    assert "trained" in said["check best"]
    assert "-log sigmoid(3 (m_c - m_r))" in said["explain best"]
    assert "2 pairs of the step" in said["explain best"]


def test_it_trains_and_its_card_names_it_and_its_paper(copy, said):
    folder, _ = copy
    card = (folder / "runs/best/README.md").read_text()
    assert "best-answer optimisation" in card
    assert "The Best Answer" in card


def test_it_has_a_page_with_its_options_and_stands_in_lists_and_menus(copy, tested):
    folder, _ = copy
    page = (folder / "docs/best.md").read_text()
    assert "Scale of the mean log-prob of an answer." in page
    assert "best.md" in (folder / "docs/index.md").read_text() + (folder / "README.md").read_text()
    for file in ("test_method_pages", "test_option_tables"):
        assert f"PASSED tests/docs/{file}.py" in tested


def test_its_names_are_public_and_the_contract_holds_for_it(copy, tested):
    _, run = copy
    assert "PASSED tests/test_public_names.py" in tested
    assert "Methods do not import methods KEPT" in run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")


def test_it_is_in_the_gradient_matrix_and_holds_there(tested):
    matrix = "PASSED tests/trainer/test_gradient_matrix.py::test_"
    assert tested.count(f"{matrix}gradient_equals_the_oracle[best-default-") >= 15
    assert f"{matrix}no_method_and_no_loss_is_missing" in tested
