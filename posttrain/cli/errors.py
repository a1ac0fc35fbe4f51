"""What ends a command before it began."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_CODE = 2


class UsageError(Exception):
    """Something that was typed cannot be done; the message is a sentence with key, value and remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean ...?", or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
