"""Words of commands that have options besides those of a method. Complaints are a sentence and exit code 2, everywhere."""

from __future__ import annotations

import argparse
from typing import NoReturn

from posttrain.cli.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].upper()}{message[1:]}. `{self.prog} --help` says what it takes.")


def pairs(words: list[str], option: str) -> dict[str, str]:
    """old=new, several times."""
    found: dict[str, str] = {}
    for word in words:
        old, equals, new = word.partition("=")
        if not (old and equals and new):
            raise UsageError(f"{option} is {word!r}; it takes OLD=NEW, such as question=prompt.")
        found[old] = new
    return found


def own_options(words: list[str], examples: dict[str, str]) -> tuple[dict[str, str | None], list[str]]:
    """(value of each option in `examples`, which stand among the options of a method; the other words)."""
    found: dict[str, str | None] = dict.fromkeys(examples)
    rest, left = [], iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name not in examples:
            rest.append(word)
            continue
        found[name] = value if equals else next(left, "--")
        if found[name].startswith("--"):
            raise UsageError(f"{name} needs a value, such as {examples[name]}.")
    return found, rest
