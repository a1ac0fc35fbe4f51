"""What a run was asked for, beside its results: `posttrain.yaml`, which starts it again, and `run.json` with the versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.secrets import HIDDEN, hidden_text, known_secrets, without_secrets, write_whole

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig

CONFIG_FILE, RECORD_FILE = "posttrain.yaml", "run.json"
PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "vllm", "deepspeed")


def write_record(folder: Path, config: RunConfig, command: list[str]) -> None:
    """Both files, without secrets and for their owner only; an older run.json keeps its entries: one for each start."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG_FILE, config_text(config))
    starts = read_starts(folder)
    starts.append({"command": command_text(config, command), "time": _now(), "versions": versions()})
    write_whole(folder / RECORD_FILE, json.dumps({"method": config.method, "starts": starts}, indent=1) + "\n")


def config_text(config: RunConfig) -> str:
    import yaml

    given = {name: _plain(value) for name, value in config.values.items()}
    given.pop("fresh", None)  # of one start: the file, given again, continues this run
    record = {"method": config.method, **given} | ({"env": config.environment} if config.environment else {})
    kept, left_out = _split(record, without_secrets(record))
    return (
        "# posttrain METHOD THIS_FILE starts the run again. Only what was given; all else is a default.\n"
        + "".join(
            f"# {name} was given and is left out, because it holds a secret: give it again.\n" for name in left_out
        )
        + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    )


def _split(given: dict[str, Any], shown: dict[str, Any], above: str = "") -> tuple[dict[str, Any], list[str]]:
    """(what is the same in both, names of the rest): a value with a hole in it would be another value."""
    kept, left_out = {}, []
    for (name, value), (shown_name, masked) in zip(given.items(), shown.items()):
        if name != shown_name:
            left_out.append(f"{above}{shown_name}")
        elif isinstance(value, dict):
            kept[name], inner = _split(value, masked, f"{above}{name}.")
            left_out += inner
        elif value == masked:
            kept[name] = value
        else:
            left_out.append(f"{above}{name}")
    return kept, left_out


def command_text(config: RunConfig, words: list[str]) -> str:
    """A command for a shell, with `(hidden)` in the place of the secrets among its words."""
    known = known_secrets(config.values)
    short = {str(value) for name, value in config.values.items() if without_secrets({name: value})[name] == HIDDEN}
    shown = (f"{word.split('=', 1)[0]}={HIDDEN}" if word.partition("=")[2] in short else word for word in words)
    return shlex.join(HIDDEN if word in short else hidden_text(word, known) for word in shown)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    file = folder / RECORD_FILE
    if not file.exists():
        return []
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["starts"])
    except (ValueError, KeyError, TypeError):
        file.rename(file.with_suffix(".damaged.json"))
        return []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    return found | {name: version for name in PACKAGES if (version := version_of(name))}


def version_of(package: str, otherwise: str = "") -> str:
    """The version that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
