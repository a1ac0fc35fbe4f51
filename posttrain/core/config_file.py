"""A YAML file of options: plain values only. No tags, no aliases that multiply, no key twice, no variable that runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
MOST_ALIASES = 100
ENVIRONMENT = "env"
FORBIDDEN = ("LD_", "DYLD_", "PYTHON", "BASH_", "GCONV_", "IFS", "PATH", "HOME", "SHELL", "PERL", "NODE_OPTIONS")
"""Beginnings of variables that change which code is run: a file of options may not set them."""


class ConfigFileError(ValueError):
    """The file cannot be taken; the message names it, the line or key, and what to do."""


def read_config(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(options, environment variables)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigFileError(f"There is no file {path}. Give a YAML file of options, or options as --name value.")
    if file.stat().st_size > MOST_BYTES:
        raise ConfigFileError(
            f"{path} has {file.stat().st_size:,} bytes; a file of options has at most {MOST_BYTES:,}."
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    values = _parsed(text, path)
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigFileError(f"{path} holds no mapping of option names to values, such as `learning_rate: 1e-5`.")
    return values, _environment(values.pop(ENVIRONMENT, None), path)


def _parsed(text: str, path: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader without tags, with a limit on aliases, and with an error for a key that stands twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                self.aliases = getattr(self, "aliases", 0) + 1
                if self.aliases > MOST_ALIASES:
                    raise ConfigFileError(f"{path} uses more than {MOST_ALIASES} aliases; write the values out.")
            event = self.peek_event()
            if getattr(event, "tag", None) is not None:
                line = event.start_mark.line + 1
                raise ConfigFileError(f"{path}, line {line}: the tag {event.tag!r} is not taken; write a plain value.")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            self.flatten_mapping(node)
            seen = set()
            for key, _ in node.value:
                name = self.construct_object(key, deep=True)
                if isinstance(name, str) and name in seen:
                    raise ConfigFileError(f"{path}, line {key.start_mark.line + 1}: `{name}` stands there twice.")
                seen.add(name if isinstance(name, str) else id(key))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        told = " ".join(str(error).split())
        raise ConfigFileError(f"{path} is not YAML: {told[:300]}") from error
    except RecursionError as error:
        raise ConfigFileError(f"{path} is nested too deeply for a file of options.") from error


def _environment(given: Any, path: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigFileError(f"{path}: `{ENVIRONMENT}` is not a mapping of variables to values.")
    for name, value in given.items():
        if name.upper().startswith(FORBIDDEN):
            raise ConfigFileError(
                f"{path}: `{ENVIRONMENT}` sets {name}={value!r}, which decides what code is run. Set it in the shell if you mean "
                "it."
            )
        if isinstance(value, dict | list):
            raise ConfigFileError(
                f"{path}: `{ENVIRONMENT}` sets {name} to a {type(value).__name__}; give text or a number."
            )
    return {name: "" if value is None else str(value) for name, value in given.items()}
