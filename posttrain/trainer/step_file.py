"""StepFile: JSON lines about the steps of a run, which a resumed run continues where its checkpoint was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NO_STEP = 2**62


class StepFile:
    """One JSON object per line, each with the `step` it speaks about."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> None:
        """Start the file anew, or, for a run that goes on at `step`, drop what was written after that step."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() and step else []
        kept = [line for line in lines if _step_of(line) <= step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def append(self, step: int, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **{name: _json_ready(value) for name, value in entry.items()}}) + "\n")


def _json_ready(value: Any) -> Any:
    """JSON knows no NaN and no infinity; they become null, so that every reader can read the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _step_of(line: str) -> int:
    """A line that was cut off by a crash belongs to no step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return NO_STEP
