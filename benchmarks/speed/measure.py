"""Clocks and memory, the same for both libraries: a callback of transformers' Trainer, which both derive from."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.speed.rows import Steps

LOGGED_NEVER = 10**9
GAVE_UP = 99
"""Exit code of a process whose first step took longer than it was given."""


class StepClock(TrainerCallback):
    """Logs the first steps one by one, then lets the run go without logs and marks the end of each timed step.

    On CUDA a mark is an event: nothing waits for the device before the last one.
    """

    def __init__(self, steps: Steps, device: str, first_step_limit: float | None = None) -> None:
        self.steps, self.device = steps, device
        self.watch = None if first_step_limit is None else threading.Timer(first_step_limit, give_up)
        self.marks: list[Any] = []
        self.began = time.perf_counter()
        self.first_step_after = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reset_peak_memory(self.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.first_step_after = time.perf_counter() - self.began
            if self.watch is not None:
                self.watch.start()
        if state.global_step == self.steps.losses:
            state.logging_steps = LOGGED_NEVER

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.cancel()
        if self.steps.losses < state.global_step <= self.steps.losses + 1 + self.steps.timed:
            self.marks.append(self._mark())

    def _mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Of each timed step."""
        if self.device == "cpu":
            return [after - before for before, after in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in zip(self.marks, self.marks[1:])]


def give_up() -> None:
    """A step cannot be interrupted, the process can; the caller knows the code."""
    os._exit(GAVE_UP)


def reset_peak_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Linux: VmHWM starts again from now


def peak_memory(device: str) -> int:
    """Bytes: allocated on the device, or resident in the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
