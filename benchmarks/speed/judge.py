"""The reward of the GRPO rows. It imports nothing, since rewards may run in processes of their own."""

from __future__ import annotations

import os
import time
from typing import Any

LOG_VARIABLE = "SPEED_REWARD_LOG"
"""Names a file to which each call adds a line: completions judged, seconds it took."""


def shortness(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Short completions are better, by the ids also where all are equally long; the text is looked at, as rewards do.

    Because it goes with the length, the loss of a step is not 0, though the ratios are 1: sum(-A * length) / sum(length).
    """
    start = time.perf_counter()
    values = [
        -len(ids) / 256 - 0.013 * (sum(ids[:8]) % 11) + 0.001 * (text.count("7") % 5)
        for text, ids in zip(completions, completion_ids)
    ]
    if path := os.environ.get(LOG_VARIABLE):
        with open(path, "a", encoding="utf-8") as log:
            log.write(f"{len(values)} {time.perf_counter() - start}\n")
    return values
