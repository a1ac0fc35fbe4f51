"""What was written for an option, in a file or after a flag, as a value of one of the kinds that it takes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from posttrain.cli.errors import UsageError
from posttrain.cli.options.table import OptionSpec

TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null", "~")
NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")
KIND_NAMES = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list",
    "dict": "a mapping", "none": "null",
}  # fmt: skip
NO = object()
"""The answer of a reader that cannot read it."""


def value_of(spec: OptionSpec, given: Any, where: str) -> Any:
    """`given` as one of the option's kinds; a UsageError that names key, value and remedy otherwise.

    The strictest kind that can read it wins: none, bool, int, float, list, dict, text.
    """
    for kind in ("none", "bool", "int", "float", "list", "dict", "str"):
        if kind in spec.kinds:
            found = READERS[kind](given, spec)
            if found is not NO:
                return _chosen(spec, found, where)
    wanted = " or ".join(KIND_NAMES[kind] for kind in KIND_NAMES if kind in spec.kinds)
    raise UsageError(f"{where}: `{spec.name}` is {_shown(given)}; it takes {wanted}.")


def words_value(spec: OptionSpec, words: list[str], where: str) -> Any:
    """The value of a flag from the words after it: none for a switch, several for a list."""
    if not words:
        if "bool" in spec.kinds:
            return True
        raise UsageError(f"{where}: `--{spec.name}` needs a value.")
    if len(words) == 1:
        return value_of(spec, words[0], where)
    if "list" not in spec.kinds:
        raise UsageError(
            f"{where}: `--{spec.name}` takes one value, and {len(words)} follow it ({' '.join(words)[:80]!r}). Put a value "
            "that has blanks or a pattern (*) in quotes."
        )
    return value_of(spec, words, where)


def _chosen(spec: OptionSpec, value: Any, where: str) -> Any:
    if spec.choices and isinstance(value, str) and value not in spec.choices and "dict" not in spec.kinds:
        raise UsageError(f"{where}: `{spec.name}` is {value!r}; it takes one of {', '.join(spec.choices)}.")
    return value


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _none(given: Any, spec: OptionSpec) -> Any:
    if spec.default in NONE and isinstance(given, str):
        return NO  # "none" is a name to this option, as it is to `report_to`
    return None if given is None or (isinstance(given, str) and given.lower() in NONE) else NO


def _bool(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, bool):
        return given
    text = given.lower() if isinstance(given, str) else str(given) if given in (0, 1) and type(given) is int else ""
    numbers = "int" in spec.kinds or "float" in spec.kinds
    if text in TRUE and not (numbers and text == "1"):
        return True
    return False if text in FALSE and not (numbers and text == "0") else NO


def _int(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, bool):
        return NO
    if isinstance(given, str) and NUMBER.fullmatch(given):
        given = float(given) if re.search("[.eE]", given) else int(given)
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return given if isinstance(given, int) else NO


def _float(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, bool):
        return NO
    if isinstance(given, str):  # YAML 1.1 reads 1e-5 as text
        if given.lower() in ("inf", "-inf"):
            return float(given)
        given = (float(given) if re.search("[.eE]", given) else int(given)) if NUMBER.fullmatch(given) else NO
    return given if isinstance(given, int | float) and not math.isnan(given) else NO


def _str(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, str):
        return given
    # A number in YAML that is meant as text, such as a revision or a name: only where nothing else is taken.
    return str(given) if type(given) in (int, float) and set(spec.kinds) <= {"str", "none"} else NO


def _list(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, str):
        if given.startswith("["):
            given = _from_json(given)
        elif "str" in spec.kinds:
            return NO  # one name is text to an option that takes either
        else:
            given = given.split(",") if "," in given else [given]
    if not isinstance(given, list):
        return NO
    found = [_item(spec, item) for item in given]
    return NO if any(item is NO for item in found) else found


def _item(spec: OptionSpec, item: Any) -> Any:
    kinds = spec.items or ("str",)
    for kind in ("none", "bool", "int", "float", "dict", "str"):
        if kind in kinds:
            found = READERS[kind](item, OptionSpec(spec.name, spec.group, kinds, None, ""))
            if found is not NO:
                return found
    return NO


def _dict(given: Any, spec: OptionSpec) -> Any:
    if isinstance(given, str) and given.startswith("{"):
        given = _from_json(given)
    return given if isinstance(given, dict) else NO


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return NO


READERS: dict[str, Callable[[Any, OptionSpec], Any]] = {
    "none": _none, "bool": _bool, "int": _int, "float": _float, "list": _list, "dict": _dict, "str": _str,
}  # fmt: skip
