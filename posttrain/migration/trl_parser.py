"""TrlParser: dataclasses from a command line and a YAML file, as scripts for TRL read them."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser

from posttrain.core.config_file import read_config

FILE_FLAG = "--config"


class TrlParser(HfArgumentParser):
    """HfArgumentParser with `--config FILE`: the file's values are defaults, the command line goes before them."""

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        listed = dataclass_types if isinstance(dataclass_types, Iterable) else [dataclass_types]
        for one in [one for one in listed if one is not None]:
            if any(field.name == "config" for field in dataclasses.fields(one)):
                raise ValueError(f"{one.__name__} has a field `config`, which is the flag of the file; rename it.")
        super().__init__([one for one in listed if one is not None], **options)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """The dataclasses; with `return_remaining_strings` also the words that nobody knows, those of the file first.

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
                raise ValueError(f"The file of options has keys that nobody reads: {' '.join(from_file)}.")
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
