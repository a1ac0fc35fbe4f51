"""Every example runs as a script without a main guard, every cell of every notebook runs, and each method has an example."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.methods.table import METHODS
from tests.docs.fenced_blocks import ROOT
from tests.docs.local_hub import SEEING, WITH_TEMPLATE

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MAX_LINES = 60


@pytest.mark.parametrize("path", [*SCRIPTS, *NOTEBOOKS], ids=lambda path: path.name)
def test_example_runs(path, runner):
    result = runner(path)
    assert result["failure"] is None, result["failure"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short_and_has_no_main_guard(script):
    source = script.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    assert "__main__" not in source


def test_every_method_has_an_example():
    for method in METHODS.values():
        users = [script.name for script in SCRIPTS if f"{method.trainer}(" in script.read_text(encoding="utf-8")]
        assert users, f"no script in examples/ uses {method.trainer}"


def test_examples_name_only_planted_models():
    """A name that the tests do not plant would be a download when the example is first run by a person."""
    for script in SCRIPTS:
        source = script.read_text(encoding="utf-8")
        assert any(f'"{name}"' in source for name in (*WITH_TEMPLATE, SEEING)), script.name


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_kept_without_outputs(notebook: Path):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    for cell in content["cells"]:
        assert cell["cell_type"] != "code" or (cell["outputs"] == [] and cell["execution_count"] is None)
