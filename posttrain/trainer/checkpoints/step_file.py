"""StepFile: JSON lines about the steps of a run, which a resumed run continues where its checkpoint was."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.core.faults import fault_point

logger = logging.getLogger(__name__)

NO_STEP = 2**62


class StepFile:
    """One JSON object per line, each with the `step` it speaks about."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unwritten: list[str] = []

    def begin(self, step: int, comes_again: Callable[[dict[str, Any]], bool] = lambda entry: False) -> None:
        """Start the file anew, or, for a run that continues at `step`, drop what was written after that step.

        Entries of which `comes_again` is true are dropped too: what is written when a run ends or stops.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.lines() if step else []
        kept = [line for line in lines if _step_of(line, comes_again) <= step]
        anew = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")  # a crash in here must not cost the history
        text = "".join(f"{line}\n" for line in kept)
        try:
            anew.write_text(text, encoding="utf-8")
            os.replace(anew, self.path)
        except OSError:
            anew.unlink(missing_ok=True)
            self._truncate_in_place(text)

    def _truncate_in_place(self, text: str) -> None:
        """Without room for a second file: the same bytes or fewer, in the place where they are."""
        content = text.encode()
        if self.path.exists():
            with open(self.path, "r+b", buffering=0) as file:
                file.write(content)
                file.truncate(len(content))

    def append(self, step: int, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, **{name: _json_ready(value) for name, value in entry.items()}})
        self._unwritten.append(f"{line}\n")
        fault_point("log")
        try:
            self._write_lines()
        except OSError as error:  # a full disk must not end a run; the lines are kept and tried again with the next one
            if len(self._unwritten) == 1:
                logger.warning(
                    f"{self.path} could not be written ({error.strerror}); its lines are kept in memory for now."
                )
        fault_point("log.after")

    def _write_lines(self) -> None:
        """All lines or none: half a line would spoil the next."""
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            content = "".join(self._unwritten).encode()
            if file.write(content) != len(content):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten = []

    def lines(self) -> list[str]:
        """What has been written. A crash may have left bytes that are not text; they belong to a line that will be dropped."""
        return self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else []


def _json_ready(value: Any) -> Any:
    """JSON knows no NaN and no infinity; they become null, so that every reader can read the file."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _step_of(line: str, comes_again: Callable[[dict[str, Any]], bool]) -> int:
    """A line that was cut off by a crash belongs to no step."""
    try:
        entry = json.loads(line)
        return NO_STEP if comes_again(entry) else int(entry["step"])
    except (ValueError, KeyError, TypeError):
        return NO_STEP
