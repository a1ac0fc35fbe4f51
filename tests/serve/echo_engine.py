"""An engine without a model: token number i of every completion is the first number of tensor i (taken in turn).

So a completion shows which weights it was made of, tensor by tensor: with tensors that are all filled with the number
of their version, a mixture of versions cannot hide. One token per job and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from posttrain.serve.engine.protocol import ERROR, LENGTH, STOP, AdapterRef, EngineInfo, Job, Progress, ScoreJob
from posttrain.serve.wire.payload import TensorSpec

VOCABULARY = 100_000


@dataclass
class _Writing:
    job: Job
    shift: int
    ids: list[int] = field(default_factory=list)


class EchoEngine:
    cache_use = None

    def __init__(
        self,
        weights: dict[str, Tensor],
        context_length: int = 4096,
        step_seconds: float = 0.0,
        on_load: Callable[[str], None] = lambda name: None,
        device: str = "cpu",
        images: int = 0,
        expands_to: int | None = None,
    ) -> None:
        """`images`: most in a prompt. `expands_to`: so many tokens are made of a prompt that has some; None: as many as it has."""
        self.shown: list[list[int]] = []  # ids of each prompt with images, as a model is given them
        self._expands_to = expands_to
        self.weights = {name: tensor.to(device, copy=True) for name, tensor in weights.items()}
        self._initial = {name: tensor.clone() for name, tensor in weights.items()}
        self._jobs: dict[str, _Writing] = {}
        self._step_seconds, self._on_load = step_seconds, on_load
        self.started: list[str] = []  # every job that was ever begun, to count those that ran twice
        self.asleep = 0
        can = {
            "weights": True,
            "adapters": True,
            "sleep": True,
            "score": True,
            "structured": False,
            "images": images > 0,
        }
        self.info = EngineInfo(
            "echo",
            context_length,
            VOCABULARY,
            "float32",
            "processed_logprobs",
            device,
            "echo",
            capabilities=can,
            adapter_modules=("q", "q_proj"),
            images=images,
        )

    def add(self, job: Job, adapter: AdapterRef | None) -> None:
        if len(job.ids) >= self.info.context_length:
            raise ValueError(f"A prompt of {len(job.ids)} tokens leaves no room in {self.info.context_length}.")
        self.started.append(job.job_id)
        if getattr(job, "shown", None) is not None:
            self.shown.append(job.shown.vllm_prompt(job.ids)["prompt_token_ids"])
        self._jobs[job.job_id] = _Writing(job, adapter.version if adapter else 0)

    def step(self) -> list[Progress]:
        time.sleep(self._step_seconds)
        moved = []
        for writing in list(self._jobs.values()):
            progress = self._score(writing.job) if isinstance(writing.job, ScoreJob) else self._write(writing)
            if progress.finish_reason is not None:
                del self._jobs[writing.job.job_id]
            moved.append(progress)
        return moved

    def _write(self, writing: _Writing) -> Progress:
        job = writing.job
        if job.shown is not None and self._expands_to is not None:
            return Progress(job.job_id, [], ERROR, error=job.shown.difference(job.ids, [0] * self._expands_to))
        tensors = list(self.weights.values())
        writing.ids.append(int(tensors[len(writing.ids) % len(tensors)].flatten()[0]) + writing.shift)
        room = min(job.sampling.max_tokens, self.info.context_length - len(job.ids))
        stopped = writing.ids[-1] in job.sampling.stop_ids
        reason = STOP if stopped else LENGTH if len(writing.ids) >= room else None
        logps = [-0.5] * len(writing.ids)
        return Progress(job.job_id, list(writing.ids), reason, logps, stop_reason=writing.ids[-1] if stopped else None)

    def _score(self, job: ScoreJob) -> Progress:
        number = float(next(iter(self.weights.values())).flatten()[0])
        ids = job.ids[job.start :]
        return Progress(job.job_id, ids, LENGTH, [-number] * len(ids), [[(0, -number)] * job.top_k for _ in ids])

    def abort(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._jobs.pop(job_id, None)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self._on_load(name)
            self.weights[name].copy_(tensor)

    def known_tensors(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in self.weights.items()}

    def optional_tensors(self) -> frozenset[str]:
        return frozenset()

    def initial_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self._initial.items()

    def reset_prefix_cache(self, running: bool) -> bool:
        return True

    def add_adapter(self, adapter: AdapterRef) -> None:
        pass

    def remove_adapter(self, adapter: AdapterRef) -> None:
        pass

    def sleep(self, level: int) -> str | None:
        self.asleep = level
        return None

    def wake(self, tags: Sequence[str] | None) -> None:
        self.asleep = 0

    def close(self) -> None:
        self._jobs.clear()


def numbered_weights(version: int, names: Sequence[str] = ("a", "b", "c", "d"), size: int = 4) -> dict[str, Tensor]:
    """Tensors that are all filled with the number of their version."""
    return {name: torch.full((size,), float(version)) for name in names}
