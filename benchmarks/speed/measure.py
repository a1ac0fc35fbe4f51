"""Clocks and memory, the same for both libraries: a callback of transformers' Trainer, which both derive from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.speed.rows import Steps

LOGGED_NEVER = 10**9
GAVE_UP, OUT_OF_TIME = 99, 98
"""Exit codes of a process whose first step, or one of whose items, took longer than it was given."""


class StepClock(TrainerCallback):
    """Logs the first steps one by one, then (but for `logs_all`) lets the run go without logs; marks the end of each timed step.

    On CUDA a mark is an event: nothing waits for the device before the last one.
    """

    def __init__(
        self, steps: Steps, device: str, first_step_limit: float | None = None, logs_all: bool = False
    ) -> None:
        self.steps, self.device, self.logs_all = steps, device, logs_all
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
        if state.global_step == self.steps.losses and not self.logs_all:
            state.logging_steps = LOGGED_NEVER

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.watch is not None:
            self.watch.cancel()
        if self.steps.first_timed <= state.global_step <= self.steps.first_timed + self.steps.timed:
            self.marks.append(self._mark())

    def _mark(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter(), time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> list[float]:
        """Of each timed step."""
        if self.device == "cpu":
            return [after[0] - before[0] for before, after in zip(self.marks, self.marks[1:])]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in zip(self.marks, self.marks[1:])]

    def processor_seconds(self) -> list[float]:
        """Of each timed step, on a CPU: what other programs of the machine take is not in it."""
        if self.device != "cpu":
            return []
        return [after[1] - before[1] for before, after in zip(self.marks, self.marks[1:])]


def give_up(code: int = GAVE_UP) -> None:
    """A step cannot be interrupted, the process can; the caller knows the code."""
    os._exit(code)


@contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Ends the process when the block takes longer; the parent runs the next item in another one."""
    watch = threading.Timer(seconds or 0.0, give_up, [OUT_OF_TIME])
    watch.daemon = True
    if seconds is not None:
        watch.start()
    try:
        yield
    finally:
        watch.cancel()


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
