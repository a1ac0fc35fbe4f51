"""Every code block of README, CONTRIBUTING, CHANGELOG and docs/ runs as it is printed; every command and link is real."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.docs.fenced_blocks import ROOT, blocks_of, pages

KNOWN_LANGUAGES = {"python", "diff", "bash", "yaml", "output", "text", "json", "bibtex"}
"""The first three are run, `yaml` is written to the file that it names, `output` is compared with what was printed."""
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_blocks_run(page, runner):
    result = runner(page)
    assert result["failure"] is None, result["failure"]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_block_says_what_it_is(page):
    """A block without a known language would be code that nobody runs."""
    unknown = [
        f"line {block.line}: {block.language!r}" for block in blocks_of(page) if block.language not in KNOWN_LANGUAGES
    ]
    assert not unknown, f"{page}: {unknown}; use one of {sorted(KNOWN_LANGUAGES)}"


def commands() -> list[tuple[str, list[str]]]:
    return [
        (f"{name_of(page)}:{block.line}", shlex.split(line, comments=True))
        for page in pages()
        for block in blocks_of(page)
        if block.language == "bash"
        for line in block.code.splitlines()
        if shlex.split(line, comments=True)
    ]


def test_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    faults = []
    for place, words in commands():
        check = CHECKS.get(words[0])
        fault = f"nobody checks the command {words[0]!r}" if check is None else check(words, targets, extras)
        if fault:
            faults.append(f"{place}: {fault}")
    assert not faults, "\n".join(faults)


def check_make(words: list[str], targets: set[str], extras: set[str]) -> str | None:
    unknown = [word for word in words[1:] if "=" not in word and word not in targets]
    return f"the Makefile has no target {unknown[0]!r}" if unknown else None


def check_pip(words: list[str], targets: set[str], extras: set[str]) -> str | None:
    named = re.findall(r"\[([a-z,]+)\]", " ".join(words))
    unknown = [extra for names in named for extra in names.split(",") if extra not in extras]
    return f"pyproject.toml has no extra {unknown[0]!r}" if unknown else None


def check_python(words: list[str], targets: set[str], extras: set[str]) -> str | None:
    missing = [word for word in words[1:] if word.endswith(".py") and not (ROOT / word).is_file()]
    return f"there is no file {missing[0]}" if missing else None


def no_check(words: list[str], targets: set[str], extras: set[str]) -> None:
    """Run by test_blocks_run (posttrain), or not ours to run (git, cd)."""


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "posttrain": no_check,
    "git": no_check,
    "cd": no_check,
}


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page):
    """Files that a page links to are there, and so are the headings."""
    faults = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        if not path.exists():
            faults.append(f"{target} does not exist")
        elif anchor and anchor[1:] not in anchors_of(path):
            faults.append(f"{target} has no heading {anchor}")
    assert not faults, f"{page}: {faults}"


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
