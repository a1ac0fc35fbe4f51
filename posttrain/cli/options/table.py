"""Every option of every method as plain data, from a file that is written when the package is built: `--help` in no time.

`scripts/write_docs.py` (make docs) writes `options.json` from the configs; a test fails when it is stale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

FILE = "options.json"


@dataclass(frozen=True)
class OptionSpec:
    """An option: what may be written for it, and what it does."""

    name: str
    group: str  # "method", "shared", "training" (of transformers), "model", "data", "rewards", "launch"; "refused": see below
    kinds: tuple[str, ...]  # of "bool", "int", "float", "str", "list", "dict", "none"
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    items: tuple[str, ...] = ()  # kinds of the items, where it may be a list


REFUSED = "refused"
"""Group of options of TRL's that may only have their default: known by name, refused by the config with a reason, not shown."""


@dataclass(frozen=True)
class MethodTable:
    """The options of one method by name."""

    method: str
    summary: str
    options: dict[str, OptionSpec]

    @property
    def shown(self) -> list[str]:
        """Names of the options that have a meaning here."""
        return [name for name, spec in self.options.items() if spec.group != REFUSED]


@cache
def _written() -> dict[str, Any]:
    return json.loads(files("posttrain.cli").joinpath(FILE).read_text(encoding="utf-8"))


def method_names() -> dict[str, str]:
    """Method -> what it is."""
    return {name: entry["summary"] for name, entry in _written()["methods"].items()}


@cache
def table_of(method: str) -> MethodTable:
    entry, options = _written()["methods"][method], _written()["options"]
    specs = (_spec(options[number]) for number in entry["options"])
    return MethodTable(method, entry["summary"], {spec.name: spec for spec in specs})


def _spec(one: dict[str, Any]) -> OptionSpec:
    lists = {name: tuple(one[name]) for name in ("kinds", "choices", "items") if name in one}
    return OptionSpec(**{**one, **lists})
