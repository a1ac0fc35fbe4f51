"""argparse whose complaints are ours: a sentence and exit code 2, as of every other command."""

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
