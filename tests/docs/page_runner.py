"""A process that has imported everything once and runs each page, script or notebook in a fork of itself.

    python -m tests.docs.page_runner HOME      reads paths from stdin, one a line; answers each with a line of JSON

A fork costs milliseconds where an import costs seconds, and leaves nothing behind for the next page. Started by the fixture
`runner` with HF_HOME and HOME in a temporary folder, so that nothing of the user's is read or written.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs import local_hub
from tests.docs.fenced_blocks import ROOT, Block, after_diff, blocks_of

PAGE_SECONDS = 400  # a page takes up to 40 on an idle machine
Namespace = dict[str, Any]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # what pages print must not be taken for an answer
    os.dup2(2, 1)
    local_hub.plant(Path(sys.argv[1]))
    import datasets  # noqa: F401
    import peft  # noqa: F401

    import posttrain

    for name in posttrain.__all__:
        getattr(posttrain, name)
    print("ready", file=answers, flush=True)
    for path in sys.stdin:
        print(json.dumps(in_a_fork(Path(path.strip()))), file=answers, flush=True)


def in_a_fork(path: Path) -> dict[str, Any]:
    """{"failure": text or None, "seconds": float}"""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    log = folder / "output.log"
    log.touch()
    if Path("/proc/self/task").exists() and len(os.listdir("/proc/self/task")) > 1:
        return {"failure": "the process that runs pages has threads, and must not be forked.", "seconds": 0.0}
    pid = os.fork()
    if pid == 0:
        os._exit(child(path, folder, log))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = log.read_text(encoding="utf-8", errors="replace")
    shutil.rmtree(folder)
    failure = None if status == 0 else f"{path} ended with {status}:\n{text[-6000:]}"
    return {"failure": failure, "seconds": time.monotonic() - started}


def child(path: Path, folder: Path, log: Path) -> int:
    """Run one page in a folder that looks like the root of a clone; 0 when all of it ran."""
    signal.alarm(PAGE_SECONDS)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    os.chdir(folder)
    try:
        RUNNERS[path.suffix](path)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


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
                    sys.__stdout__.write(printed)


def run_python(page: Path, block: Block, namespace: Namespace) -> None:
    """Line numbers of a traceback are those of the page."""
    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


def run_diff(page: Path, block: Block, namespace: Namespace) -> None:
    exec(compile("\n" * (block.line - 1) + after_diff(block.code), str(page), "exec"), namespace)


def run_commands(page: Path, block: Block, namespace: Namespace) -> None:
    """Commands of ours are run; those of others (make, pip, git) are checked by test_code_blocks."""
    from posttrain.cli.main import main as posttrain

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

if __name__ == "__main__":
    main()
