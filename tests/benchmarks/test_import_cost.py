"""Importing posttrain costs nothing, and its trainers cost what transformers' Trainer costs: a matter of modules, not of clocks."""

from __future__ import annotations

import json
import subprocess
import sys

NEEDED = """
import torch, transformers, datasets, accelerate, peft, safetensors, tokenizers, jinja2
from transformers import Trainer, TrainingArguments, AutoModelForCausalLM, AutoTokenizer
"""
SMALL = {"posttrain", "rich", "xxhash", "filelock", "pyarrow", "mdurl", "markdown_it", "pygments"}


def modules_after(script: str) -> set[str]:
    report = "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script + report], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_itself_imports_nothing_heavy() -> None:
    loaded = modules_after("import posttrain")
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "accelerate", "peft", "optuna", "duckdb"}


def test_help_imports_nothing_heavy() -> None:
    loaded = modules_after("from posttrain.cli.main import main; main(['--help']); main(['sweep', '--help'])")
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "optuna", "sqlalchemy", "duckdb"}


def test_trainers_import_only_what_transformers_needs_anyway() -> None:
    extra = modules_after("from posttrain import SFTConfig, SFTTrainer") - modules_after(NEEDED)
    foreign = {name for name in extra if name.split(".")[0] not in SMALL | set(sys.stdlib_module_names)}
    assert not foreign
