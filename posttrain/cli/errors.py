"""What ends a command before it began."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from posttrain.methods.table import PLANNED

EXIT_CODE = 2


class UsageError(Exception):
    """Something that was typed cannot be done; the message is a sentence with key, value and remedy."""


def planned(name: str) -> str | None:
    """Of a method that is to come: the sentence that says so."""
    title, instead = PLANNED.get(name.lower().replace("-", "_"), (None, None))
    return None if title is None else f"{title} is planned and not there yet. {instead}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean ...?", or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
