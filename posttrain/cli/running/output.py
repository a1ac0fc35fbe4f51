"""What commands print: results as JSON where they are asked for, and no bars of the libraries underneath between the lines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from posttrain.cli.errors import UsageError


def no_bars() -> None:
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def ready_to_write(path: str, option: str) -> None:
    """Before any work: make the folder of a file, and say so where the file cannot be written. "-" is the standard output."""
    if path == "-":
        return
    file = Path(path).expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option}: the folder {file.parent} cannot be made ({error.strerror}).") from error
    if file.is_dir():
        raise UsageError(f"{option}: {path} is a folder; name a file.")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{option}: {path} cannot be written (no permission).")


def writable_folder(path: str, option: str) -> Path:
    """Before any work: a folder for files, made where it is not there."""
    folder = Path(path).expanduser()
    ready_to_write(str(folder / "file"), option)
    return folder


def write_json(path: str, value: Any) -> None:
    """To a file, whose folder is made, or for "-" to the standard output."""
    text = json.dumps(value, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    ready_to_write(path, "--json")
    Path(path).expanduser().write_text(text, encoding="utf-8")
