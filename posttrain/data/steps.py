"""Free text -> its steps, as a process reward model judges them. Nothing is lost: the pieces, joined, are the text.

No step begins inside a fence of code, a formula, a table or a `<think>` block: each of these belongs to one step as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

WHOLE = re.compile(
    r"""
      ^[ \t]*(?P<fence>`{3,}|~{3,})[^\n]*.*?(?:\n[ \t]*(?P=fence)[`~]*[ \t]*$|\Z)  # code; what is not closed lasts to the end
    | <think>.*?(?:</think>|\Z)
    | \$\$.*?(?:\$\$|\Z)
    | \\\[.*?(?:\\\]|\Z)
    | \\begin\{(?P<name>[^}\n]*)\}.*?(?:\\end\{(?P=name)\}|\Z)
    | \\\([^\n]*?\\\)
    | (?<![\\$])\$(?=[^\s$])[^$\n]*(?<=[^\s$\\])\$(?!\d)                            # $x$, and not the $5 of a price
    | ^[ \t]*\|[^\n]*(?:\n[ \t]*\|[^\n]*)+                                          # rows of a table
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
NUMBERED = re.compile(r"^[ \t]*(?:[*_#]+[ \t]*)?(?:step[ \t]*\d+\b|\d+[.)](?=\s))", re.IGNORECASE | re.MULTILINE)
SENTENCE_END = re.compile(r"(?P<word>\S*)[.!?…]+[\"'”’)\]*_]*\s+(?=\S)|[。！？]+[」』”]?(?=\S)")
NO_END = re.compile(r"\(?(?:[A-Za-z]|\d+|e\.g|i\.e|cf|vs|etc|eq|fig|no|approx|Dr|Mr|Mrs|Ms|Prof|St)", re.IGNORECASE)
"""What stands before a full stop that ends no sentence: an abbreviation, an initial, the number of an item."""


def _after(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    return (match.end() for match in pattern.finditer(text))


def _sentences(text: str, separator: str) -> Iterator[int]:
    for match in SENTENCE_END.finditer(text):
        word = match["word"]
        if not (word and NO_END.fullmatch(word) and text[match.end("word")] == "." and "\n" not in match[0]):
            yield match.end()


STEP_RULES: dict[str, Callable[[str, str], Iterator[int]]] = {
    "separator": lambda text, separator: _after(re.compile(re.escape(separator)), text),
    "blank_line": lambda text, separator: _after(re.compile(r"\n(?:[ \t]*\n)+"), text),
    "lines": lambda text, separator: _after(re.compile(r"\n"), text),
    "numbered": lambda text, separator: (match.start() for match in NUMBERED.finditer(text)),
    "sentences": _sentences,
}
"""Name -> the places of (text, separator) at which a new step may begin."""


@dataclass(frozen=True)
class StepRule:
    """Where a step ends: after the separator that the model was trained with, or as one of STEP_RULES says."""

    name: str = "separator"
    separator: str = "\n"
    max_steps: int | None = None
    """Most steps of a text; the last of them has all that is left. None: any number."""

    def __post_init__(self) -> None:
        if self.name not in STEP_RULES:
            raise ValueError(f"Unknown step rule {self.name!r}; known: {', '.join(STEP_RULES)}.")
        if not self.separator:
            raise ValueError("The separator of steps is empty.")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"`max_steps` is {self.max_steps}; it must be at least 1.")


def split_steps(text: str, rule: StepRule | None = None) -> list[tuple[int, int]]:
    """(start, stop) of each step: neighbours that cover the whole text, none of them blank. [] where the text is."""
    rule = rule or StepRule()
    if not text.strip():
        return []
    wholes = [match.span() for match in WHOLE.finditer(text)]
    starts, nearest, end = [0], 0, len(text.rstrip())
    for cut in STEP_RULES[rule.name](text, rule.separator):
        while nearest < len(wholes) and wholes[nearest][1] <= cut:
            nearest += 1
        inside = nearest < len(wholes) and wholes[nearest][0] < cut
        if inside or cut >= end:
            continue
        if text[starts[-1] : cut].strip():
            starts.append(cut)
        elif starts[-1]:  # what is blank belongs to the step before it
            starts[-1] = cut
    starts = starts[: rule.max_steps]
    return list(zip(starts, [*starts[1:], len(text)]))
