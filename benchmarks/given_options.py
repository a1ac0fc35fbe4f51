"""Options of a config as words of a command line: NAME=VALUE."""

from __future__ import annotations

import json
from typing import Any


def options_of(pairs: list[str]) -> dict[str, Any]:
    """Values are JSON, or text where they are not."""
    made = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            made[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            made[name] = value
    return made
