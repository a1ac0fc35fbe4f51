"""RunFolder: what a run has left in its output directory, and keeps adding to it."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

from posttrain.core.config_file import parsed
from posttrain.core.secrets import without_secrets
from posttrain.view.errors import NoRunError
from posttrain.view.json_lines import GrowingLines, plain
from posttrain.view.rollout_index import RolloutIndex
from posttrain.view.token_text import TOKENIZER_FILE, TokenText

METRICS_FILE, ALERTS_FILE, SKIPPED_FILE = "metrics.jsonl", "alerts.jsonl", "skipped_steps.jsonl"
"""The trainers' names for them; a test compares."""
OPTIONS_FILE, CARD_FILE = "training_args.json", "README.md"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
SIGNS = (METRICS_FILE, ALERTS_FILE, "rollouts", "checkpoint-*", ".posttrain.lock")
"""A folder with one of these is that of a run."""
OF_MODELS = re.compile(
    r"(.*config|tokenizer.*|vocab|special_tokens_map|.*\.index|trainer_state|all_results|train_results)\.json"
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAX_BYTES = 1 << 20


class RunFolder:
    """One run. Reading is lazy, and safe while the run writes."""

    def __init__(self, path: Path, name: str, tokenizer: Path | None = None) -> None:
        self.path, self.name = path, name
        self.metrics = GrowingLines(path / METRICS_FILE)
        self.alerts = GrowingLines(path / ALERTS_FILE)
        self.skipped = GrowingLines(path / SKIPPED_FILE)
        self.rollouts = RolloutIndex(path)
        self._tokenizer_path = tokenizer
        self._tokenizer: TokenText | None = None
        self._lock = threading.Lock()

    # ---- files -------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[tuple[int, Path]]:
        """By step, the latest last."""
        found = ((CHECKPOINT.fullmatch(path.name), path) for path in self.path.glob("checkpoint-*"))
        return sorted((int(match[1]), path) for match, path in found if match)

    def options(self) -> dict[str, Any] | None:
        """The options of the latest checkpoint."""
        for _, folder in reversed(self.checkpoints()):
            content = _read_mapping(folder / OPTIONS_FILE)
            if content is not None:
                return content
        return None

    def settings(self) -> dict[str, dict[str, Any]]:
        """Configuration files at the top of the folder, by name."""
        found = {}
        for path in sorted([*self.path.glob("*.yaml"), *self.path.glob("*.yml"), *self.path.glob("*.json")]):
            content = None if OF_MODELS.fullmatch(path.name) else _read_mapping(path)
            if content is not None:
                found[path.name] = content
        return found

    def card(self) -> str | None:
        path = self.path / CARD_FILE
        return path.read_text(encoding="utf-8", errors="replace")[:MAX_BYTES] if path.is_file() else None

    def tokenizer(self) -> TokenText | None:
        """That of the run: beside the final weights, in the latest checkpoint, or in the model's own folder."""
        path = self._find_tokenizer()
        with self._lock:
            if path is not None and (self._tokenizer is None or self._tokenizer.path != path):
                self._tokenizer = TokenText(path)
            return self._tokenizer

    def _find_tokenizer(self) -> Path | None:
        if self._tokenizer is not None:
            return self._tokenizer.path
        folders = [self._tokenizer_path, self.path, *(folder for _, folder in reversed(self.checkpoints()))]
        for settings in [self.options() or {}, *self.settings().values()]:
            folders += [_folder_of_model(_value_of(settings, name)) for name in ("model_name_or_path", "model")]
        for folder in folders:
            if folder is not None:
                path = folder if folder.is_file() else folder / TOKENIZER_FILE
                if path.is_file():
                    return path
        return None

    # ---- as JSON -----------------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        self.alerts.refresh()
        self.skipped.refresh()
        return {
            "path": str(self.path),
            "options": self.options(),
            "settings": self.settings(),
            "card": self.card(),
            "alerts": self.alerts.entries[-200:],
            "skipped_steps": len(self.skipped.entries),
            "checkpoints": [step for step, _ in self.checkpoints()],
        }


def open_runs(paths: list[str], tokenizer: str | None = None) -> list[RunFolder]:
    """The runs of these folders; a folder of runs stands for all of them. Raises a NoRunError with what is wrong."""
    folders: list[Path] = []
    for path in paths:
        folders += _runs_at(Path(path))
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    if tokenizer is not None and not ((place := Path(tokenizer)).is_file() or (place / TOKENIZER_FILE).is_file()):
        raise NoRunError(f"--tokenizer {tokenizer}: no {TOKENIZER_FILE} is there.")
    names = _names_of(folders)
    return [RunFolder(f, name, Path(tokenizer) if tokenizer else None) for f, name in zip(folders, names)]


def _runs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise NoRunError(f"{path} {what}; a run is the folder that a trainer has as `output_dir`.")
    if is_run(path):
        return [path]
    inside = sorted(folder for folder in path.iterdir() if folder.is_dir() and is_run(folder))
    if not inside:
        raise NoRunError(
            f"{path} is not the folder of a run: it has no {METRICS_FILE}, no rollouts and no checkpoint, "
            "and neither has a folder in it."
        )
    return inside


def is_run(path: Path) -> bool:
    return any(next(path.glob(sign), None) is not None for sign in SIGNS)


def _names_of(folders: list[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    for parts in range(1, 12):
        names = [os.sep.join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_mapping(path: Path) -> dict[str, Any] | None:
    """A small JSON or YAML file, if there is one and it holds names with values. YAML is read without its tags for objects."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else parsed(text, str(path))
    except (OSError, ValueError, RecursionError):  # it is being written, or is nothing we know
        return None
    return without_secrets(plain(content)) if isinstance(content, dict) else None


def _folder_of_model(model: Any) -> Path | None:
    """Of a local model, or of one of the Hub that this machine has; nothing is downloaded."""
    if not isinstance(model, str) or not model:
        return None
    if Path(model).is_dir() or not HUB_ID.fullmatch(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, TOKENIZER_FILE)
    return Path(found).parent if isinstance(found, str) else None


def _value_of(settings: Any, name: str) -> Any:
    """The first value of that name, however deep."""
    if isinstance(settings, dict):
        if name in settings and not isinstance(settings[name], dict):
            return settings[name]
        return next((v for inner in settings.values() if (v := _value_of(inner, name)) is not None), None)
    return None
