"""TrlParser: dataclasses from a command line and a YAML file, as scripts for TRL read them."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any, get_args, get_origin

from transformers import HfArgumentParser

from posttrain.core.config_file import read_config
from posttrain.core.options import is_ours

FILE_FLAG = "--config"
SWITCHES = {"true": True, "false": False}


def number_or_name(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


OR_A_NAME: dict[frozenset[type], dict[str, Any]] = {
    frozenset({str, bool}): {"nargs": "?", "const": True, "type": lambda word: SWITCHES.get(word.lower(), word)},
    frozenset({str, float}): {"type": number_or_name},
    frozenset({str, int}): {"type": lambda word: int(word) if word.isdecimal() else word},
}
"""How options of ours are read that are a name, or a switch or a number."""


class TrlParser(HfArgumentParser):
    """HfArgumentParser with `--config FILE`: the file's values are defaults, the command line goes before them."""

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        listed = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for one in [one for one in listed if one is not None]:
            if any(field.name == "config" for field in dataclasses.fields(one)):
                raise ValueError(f"{one.__name__} has a field `config`, which is the flag of the file; rename it.")
        super().__init__([one for one in listed if one is not None], **options)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """The arguments of a dataclass, whose fields keep their types: HfArgumentParser writes into them as it reads them."""
        types = {field: field.type for field in dataclasses.fields(dtype)}
        super()._add_dataclass_arguments(dtype)
        for field, written in types.items():
            field.type = written

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: dataclasses.Field) -> None:
        """As HfArgumentParser, which takes one kind a field, and the wrong one where text is among several of an option of ours."""
        kinds = [kind for kind in get_args(field.type) if kind is not type(None)] if is_ours(field) else []
        if more := OR_A_NAME.get(frozenset(kinds)):  # HfArgumentParser reads the default, too, as a switch or a number
            parser.add_argument(
                f"--{field.name}", f"--{field.name.replace('_', '-')}", default=field.default, **more, **field.metadata
            )
            return
        listed = next((kind for kind in kinds if get_origin(kind) in (list, tuple)), None)
        if listed is not None and field.default is None:
            field = copy.copy(field)
            field.type = list[get_args(listed)[0]]
        HfArgumentParser._parse_dataclass_field(parser, field)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses; with `return_remaining_strings` also the words that are not known, those of the file first.

        With `separate_remaining_strings` the file's and the command line's are two lists.
        """
        words = list(sys.argv[1:] if args is None else args)
        from_file: list[str] = []
        if FILE_FLAG in words:
            place = words.index(FILE_FLAG)
            if place + 1 >= len(words):
                raise ValueError(f"{FILE_FLAG} needs a file.")
            path = words.pop(place + 1)
            words.pop(place)
            values, environment = read_config(path)
            os.environ.update(environment)
            from_file = self.set_defaults_with_config(**values)
        found = self.parse_args_into_dataclasses(args=words, return_remaining_strings=return_remaining_strings)
        if not return_remaining_strings:
            if from_file and fail_with_unknown_args:
                raise ValueError(f"The file of options has unknown keys: {' '.join(from_file)}.")
            return tuple(found)
        *parsed, rest = found
        if separate_remaining_strings:
            return (*parsed, from_file, rest)
        return (*parsed, [*from_file, *rest])

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take values as defaults; those that no dataclass has come back as words of a command line."""
        rest: list[str] = []
        for action in self._actions:
            if action.dest in values:
                action.default = values.pop(action.dest)
                action.required = False
        for name, value in values.items():
            rest += [f"--{name}", str(value)]
        return rest
