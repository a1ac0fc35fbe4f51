"""A line in METHODS is enough for a method to be on the command line, on a page, in the list and in the menu."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from posttrain import BaseConfig, BaseTrainer, option
from posttrain.data.rows.formats import PREFERENCE
from posttrain.methods.table import METHODS, Method
from scripts import method_pages, option_specs
from scripts.method_pages import DOCS, facts, menu, title_of
from scripts.write_docs import outdated, rewritten


@dataclass
class GapConfig(BaseConfig):
    gap: float = option(0.5, "By how much the chosen answer should win.")


class GapTrainer(BaseTrainer):
    """The gap between two answers, from a paper that nobody wrote."""

    method = "gap"
    config_class = GapConfig
    formats = (PREFERENCE,)
    roles = ("chosen", "rejected")


@pytest.fixture
def new_method(monkeypatch):
    monkeypatch.setitem(METHODS, "gap", Method(__name__, "GapTrainer", "GapConfig", "Gaps between answers", "new"))


def test_every_method_has_facts_on_its_page():
    for name in METHODS:
        (match,) = method_pages.FACTS.finditer((DOCS / f"{name}.md").read_text(encoding="utf-8"))
        assert match[2] == name
        assert f"`posttrain {name} CONFIG.yaml`" in match[3]
        assert "loss = " in match[3]


def test_facts_name_columns_and_loss():
    text = facts("reward")
    assert "| In Python | `from posttrain import RewardConfig, RewardTrainer` |" in text
    assert (
        "`chosen_ids` and `rejected_ids`, or `chosen_input_ids` and `rejected_input_ids`; optional `prompt_ids`" in text
    )
    assert "loss = -log(sigmoid(r_c - r_r - margin))\n  sum over pairs / N pairs of the step" in text


@pytest.mark.usefixtures("new_method")
def test_a_new_method_is_on_a_page_in_the_list_and_in_the_menu():
    written = outdated()
    page = written[DOCS / "gap.md"]
    assert page.startswith("# Gaps between answers\n\nThe gap between two answers, from a paper that nobody wrote.\n")
    assert "| `gap` | `float` | `0.5` | By how much the chosen answer should win. |" in page
    assert "| Rows | [preference](data.md): `chosen` and `rejected`; optional `prompt`" in page
    assert "| State | new |" in page
    assert rewritten(method_pages.rewritten(page, method_pages.pages())) == page  # and is up to date once it is there
    assert "| [Gaps between answers](gap.md) | `posttrain gap` | Gaps between answers |" in written[DOCS / "index.md"]
    assert menu()[-1] == {"Gaps between answers": "gap.md"}


@pytest.mark.usefixtures("new_method")
def test_a_new_method_is_on_the_command_line():
    table = json.loads(option_specs.written())
    assert table["methods"]["gap"]["summary"] == "Gaps between answers"
    names = {table["options"][number]["name"] for number in table["methods"]["gap"]["options"]}
    assert {"gap", "learning_rate", "model_name_or_path", "dataset_name", "num_processes"} <= names


def test_a_page_without_a_heading_is_an_error():
    with pytest.raises(ValueError, match=r"docs/gap.md has no heading"):
        title_of("gap", "text\n")
