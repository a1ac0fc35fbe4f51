"""What a person sees of a run, and the file that keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer

METRICS_FILE = "metrics.jsonl"


def display_callbacks(trainer: BaseTrainer) -> None:
    """Replace Trainer's own progress bar and printer by ours, and always keep the metrics on disk."""
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(MetricsFile(trainer.args.output_dir))


class MetricsFile(TrainerCallback):
    """One JSON line per log in `metrics.jsonl`. A resumed run first drops what was logged after its checkpoint."""

    def __init__(self, output_dir: str) -> None:
        self.path = Path(output_dir) / METRICS_FILE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() and state.global_step else []
        kept = [line for line in lines if _step_of(line) <= state.global_step]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def _step_of(line: str) -> int:
    """A line that was cut off by a crash belongs to no step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 2**62
