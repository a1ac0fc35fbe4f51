"""What ends a command before it began."""

from __future__ import annotations

import difflib
import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

EXIT_CODE = 2
PACKAGE = str(Path(__file__).resolve().parents[1])
T = TypeVar("T")


class UsageError(Exception):
    """Something that was typed cannot be done; the message is a sentence with key, value and remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ " Did you mean ...?", or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def as_usage_error(step: Callable[[], T]) -> T:
    """`step()`, where a ValueError (or alike) of our own is a sentence for the user; that of other code keeps its traceback."""
    try:
        return step()
    except json.JSONDecodeError as error:
        raise UsageError(f"An option is not valid JSON: {error} in {error.doc[:80]!r}.") from error
    except (ValueError, TypeError, ImportError, OSError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(PACKAGE):
            raise UsageError(str(error)) from error
        raise
