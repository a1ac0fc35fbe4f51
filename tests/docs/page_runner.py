"""Runs a page, a script or a notebook; the fixture `runner` does so in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs.fenced_blocks import ROOT, Block, after_diff, blocks_of

PAGE_SECONDS = 400  # a page takes up to 40 on an idle machine
Namespace = dict[str, Any]


def run(path: Path, folder: Path) -> None:
    """Run one page in a folder that looks like the root of a clone."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    os.chdir(folder)
    RUNNERS[path.suffix](path)


# ---- pages -----------------------------------------------------------------------------------------------------------------


def run_page(page: Path) -> None:
    namespace: Namespace = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(page):
        if block.language == "output":
            compare(page, block, printed)
        else:
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                try:
                    LANGUAGES.get(block.language, nothing)(page, block, namespace)
                finally:
                    printed = caught.getvalue()
                    os.write(1, printed.encode())


def run_python(page: Path, block: Block, namespace: Namespace) -> None:
    """Line numbers of a traceback are those of the page."""
    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def run_diff(page: Path, block: Block, namespace: Namespace) -> None:
    exec(compile("\n" * (block.line - 1) + after_diff(block.code), str(page), "exec"), namespace)


def run_commands(page: Path, block: Block, namespace: Namespace) -> None:
    """Commands of ours are run; those of others (make, pip, git) are checked by test_code_blocks."""
    from posttrain.cli.commands import sweep
    from posttrain.cli.main import main as posttrain
    from tests.cli.runs import refuse_here

    sweep.refuse_impossible = refuse_here  # this process is the page's own already
    for words in (shlex.split(line, comments=True) for line in block.code.splitlines()):
        if words[:1] == ["posttrain"] and (code := posttrain(words[1:])):
            raise RuntimeError(f"{page}:{block.line}: `{shlex.join(words)}` ended with {code}.")


def write_file(page: Path, block: Block, namespace: Namespace) -> None:
    """A YAML block that begins with `# NAME.yaml` is that file, for the commands below it."""
    first = block.code.splitlines()[0]
    if not first.startswith("# ") or not first.endswith(".yaml"):
        raise ValueError(f"{page}:{block.line}: the first line of a YAML block must be `# NAME.yaml`.")
    Path(first[2:]).write_text(block.code, encoding="utf-8")


def nothing(page: Path, block: Block, namespace: Namespace) -> None:
    """A picture, a file tree, a table: not code."""


def compare(page: Path, block: Block, printed: str) -> None:
    """Each line of an `output` block must have been printed, in order; `...` stands for anything."""
    rest = printed
    for offset, line in enumerate(block.code.splitlines()):
        for part in filter(None, (part.strip() for part in line.split("..."))):
            before, found, rest = rest.partition(part)
            if not found:
                raise AssertionError(
                    f"{page}:{block.line + offset}: the block above did not print {part!r}. After {before[-200:]!r}"
                )


LANGUAGES: dict[str, Callable[[Path, Block, Namespace], None]] = {
    "python": run_python,
    "diff": run_diff,
    "bash": run_commands,
    "yaml": write_file,
}


# ---- scripts and notebooks -------------------------------------------------------------------------------------------------


def run_script(path: Path) -> None:
    """As `python path`: the copy in this folder, so that nothing is written into the repository."""
    copy = Path(path.relative_to(ROOT)).absolute()
    sys.argv = [str(copy)]
    runpy.run_path(str(copy), run_name="__main__")


def run_notebook(path: Path) -> None:
    """The code cells in order, in one namespace, from the folder that the notebook is in."""
    os.chdir(path.relative_to(ROOT).parent)
    namespace: Namespace = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)


RUNNERS: dict[str, Callable[[Path], None]] = {".md": run_page, ".py": run_script, ".ipynb": run_notebook}
