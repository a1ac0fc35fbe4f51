"""Counters in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import defaultdict

Labels = tuple[tuple[str, str], ...]

HELP = {
    "requests_total": ("counter", "Requests by route and status."),
    "request_seconds_total": ("counter", "Seconds spent on requests, by route."),
    "generated_tokens_total": ("counter", "Tokens that were sampled."),
    "joined_requests_total": ("counter", "Requests sent again whose work was not done twice."),
    "updates_committed_total": ("counter", "Weight updates that were flipped to."),
    "updates_failed_total": ("counter", "Weight updates that were refused at the commit."),
    "in_flight": ("gauge", "Completions that wait or run."),
    "serving_version": ("gauge", "Version of the weights that serve; -1 for none."),
    "ready": ("gauge", "1 where requests are answered."),
    "engine_silent_seconds": ("gauge", "Since the engine's thread last moved."),
    "uptime_seconds": ("gauge", "Since the start."),
}
"""Every metric there is, without the prefix `posttrain_`."""


class Metrics:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = defaultdict(float)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += amount

    def set(self, name: str, value: float) -> None:
        with self._lock:
            self._values[name, ()] = value

    def text(self) -> str:
        with self._lock:
            values = dict(self._values)
        lines = []
        for name, (kind, sentence) in HELP.items():
            lines += [f"# HELP posttrain_{name} {sentence}", f"# TYPE posttrain_{name} {kind}"]
            for (other, labels), value in sorted(values.items()):
                if other == name:
                    inside = ",".join(f'{key}="{label}"' for key, label in labels)
                    lines.append(f"posttrain_{name}{'{' + inside + '}' if inside else ''} {value:g}")
        return "\n".join(lines) + "\n"
