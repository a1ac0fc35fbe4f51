"""What a run was asked for, beside its results: `posttrain.yaml`, which starts it again, and `run.json` with the versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.cli.arguments import RunConfig

CONFIG_FILE, RECORD_FILE = "posttrain.yaml", "run.json"
SECRET = ("token", "secret", "password", "api_key")
PACKAGES = ("posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "vllm", "deepspeed")


def write_record(folder: Path, config: RunConfig, command: list[str]) -> None:
    """Both files. Values of secrets are left out; an older run.json keeps its entries: one for each start."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / CONFIG_FILE, config_text(config))
    starts = read_starts(folder)
    starts.append({"command": shlex.join(_without_secrets(command)), "time": _now(), "versions": versions()})
    _write(folder / RECORD_FILE, json.dumps({"method": config.method, "starts": starts}, indent=1) + "\n")


def config_text(config: RunConfig) -> str:
    import yaml

    given = {name: _plain(value) for name, value in config.values.items() if not is_secret(name)}
    given.pop("fresh", None)  # of one start: the file, given again, continues this run
    told = {"method": config.method, **given}
    if config.environment:
        told["env"] = {name: value for name, value in config.environment.items() if not is_secret(name)}
    return (
        "# posttrain METHOD THIS_FILE starts the run again. Only what was given; all else is a default.\n"
        + yaml.safe_dump(told, sort_keys=False, allow_unicode=True)
    )


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
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def is_secret(name: str) -> bool:
    return any(name.lower().endswith(word) for word in SECRET)


def _without_secrets(words: list[str]) -> list[str]:
    kept: list[str] = []
    hides = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hides and not word.startswith("--"):
            word = "..."
        hides = word.startswith("--") and is_secret(name)
        kept.append(f"{name}=..." if hides and equals else word)
    return kept


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
