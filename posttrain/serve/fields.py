"""The fields of a JSON body: a table says what each one is; what is missing, unknown or out of bounds is a sentence."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import FieldError

Read = Callable[[Any, str], Any]
"""(value, where it stands) -> the checked value."""

REQUIRED = object()


@dataclass(frozen=True)
class Field:
    read: Read
    default: Any = REQUIRED


def read_fields(value: Any, table: Mapping[str, Field], where: str = "the body") -> dict[str, Any]:
    """All fields of the table, with defaults for those left out."""
    if not isinstance(value, dict):
        raise FieldError(f"{where[0].upper()}{where[1:]} is not a JSON object.")
    if unknown := sorted(set(value) - set(table)):
        raise FieldError(f"`{unknown[0][:80]}` is not a field of {where}; known are {', '.join(table)}.")
    read = {}
    for name, entry in table.items():
        if name in value:
            read[name] = entry.read(value[name], f"`{name}` of {where}")
        elif entry.default is REQUIRED:
            raise FieldError(f"`{name}` is missing from {where}.")
        else:
            read[name] = entry.default
    return read


def integer(low: int, high: int) -> Read:
    def read(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise FieldError(f"{where} is not a whole number from {low} to {high}.")
        return value

    return read


def number(low: float, high: float, above: bool = False) -> Read:
    """`above`: the lower bound itself is refused."""

    def read(value: Any, where: str) -> float:
        fits = type(value) in (int, float) and low <= value <= high  # NaN is not, nor a number too large for a float
        if not fits or (above and value == low):
            bound = "above" if above else "from"
            raise FieldError(f"{where} is not a number {bound} {low:g} up to {high:g}.")
        return float(value)

    return read


def boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise FieldError(f"{where} is neither true nor false.")
    return value


def text(longest: int, shortest: int = 0) -> Read:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or not shortest <= len(value) <= longest:
            raise FieldError(f"{where} is not a text of {shortest} to {longest} characters.")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FieldError(f"{where} has half of a surrogate pair, which is no character.") from error
        return value

    return read


def base64_bytes(longest: int) -> Read:
    """Bytes, which JSON does not have; `longest` is their number once they are read."""

    def read(value: Any, where: str) -> bytes:
        try:
            if not isinstance(value, str) or len(value) > 4 * (longest // 3 + 1):
                raise ValueError
            return base64.b64decode(value, validate=True)
        except ValueError as error:  # also those of b64decode, and for characters outside of ASCII
            raise FieldError(f"{where} is not base64 of at most {longest} bytes.") from error

    return read


def identifier(value: Any, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.:\-]{1,200}", value):
        raise FieldError(f"{where} is not a name of 1 to 200 letters, digits, '_', '.', ':' and '-'.")
    return value


def one_of(*choices: str) -> Read:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise FieldError(f"{where} is none of {', '.join(choices)}.")
        return value

    return read


def optional(inner: Read) -> Read:
    return lambda value, where: None if value is None else inner(value, where)


def list_of(inner: Read, longest: int, shortest: int = 0) -> Read:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            raise FieldError(f"{where} is not a list of {shortest} to {longest} entries.")
        return tuple(inner(entry, f"entry {i} of {where}") for i, entry in enumerate(value))

    return read


def object_of(table: Mapping[str, Field]) -> Read:
    return lambda value, where: read_fields(value, table, where)


def any_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(f"{where} is not a JSON object.")
    return value


def token_ids(longest: int, vocabulary: int) -> Read:
    """One to `longest` ids; written out, since prompts are long."""

    def read(value: Any, where: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= longest:
            raise FieldError(f"{where} is not a list of 1 to {longest} token ids.")
        for i, token in enumerate(value):
            if type(token) is not int or not 0 <= token < vocabulary:
                raise FieldError(f"Entry {i} of {where} is not a token id from 0 to {vocabulary - 1}.")
        return tuple(value)

    return read
