"""What a GPU and a trainer do, seen from outside: kernels, utilisation, and how long publishing holds the trainer."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Iterable
from typing import Any

import torch

from posttrain.trainer.online.async_rollouts import AsyncRollouts

NO_KERNELS = ("Memcpy", "Memset", "Optimizer.", "Context Sync", "Event Sync", "Stream Sync", "Stream Wait")
"""Beginnings of the names of what the profiler shows on the device besides kernels."""
SMI = ["stdbuf", "-oL", "nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """How much time is in at least one of the intervals (begin, end)."""
    total, reached = 0, -(2**63)
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


class KernelWindow:
    """torch's profiler over kernels alone, of all threads and streams. It slows what runs: nothing is timed then."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._began = 0.0

    def start(self) -> None:
        self._profiler.start()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def stop(self) -> dict[str, float]:
        """The share of the time between the first and the last kernel in which at least one ran. Where `traced_s` is
        far from `profiled_s`, the trace was cut short: the profiler's buffers are bounded."""
        profiled = self.seconds
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()
        spans = [
            (one.start_ns(), one.end_ns())
            for one in events
            if one.device_type() == torch.autograd.DeviceType.CUDA and not one.name().startswith(NO_KERNELS)
        ]
        if not spans:
            return {"profiled_s": profiled, "kernels": 0}
        traced = max(end for _, end in spans) - min(begin for begin, _ in spans)
        found = {"any_kernel": union(spans) / traced, "kernels_at_once": sum(e - b for b, e in spans) / union(spans)}
        return found | {"profiled_s": profiled, "traced_s": traced / 1e9, "kernels": len(spans)}


class Utilisation:
    """The driver's own figure, five times a second and beside whatever is timed: the share of its last sample period in
    which at least one kernel ran. None where there is no GPU."""

    def __init__(self) -> None:
        self._smi: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if torch.cuda.is_available():
            self._smi = subprocess.Popen(SMI, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def stop(self) -> float | None:
        if self._smi is None:
            return None
        self._smi.terminate()
        seen = [int(line) for line in self._smi.communicate()[0].split() if line.isdigit()]
        self._smi = None
        return sum(seen) / len(seen) / 100 if seen else None


class HeldClock:
    """For how long `AsyncRollouts` held the trainer after each step, to publish or send weights: thread and stream."""

    def __init__(self) -> None:
        self._thread: list[float] = []
        self._stream: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        plain = AsyncRollouts.on_step_end

        @functools.wraps(plain)
        def watched(*given: Any, **named: Any) -> None:
            begin, start = self._mark(), time.perf_counter()
            plain(*given, **named)
            self._thread.append(time.perf_counter() - start)
            self._stream += [] if begin is None else [(begin, self._mark())]

        AsyncRollouts.on_step_end = watched  # type: ignore[method-assign]

    def _mark(self) -> torch.cuda.Event | None:
        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def figures(self, after: int) -> dict[str, float]:
        """Milliseconds, without the first `after` steps; nothing where nobody writes beside the training."""
        if self._stream:
            self._stream[-1][1].synchronize()
        streams = [begin.elapsed_time(end) for begin, end in self._stream[after:]]
        kinds = {"thread": [1000 * seconds for seconds in self._thread[after:]], "stream": streams}
        found = {}
        for kind, each in kinds.items():
            found |= {f"held_{kind}_ms": sum(each) / len(each), f"held_{kind}_ms_max": max(each)} if each else {}
        return found
