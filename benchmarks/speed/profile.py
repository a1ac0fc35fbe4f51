"""Where the time of a step goes: torch's profiler over a few steps of one side, its operators in groups, and a chrome trace."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from benchmarks.speed.rows import Steps

PROFILED_STEPS = 2
GROUPS = (
    ("attention", ("flash", "fmha", "attention", "sdpa", "softmax_warp", "efficient")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "lpnorm", "clip_grad")),
    (
        "head and loss",
        (
            "cross_entropy",
            "log_softmax",
            "nll",
            "logsumexp",
            "liger_cross",
            "lm_head",
            "summed_nll",
            "logits",
            "slopes",
            "chunk",
            "rows_kernel",
        ),
    ),
    ("matmul", ("gemm", "cutlass", "matmul", "addmm", "::mm", "bmm", "cublas", "nvjet", "xmma", "sgemm", "linear")),
    ("norm, rope, activation", ("rms_norm", "rmsnorm", "rope", "silu", "swiglu", "rotary", "triton")),
    ("copies", ("memcpy", "memset", "copy_", "_to_copy", "cat", "index", "gather", "scatter", "embedding")),
    (
        "elementwise",
        ("elementwise", "vectorized", "reduce", "mul", "add", "sum", "neg", "sub", "div", "pow", "mean", "rsqrt"),
    ),
)
"""A kernel belongs to the first group one of whose words its name contains. (Names of compiled kernels list what was fused.)"""
ANNOTATION = "Optimizer."  # spans that torch draws around its kernels, on the device's line too


class _Window(TrainerCallback):
    """Profiles `PROFILED_STEPS` steps from the first timed one on, from end to end: batches may be made between two steps."""

    def __init__(self, steps: Steps, device: str) -> None:
        self.first, self.device = steps.first_timed, device
        self.last = self.first + PROFILED_STEPS
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        self.profiler = profile(activities=activities)
        self.wall = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.first:
            self._wait()
            self.profiler.start()
            self.wall = time.perf_counter()
        if state.global_step == self.last:
            self._wait()
            self.wall = time.perf_counter() - self.wall
            self.profiler.stop()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextmanager
def profiled(trainer: Any, steps: Steps, device: str, name: str | None) -> Iterator[None]:
    """Adds the profiler to a trainer where `name` (of the files that are written) is given."""
    if not name or steps.timed < PROFILED_STEPS:
        yield
        return
    window = _Window(steps, device)
    trainer.add_callback(window)
    yield
    text = report(window.profiler, window.wall, device)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{name}.txt").write_text(text, encoding="utf-8")
    window.profiler.export_chrome_trace(f"{name}.trace.json.gz")
    print(text, flush=True)


def report(profiler: Any, wall: float, device: str) -> str:
    """Shares of the wall time by group (idle is what is left), then the operators that take most."""
    times = kernel_times(profiler, device)
    shares: dict[str, float] = defaultdict(float)
    for name, seconds in times.items():
        shares[group_of(name)] += seconds
    busy = sum(shares.values())
    lines = [f"{PROFILED_STEPS} steps, {wall:.3f} s of wall time, {device} busy {busy:.3f} s ({busy / wall:.0%})"]
    shares["idle (wall minus busy)"] = max(wall - busy, 0.0)
    lines += [
        f"  {share:9.4f} s {share / wall:6.1%}  {name}" for name, share in sorted(shares.items(), key=lambda x: -x[1])
    ]
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return "\n".join(lines) + "\n" + profiler.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=70)


def kernel_times(profiler: Any, device: str) -> dict[str, float]:
    """Seconds of each kernel (on CUDA) or operator (on the CPU), its children not counted."""
    times: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        on_device = "CUDA" in str(event.device_type)
        if device == "cuda" and on_device and not event.name.startswith(ANNOTATION):
            times[event.name] += event.time_range.elapsed_us() / 1e6
        elif device == "cpu" and not on_device:
            times[event.name] += event.self_cpu_time_total / 1e6
    return times


def group_of(kernel: str) -> str:
    kernel = kernel.lower()
    return next((group for group, words in GROUPS if any(word in kernel for word in words)), "other")
