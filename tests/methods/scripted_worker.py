"""A rollout worker and a weight transfer by TRL's protocols, which play what a script says and remember how they were used."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class ScriptedSample:
    """What TRL's workers put into their buffer."""

    prompt: Any
    completion: Any
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    enqueued_at: float | None = None


def scripted(rng: np.random.Generator, group: int, version: int, advantage: float | None = None) -> ScriptedSample:
    """A prompt of 3 tokens and 2 to 5 more, of which one in the middle is somebody else's where there are 5."""
    written = int(rng.integers(2, 6))
    ids = np.concatenate([np.full(3, 5 + group % 7), rng.integers(10, 90, written)])
    mask = np.arange(len(ids)) >= 3
    if written == 5:
        mask[5] = False
    logps = np.where(mask, rng.uniform(-6, -3, len(ids)), 0).astype(np.float32)
    said = [{"role": "assistant", "content": f"{group}"}]
    advantage = float(rng.normal()) if advantage is None else advantage
    return ScriptedSample(
        said, said, ids, mask.astype(np.int64), logps, advantage, version, group, {"reward": advantage}
    )


class ScriptedWorker:
    """Puts `groups` of `size` samples into its buffer at the start, `ahead` times as many, and after each update."""

    def __init__(
        self, groups: int = 2, size: int = 4, seed: int = 0, sample: Any = scripted, late: int = 0, ahead: int = 1
    ) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.groups, self.size, self.sample, self.late, self.ahead = groups, size, sample, late, ahead
        self.rng, self.calls, self.put, self.version, self.number = np.random.default_rng(seed), [], [], 0, 0

    def _fill(self) -> None:
        for _ in range(self.groups):
            made = [self.sample(self.rng, self.number, self.version - self.late) for _ in range(self.size)]
            self.number += 1
            self.put += made
            for one in made:
                self.rollout_buffer.put(one)
        self.metrics_queue.put({"rollout/inflight": 2.0, "rollout/retry_total": 1.0, "rollout/tok_s": (10.0, 4.0)})

    def start(self) -> None:
        self.calls.append("start")
        for _ in range(self.ahead):
            self._fill()

    def stop(self) -> None:
        self.calls.append("stop")

    def update_model_version(self, model_version: int) -> None:
        self.calls.append(("version", model_version))
        self.version = model_version
        if "start" in self.calls:
            self._fill()

    def check_health(self, stale_after_s: float) -> None:
        self.calls.append(("health", stale_after_s))
        raise RuntimeError("the scripted worker has played everything")


class RecordingTransfer:
    """Keeps a copy of whatever was sent."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sent: list[dict[str, Any]] = []

    def init_weight_transfer(self) -> None:
        self.calls.append("init")

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Any) -> None:
        self.calls.append("send")
        self.sent.append({name: tensor.detach().clone() for name, tensor in iterator})

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")
