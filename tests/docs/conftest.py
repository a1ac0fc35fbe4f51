"""The process that runs pages, started once for all tests of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.fenced_blocks import ROOT


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], dict[str, Any]]]:
    """path -> {"failure", "seconds"}"""
    home = tmp_path_factory.mktemp("home")
    places = {"HOME": home, "HF_HOME": home, "HF_DATASETS_CACHE": home / "datasets", "TMPDIR": home}
    settings = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }
    dropped = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.page_runner", str(home)],
        cwd=ROOT,
        env={**environment, **{name: str(value) for name, value in places.items()}, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n", "the process that runs pages did not start; its error is above"

    def run(path: Path) -> dict[str, Any]:
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        answer = process.stdout.readline()  # a page is ended after PAGE_SECONDS
        assert answer, f"the process that runs pages ended with {process.wait(60)}; its error is above"
        return json.loads(answer)

    yield run
    process.stdin.close()
    process.wait(timeout=60)
