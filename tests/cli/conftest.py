"""A working directory with a tiny model, rows of every kind and rewards; see `runs`."""

from __future__ import annotations

import pytest

from tests.cli.runs import folder_with_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return folder_with_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch):
    """The working directory has the inputs, and outputs of its own."""
    for each in inputs.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    return tmp_path
