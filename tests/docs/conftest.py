"""Pages, scripts and notebooks run in a child of the fork server, in a home of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.serve.auth import TOKEN_VARIABLE
from tests.docs import local_hub, page_runner
from tests.forked import Child, read_environment_again
from tests.methods import model_server

TEACHER = "HuggingFaceTB/SmolLM2-360M-Instruct"


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], dict[str, Any]]:
    """path -> {"failure", "seconds"}. HF_HOME and HOME are in a temporary folder: nothing of the user's is read or written."""
    home = tmp_path_factory.mktemp("home")
    local_hub.plant(home)
    places = {"HOME": home, "HF_HOME": home, "HF_DATASETS_CACHE": home / "datasets", "TMPDIR": home}
    dropped = {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {name: str(value) for name, value in places.items()}

    def run(path: Path) -> dict[str, Any]:
        started = time.monotonic()
        folder = tmp_path_factory.mktemp("page")

        def page() -> None:
            read_environment_again()
            page_runner.run(path, folder)

        given = environment
        if "TEACHER_URL" in path.read_text(encoding="utf-8"):  # where a server of a teacher is at hand
            _, options = model_server.started(local_hub.folder_of(home, TEACHER), folder)
            token = Path(options["teacher_server_token_file"]).read_text()
            given = environment | {"TEACHER_URL": options["teacher_model_server_url"], TOKEN_VARIABLE: token}
        child = Child(page, folder / "output.log", environment=given)
        code = child.wait(page_runner.PAGE_SECONDS)
        failure = None if code == 0 else f"{path} ended with {code}:\n{child.output()[-6000:]}"
        return {"failure": failure, "seconds": time.monotonic() - started}

    return run
