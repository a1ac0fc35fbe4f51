"""How an option is declared: once, with its documentation. Imports nothing, so that a command line can read it at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any


class OptionHelp(str):
    """The documentation of an option of ours.

    It is the only key of a field's metadata, and the mark of ours: transformers' HfArgumentParser hands all of the metadata to
    argparse, which knows `help` and refuses what it does not know.
    """


class RefusedHelp(OptionHelp):
    """Of an option that is there for its name's sake: another value than its default is refused with this sentence."""


def option(default: Any, help: str) -> Any:
    """A config field with its documentation; a mutable default is copied for each config."""
    metadata = {"help": OptionHelp(help)}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def refused(default: Any, sentence: str) -> Any:
    """A config field that may only have its default."""
    return dataclasses.field(default=default, metadata={"help": RefusedHelp(sentence)})


def values_of(value: float | Sequence[float]) -> list[float]:
    """Of an option that is a number, or one for each epoch."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def by_epoch(value: float | Sequence[float], epoch: float | None) -> float:
    """A number, or that of the epoch in a list; the last one stands for all further epochs."""
    values = values_of(value)
    return values[min(int(epoch or 0), len(values) - 1)]


def is_ours(field: dataclasses.Field) -> bool:
    return isinstance(field.metadata.get("help"), OptionHelp) and not is_refused(field)


def is_refused(field: dataclasses.Field) -> bool:
    return isinstance(field.metadata.get("help"), RefusedHelp)


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


RESUME_WORDS = {"true": True, "auto": True, "yes": True, "false": False, "no": False, "none": False, "null": False}


def resume_request(given: str | bool | None) -> str | bool:
    """What `resume_from_checkpoint` says: True for the newest checkpoint, False for none, or a folder.

    Command lines and files hand over words ("False", "none"), which are no folders.
    """
    return RESUME_WORDS.get(given.lower(), given) if isinstance(given, str) else bool(given)
