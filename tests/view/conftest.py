"""A made-up run that all tests of a session look at; those that change it make their own."""

from __future__ import annotations

import pytest

from tests.view.made_up import make_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """6 steps of 10 prompts with 8 completions each."""
    return make_run(tmp_path_factory.mktemp("made_up") / "grpo-tiny", steps=6)
