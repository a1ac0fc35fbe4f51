"""What this machine has for the processes of a run."""

from __future__ import annotations

import os


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def training_processes() -> int:
    """Of this machine, as torchrun and accelerate say it: what they share its cores and its memory among."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
