"""What the server asks of an engine: vLLM's (`vllm_engine`), or another that can do the same.

An engine is plain and synchronous and used by one thread only (`engine_thread`), which keeps the versions straight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..wire.payload import ITEM_BYTES, TensorSpec
from .shown_images import ShownImages

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
"""The dtypes of the wire format as torch knows them."""
STOP, LENGTH, ABORTED, ERROR = "stop", "length", "aborted", "error"
"""Finish reasons. ABORTED: weights changed that the request does not accept, or the deadline passed."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the names and meanings are those of the trainer's `SamplingParams`."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    regex: str | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Accepted:
    """The versions that a request takes, both ends included."""

    lowest: int
    highest: int

    def takes(self, version: int | None) -> bool:
        return version is not None and self.lowest <= version <= self.highest


@dataclass(frozen=True)
class GenerateJob:
    job_id: str
    ids: tuple[int, ...]
    sampling: Sampling
    accepted: Accepted
    top_logprobs: int = 0
    base_weights: bool = False  # without the adapter that serves
    shown: ShownImages | None = None  # the images that `ids` has tokens for
    noise: tuple[int, int] | None = None  # (where it begins, number of the first token), of engines that count it


@dataclass(frozen=True)
class ScoreJob:
    """Log-probs of the tokens from number `start` on (at least 1: the first token has none)."""

    job_id: str
    ids: tuple[int, ...]
    start: int
    top_k: int
    accepted: Accepted
    base_weights: bool = False


Job = GenerateJob | ScoreJob


@dataclass
class Progress:
    """What an engine says of a job after a step: everything so far."""

    job_id: str
    ids: Sequence[int]
    finish_reason: str | None = None  # None: still running
    logps: Sequence[float] = ()  # of each id; filled when finished
    top: Sequence[Sequence[tuple[int, float]]] = ()  # the most likely tokens at each place, if asked for
    stop_reason: int | str | None = None
    error: str | None = None  # why it cannot be run, where it ended so: finish reason ERROR
    policy_logps: Sequence[float] = ()  # softmax(logits / temperature), where the engine knows them and they are others


@dataclass
class Outcome:
    """The end of a job. `spans`: (first token, one past the last, version) for all tokens, in order."""

    job_id: str
    ids: list[int]
    logps: list[float]
    finish_reason: str
    spans: list[tuple[int, int, int]]
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    stop_reason: int | str | None = None
    error: str | None = None
    version: int | None = None  # that began the job
    policy_logps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class AdapterRef:
    """A LoRA adapter of one version, in a folder."""

    number: int  # unique in this process, from 1
    name: str
    version: int
    path: str


@dataclass(frozen=True)
class EngineInfo:
    model: str
    context_length: int
    vocabulary: int
    dtype: str
    logprobs_mode: str
    device: str
    engine: str
    world_size: int = 1
    capabilities: dict[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    adapter_modules: tuple[str, ...] = ()  # the modules that adapters may change
    images: int = 0  # most in a prompt; 0: it is shown none


@dataclass(frozen=True)
class CacheUse:
    """Of keys and values, after a step."""

    used_share: float  # of the pages that there is memory for
    preempted: int  # running completions that were put back in the queue, since the start


class Engine(Protocol):
    info: EngineInfo
    cache_use: CacheUse | None  # None: this engine does not tell

    def add(self, job: Job, adapter: AdapterRef | None) -> None:
        """Queue a job; any error means that this job cannot be run, and others can."""

    def step(self) -> list[Progress]:
        """One step of everything queued; what moved, finished jobs last seen here."""

    def abort(self, job_ids: Sequence[str]) -> None: ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights; raises where one does not fit. What is left then is not to be trusted."""

    def known_tensors(self) -> dict[str, TensorSpec] | None:
        """By name, every tensor that a version must bring, or None where the model's folder has no weights."""

    def optional_tensors(self) -> frozenset[str]:
        """Names that a version may bring or leave out (tied weights, and what is not a parameter)."""

    def initial_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """The weights that were loaded at the start, read again."""

    def reset_prefix_cache(self, running: bool) -> bool:
        """Forget cached keys, values and encoded images; with `running`, also those of running jobs, which are computed again."""

    def add_adapter(self, adapter: AdapterRef) -> None: ...

    def remove_adapter(self, adapter: AdapterRef) -> None: ...

    def sleep(self, level: int) -> str | None:
        """Free memory; None, or the sentence that says why nothing was freed."""

    def wake(self, tags: Sequence[str] | None) -> None: ...

    def close(self) -> None: ...
