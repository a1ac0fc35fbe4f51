"""What commands print: results as JSON where they are asked for, and no bars of the libraries underneath between the lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def no_bars() -> None:
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


def write_json(path: str, value: Any) -> None:
    """To a file, or for "-" to the standard output."""
    text = json.dumps(value, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
