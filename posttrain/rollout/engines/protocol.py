"""What a rollout engine is: prompts go in, completions with their log-probs come out, in whatever order they finish.

Noise is a function of (seed, key, sample, number of the token), see `rollout/noise`: a completion does not depend on its
neighbours, on the number of slots, on the order of the prompts or on a restart in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from posttrain.core.sample import ImageSpan

STOP, LENGTH, ERROR = "stop", "length", "error"
"""Finish reasons: a stop id or string; the allowance or the context is used up; this prompt could not be run."""

WROTE_PLACEHOLDER = "The model wrote a token that stands for an image"
"""So begins the error of such a completion, where the engine cannot forbid the token."""

AUTO, FP8 = "auto", "fp8"
ROLLOUT_DTYPES = (AUTO, FP8)
"""What the native engine keeps keys and values in, or multiplies weights in: the model's dtype, or 8 bits."""

Decode = Callable[[Sequence[int]], str]
"""A detokeniser. Engines know token ids only; the owner of the tokenizer passes one in."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, for all prompts of one session.

    Applied in this order: repetition penalty, logit bias, temperature, then top_k, top_p and min_p.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()  # every id that ends a completion; the id itself belongs to the completion
    stop: tuple[str, ...] = ()  # the token that completes one of these strings is the last one
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    regex: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1: no truncation)"),
            ("top_k", self.top_k >= 0, "0 (no truncation) or more"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1: no penalty)"),
            ("seed", isinstance(self.seed, int), "a whole number"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a sequence of strings, none of them empty"),
        ):
            if not holds:
                raise ValueError(f"Sampling: `{name}` is {getattr(self, name)!r}; it must be {wanted}.")
        object.__setattr__(self, "stop_ids", tuple(int(token) for token in self.stop_ids))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "logit_bias", _token_numbers(self.logit_bias))

    @property
    def truncates(self) -> bool:
        """Whether tokens that have a probability under the policy are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _token_numbers(bias: Mapping[Any, Any]) -> dict[int, float]:
    """JSON has no keys but strings."""
    try:
        return {int(token): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"Sampling: `logit_bias` is {bias!r}; it must map token ids to numbers.") from None


@dataclass(frozen=True)
class Prompt:
    """One completion to be written. The samples of a group are prompts with equal ids and key, and their own `sample`."""

    ids: np.ndarray
    key: int = 0  # who this prompt is, for the noise
    sample: int = 0
    first_token: int = 0  # number of the first token to be drawn: a later turn of an episode continues the count
    base: int | None = None  # where its noise begins, if that is known; None: by seed, key and sample
    max_tokens: int | None = None  # of this prompt alone; None: that of the params
    images: tuple[ImageSpan, ...] = ()  # where their tokens stand, and which they are
    positions: np.ndarray | None = None  # (3, tokens) of models with positions of time, row and column

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids, dtype=np.int32))


@dataclass
class Completion:
    """What was written after one prompt."""

    ids: np.ndarray  # int32; ends with the stop id where it stopped by one
    sampling_logps: np.ndarray  # float32, under the distribution that was drawn from; 0 for greedy tokens
    policy_logps: np.ndarray  # float32, under softmax(logits / temperature), or softmax(logits) at temperature 0
    # (of engines that are other programs either may be NaN: not reported)
    finish_reason: str  # STOP, LENGTH or ERROR
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # "queued", "prefill", "decode"
    version: int = 0  # of the weights that wrote it: of its first token, where they changed meanwhile
    # (one past the last token, version) of each; None: no change could come
    spans: tuple[tuple[int, int], ...] | None = None

    def versions(self) -> np.ndarray:
        """(tokens,) version of the weights that wrote each."""
        spans = self.spans or ((len(self.ids), self.version),)
        sizes = np.diff([0, *(end for end, _ in spans)])
        return np.repeat(np.array([version for _, version in spans], np.float32), sizes)

    @classmethod
    def failed(cls, error: str, version: int = 0) -> Completion:
        """The completion of a prompt that cannot be run."""
        nothing = np.zeros(0, np.float32)
        seconds = {"queued": 0.0, "prefill": 0.0, "decode": 0.0}
        return cls(np.zeros(0, np.int32), nothing, nothing, ERROR, error, seconds, version)


class Session(Protocol):
    """A running batch. Prompts can be added at any time, which is what episodes with tools need."""

    def add(self, prompt: Prompt) -> int:
        """A ticket for the completion. Prompts with equal ids that wait together are computed once."""

    def advance(self) -> list[tuple[int, Completion]]:
        """Start what waits, run some steps, and hand over what has finished; [] when nothing is in flight."""

    @property
    def in_flight(self) -> int:
        """Prompts that were added and not handed over yet."""

    @property
    def room(self) -> int | None:
        """How many more prompts it would begin with at once; None: it takes any number, and queues them elsewhere."""


class RolloutEngine(Protocol):
    """Something that completes prompts."""

    version: int

    def session(self, params: SamplingParams) -> AbstractContextManager[Session]:
        """A running batch; memory for keys and values exists inside of the block only."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """From here on completions are those of these weights. Engines that read the trainer's own take None."""

    def sleep(self) -> None:
        """Give back what memory can be given back until `wake`."""

    def wake(self) -> None:
        """Be ready again."""


class ForeignEngine(RolloutEngine, Protocol):
    """An engine that is another program with weights of its own: they must be sent, and its log-probs are not quite the trainer's.

    Where several processes ask one such engine it also has `target` and `follow`: see `weight_sync`.
    """

    is_foreign: ClassVar[bool]  # True; engines that read the trainer's weights in place have no such attribute
    vocabulary: int

    def probed(
        self, sequences: Sequence[np.ndarray]
    ) -> list[tuple[list[np.ndarray], Callable[[int], list[str]] | None]]:
        """For each copy of the weights: log-probs of these tokens, and what names tensors that are not the trainer's."""


def draws_apart(engine: RolloutEngine) -> bool:
    """Whether it draws from a distribution that is not quite the trainer's, so that its log-probs are not the policy's own: it is
    another program, or it rounds to 8 bits."""
    return getattr(engine, "is_foreign", False) or getattr(engine, "rounds", False)


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    on_finished: Callable[[int, Completion], None] | None = None,
) -> list[Completion]:
    """The completions of `prompts`, in their order. `on_finished(index, completion)` is called as each one finishes."""
    finished: list[Completion | None] = [None] * len(prompts)
    with engine.session(params) as session:
        place = {session.add(prompt): index for index, prompt in enumerate(prompts)}
        while session.in_flight:
            for ticket, completion in session.advance():
                finished[place[ticket]] = completion
                if on_finished is not None:
                    on_finished(place[ticket], completion)
    return finished
