"""What is known about optimizer steps that were not taken because a gradient or a loss was not finite."""

from __future__ import annotations

import logging
from pathlib import Path

from posttrain.trainer.checkpoints.run_state import RunState
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.trainer.step.optimizer import FiniteSteps

logger = logging.getLogger(__name__)

FILE = "skipped_steps.jsonl"


class NonFiniteTraining(RuntimeError):
    """Too many steps in a row had a gradient that was not finite."""


class SkippedSteps:
    """Counts, records the rows of, and after `limit` in a row ends a run whose gradients are not finite."""

    def __init__(self, output_dir: str, limit: int, writes: bool) -> None:
        self.path = Path(output_dir) / FILE
        self.file = StepFile(self.path)
        self.limit = limit
        self.writes = writes
        self._rows_of_the_streak: list[int] = []

    def begin(self, step: int) -> None:
        """A run that continues at `step` keeps the records up to it; a new one has none."""
        if self.writes and self.path.exists():
            self.file.begin(step)
        self._rows_of_the_streak = []

    def settle(self, finite: FiniteSteps | None, state: RunState, wait: bool = False) -> None:
        """Take note of steps whose flag has arrived from the device; end the run after too many in a row."""
        if finite is not None:
            for (step, rows), was_skipped in finite.finished(wait):
                self.record(step, rows, was_skipped, state)

    def record(self, step: int, rows: list[int], was_skipped: bool, state: RunState) -> None:
        if not was_skipped:
            state.skipped_in_a_row = 0
            self._rows_of_the_streak = []
            return
        state.skipped_in_a_row += 1
        state.skipped_total += 1
        state.skipped_since_log += 1
        self._rows_of_the_streak += rows
        logger.warning(f"Step {step} was not taken: its loss or gradient was not finite. Its rows are in {self.path}.")
        if self.writes:
            self.file.append(step, {"rows": rows})
        if state.skipped_in_a_row >= self.limit:
            raise NonFiniteTraining(
                f"{state.skipped_in_a_row} optimizer steps in a row had a loss or gradient that was not finite, up to step {step}. "
                f"None of them was applied and no checkpoint holds their result. Rows of these steps: "
                f"{sorted(set(self._rows_of_the_streak))[:20]} (all in {self.path}). Look at these rows first; then try a lower "
                "learning rate, or float32 (`bf16=False`)."
            )

    def correction(self, state: RunState, step: int) -> float:
        """Factor from a mean over all steps since the last log to one over the steps that were taken."""
        since = step - state.last_logged_step
        taken = since - state.skipped_since_log
        state.skipped_since_log, state.last_logged_step = 0, step
        return since / taken if 0 < taken < since else 1.0
