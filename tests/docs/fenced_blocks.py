"""Fenced code blocks of a Markdown page, each with the line it stands on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)(`{3,})(.*)$")


@dataclass(frozen=True)
class Block:
    """One fence: what language it claims, its text, and the number of its first line of code."""

    language: str
    code: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order. A fence that is never closed is an error."""
    found: list[Block] = []
    opened: tuple[str, str, str, int] | None = None
    lines: list[str] = []
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(text)
        if opened is None and fence:
            opened, lines = (*fence.groups(), number + 1), []
        elif opened is not None and fence and fence[2] == opened[1] and not fence[3].strip():
            found.append(Block(opened[2].strip(), "\n".join(lines), opened[3]))
            opened = None
        elif opened is not None:
            lines.append(text.removeprefix(opened[0]))
    if opened is not None:
        raise ValueError(f"{page}:{opened[3] - 1}: this code block is never closed.")
    return found


def pages() -> list[Path]:
    """Every Markdown page that a reader meets."""
    return [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    ]


def after_diff(code: str) -> str:
    """What a `diff` block leaves: its added and its unchanged lines."""
    return "\n".join(line[1:] for line in code.splitlines() if line[:1] in ("+", " "))
