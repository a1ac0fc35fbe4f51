"""The option tables of docs/ say what the configs say, and say it once."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest
from transformers import TrainingArguments

from posttrain.core.options import is_refused
from posttrain.methods.table import METHODS
from posttrain.trainer.options.base import BaseConfig, is_ours
from scripts.write_docs import DOCS, TABLE, configs, outdated, own_options, row, table

CONFIGS = configs()
PACKAGE = DOCS.parent / "posttrain"


def tables_in_docs() -> dict[str, list[str]]:
    """Config -> the pages that hold its table."""
    found: dict[str, list[str]] = {}
    for page in sorted(DOCS.rglob("*.md")):
        for match in TABLE.finditer(page.read_text(encoding="utf-8")):
            found.setdefault(match[2], []).append(page.name)
    return found


def test_tables_are_up_to_date():
    assert not outdated(), "run `make docs`"


def test_every_config_has_one_table_and_every_method_a_page():
    expected = {"BaseConfig": ["options.md"]} | {m.config: [f"{name}.md"] for name, m in METHODS.items()}
    expected["RefusedOptions"] = ["differences-from-trl.md"]
    assert tables_in_docs() == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option_of_ours_is_documented_once(name):
    """In the table of its method, or in the shared one: together the tables hold all options, each once per table."""
    config = CONFIGS[name]
    listed = [field.name for field in own_options(config)]
    assert len(listed) == len(set(listed))
    ours = {field.name for field in dataclasses.fields(config) if is_ours(field)}
    assert ours == set(listed) | {field.name for field in own_options(BaseConfig)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_declared_in_this_library_has_a_help_text(name):
    config = CONFIGS[name]
    for field in dataclasses.fields(config):
        declared_here = any(
            field.name in inspect.get_annotations(base)
            for base in config.__mro__
            if base.__module__.startswith("posttrain.")
        )
        is_known = is_ours(field) or is_refused(field)
        assert is_known == declared_here, f"{name}.{field.name} is declared without option(default, help)"
        if declared_here:
            text = field.metadata["help"]
            assert re.match(r"[A-Za-z`(]", text), f"{name}.{field.name}: {text!r}"
            assert text.endswith((".", ")")), f"{name}.{field.name}: the help is no sentence: {text!r}"


def test_tables_do_not_depend_on_who_has_parsed_arguments():
    """HfArgumentParser puts types in the place of their names."""
    from transformers import HfArgumentParser

    HfArgumentParser(CONFIGS["SFTConfig"])
    assert not outdated()


def test_a_row_shows_type_default_and_help():
    (beta,) = [field for field in own_options(CONFIGS["DPOConfig"]) if field.name == "beta"]
    assert row(beta, "float") == "| `beta` | `float` | `0.1` | Strength of the pull towards the reference. |\n"
    assert "| `loss_weights` | `list[float] \\| None` | `None` |" in table(CONFIGS["DPOConfig"])
    assert "`precompute_ref_log_probs`" in table(CONFIGS["DPOConfig"])
    assert "max_length" not in table(CONFIGS["DPOConfig"])


def test_every_option_is_read_somewhere():
    """An option that is accepted and ignored is a lie. Read means: an attribute of that name, or a parameter of a loss."""
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if path.parent.name == "losses":
            read |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    ours = {field.name for config in CONFIGS.values() for field in own_options(config)}
    of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert ours - of_transformers - read == set()
