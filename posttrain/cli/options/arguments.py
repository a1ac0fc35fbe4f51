"""The words of a train command and its file as options with values: defaults < file < flags, each with where it came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from posttrain.cli.errors import UsageError, as_usage_error, nearest
from posttrain.cli.options.run import ALIASES
from posttrain.cli.options.table import MethodTable, OptionSpec, method_names, table_of
from posttrain.cli.options.values import value_of, words_value
from posttrain.core.config_file import read_config

METHOD_KEY = "method"
"""A file may name its method, as the one that a run leaves behind does."""


@dataclass
class RunConfig:
    """What was asked for. `values` holds only options that were given; `origin` says where each was."""

    method: str
    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    file: str | None = None

    @property
    def table(self) -> MethodTable:
        return table_of(self.method)

    def get(self, name: str) -> Any:
        """The value of an option, or its default."""
        return self.values[name] if name in self.values else self.table.options[name].default

    def group(self, *groups: str) -> dict[str, Any]:
        """Given options of some groups."""
        return {name: value for name, value in self.values.items() if self.table.options[name].group in groups}

    def where(self, name: str) -> str:
        """For a message about an option's value."""
        return f"{self.origin[name]}, `{name}`" if name in self.origin else f"`{name}`"


def parse(method: str, words: list[str]) -> RunConfig:
    """The options of a command. UsageError for everything that it does not know."""
    table = table_of(method)
    files, flags = split(words)
    if len(files) > 1:
        raise UsageError(
            f"There are two files of options, {files[0]} and {files[1]}; give one, and the rest as --name value."
        )
    config = RunConfig(method, file=files[0] if files else None)
    if files:
        _take_file(config, table, files[0])
    for name, following in flags:
        spec, negated = _flag(table, name)
        if negated and following:
            raise UsageError(f"--{name} takes no value, and {following[0]!r} follows it.")
        value = False if negated else words_value(spec, following, "The command line")
        _set(config, spec, value, "The command line")
    return config


def split(words: list[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(files, [(flag without dashes, the words after it)])."""
    files: list[str] = []
    flags: list[tuple[str, list[str]]] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            if flags:
                raise UsageError(f"{word!r} follows no option. Give the file of options first, then --name value.")
            files.append(word)
            continue
        name, has_value, value = word[2:].partition("=")
        if name == "config":
            files.append(value if has_value else left.pop(0) if left else "")
            continue
        following = [value] if has_value else []
        while not has_value and left and not left[0].startswith("--"):
            following.append(left.pop(0))
        flags.append((name, following))
    return files, flags


def known_name(name: str) -> str:
    """An option's own name, of one with dashes or of an alias."""
    plain = name.replace("-", "_")
    return ALIASES.get(plain, plain)


def _flag(table: MethodTable, name: str) -> tuple[OptionSpec, bool]:
    """(option, whether the flag negates it)."""
    plain = known_name(name)
    if plain in table.options:
        return table.options[plain], False
    if plain.startswith("no_") and "bool" in getattr(table.options.get(plain[3:]), "kinds", ()):
        return table.options[plain[3:]], True
    raise UsageError(f"posttrain {table.method} has no option --{name}.{_hint(table, plain)}")


def _hint(table: MethodTable, name: str) -> str:
    others = [method for method in method_names() if name in table_of(method).options]
    if others:
        return f" It is an option of {', '.join(others)}."
    return nearest(name, [*table.options, *ALIASES]) or f" `posttrain {table.method} --help` lists them."


def _take_file(config: RunConfig, table: MethodTable, path: str) -> None:
    values, config.environment = as_usage_error(lambda: read_config(path))
    named = values.pop(METHOD_KEY, config.method)
    if named != config.method:
        raise UsageError(f"{path} is for `posttrain {named}`; the command is `posttrain {config.method}`.")
    for key, given in values.items():
        name = known_name(key)
        if name not in table.options:
            raise UsageError(
                f"{path} sets `{key}`, an unknown option of posttrain {config.method}.{_hint(table, name)}"
            )
        spec = table.options[name]
        if name in config.origin:
            raise UsageError(f"{path} sets `{name}` under two names; leave one of them out.")
        _set(config, spec, value_of(spec, given, path), path)


def _set(config: RunConfig, spec: OptionSpec, value: Any, where: str) -> None:
    config.values[spec.name], config.origin[spec.name] = value, where


def config_named(words: list[str], command: str) -> RunConfig:
    """METHOD CONFIG.yaml --options, where the file may name the method instead."""
    if words and words[0] in method_names():
        return parse(words[0], words[1:])
    if not words or words[0].startswith("--"):
        raise UsageError(
            f"Name a method ({', '.join(method_names())}) or a file of options that has the key `{METHOD_KEY}`."
        )
    method = as_usage_error(lambda: read_config(words[0]))[0].get(METHOD_KEY)
    if method not in method_names():
        raise UsageError(
            f"{words[0]} does not name its method. Write `posttrain {command} METHOD {words[0]}`, or the key `{METHOD_KEY}` into "
            "the file."
        )
    return parse(method, words)
