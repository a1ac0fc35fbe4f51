"""Importing posttrain costs nothing, and its trainers cost what transformers' Trainer costs: a matter of modules, not of clocks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NEEDED = """
import torch, transformers, datasets, accelerate, peft, safetensors, tokenizers, jinja2
from transformers import Trainer, TrainingArguments, AutoModelForCausalLM, AutoTokenizer
"""
SMALL = {"posttrain", "PIL", "rich", "xxhash", "filelock", "pyarrow", "mdurl", "markdown_it", "pygments"}


def modules_after(*scripts: str) -> list[set[str]]:
    """What is imported after each of them, in one process."""
    report = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))\n"
    command = [sys.executable, "-c", "".join(script + report for script in scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def test_the_package_itself_imports_nothing_heavy() -> None:
    (loaded,) = modules_after("import posttrain")
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "accelerate", "peft", "optuna", "duckdb"}


def test_help_imports_nothing_heavy() -> None:
    (loaded,) = modules_after("from posttrain.cli.main import main; main(['--help']); main(['sweep', '--help'])")
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "optuna", "sqlalchemy", "duckdb"}


@pytest.mark.slow
def test_trainers_import_only_what_transformers_needs_anyway() -> None:
    needed, loaded = modules_after(NEEDED, "from posttrain import SFTConfig, SFTTrainer")
    foreign = {name for name in loaded - needed if name.split(".")[0] not in SMALL | set(sys.stdlib_module_names)}
    assert not foreign
