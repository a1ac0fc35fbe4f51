"""One completion on its way: what every engine needs to know about it, and the questions of when it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from posttrain.core.sample import Sample
from posttrain.data.collate import Pixels
from posttrain.rollout.engines.noise import noise_base
from posttrain.rollout.engines.protocol import ERROR, LENGTH, STOP, Completion, Decode, Prompt, SamplingParams


@dataclass
class Request:
    """A prompt, and the tokens that have been written after it so far."""

    ticket: int
    prompt: Prompt
    limit: int  # tokens it may have
    base: int  # where its noise begins
    added: float
    ids: list[int] = field(default_factory=list)
    sampling_logps: list[float] = field(default_factory=list)
    policy_logps: list[float] = field(default_factory=list)
    started: float | None = None
    prefill_seconds: float = 0.0
    error: str | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (tokens, version) at each change of the weights

    @property
    def number(self) -> int:
        """Of the token that is drawn next."""
        return self.prompt.first_token + len(self.ids)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.ids)

    @property
    def rotary_shift(self) -> int:
        """Rotary position less place of every token that is written: an image takes fewer positions than tokens."""
        positions = self.prompt.positions
        return 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]

    def before_last(self) -> Sample:
        """All tokens but the last, with the images among them."""
        prompt = self.prompt
        sample = Sample(prompt.ids, np.zeros(len(prompt.ids)), images=prompt.images, positions=prompt.positions)
        whole = sample.append(self.ids, trained=False)
        return whole.slice(0, len(whole) - 1)

    def extend(self, ids: Sequence[int], sampling_logps: Sequence[float], policy_logps: Sequence[float]) -> None:
        self.ids.extend(ids)
        self.sampling_logps.extend(sampling_logps)
        self.policy_logps.extend(policy_logps)

    def close_span(self, version: int) -> None:
        """What was written so far, `version` wrote."""
        if len(self.ids) > (self.spans[-1][0] if self.spans else 0):
            self.spans.append((len(self.ids), version))

    def tokens(self) -> np.ndarray:
        """The prompt and what was written."""
        return np.concatenate([self.prompt.ids, np.asarray(self.ids, np.int32)])

    def completion(self, finish_reason: str, version: int, labelled: bool = False) -> Completion:
        """`labelled`: weights may have changed meanwhile, and each token is to say which wrote it."""
        started = self.started if self.started is not None else self.added
        seconds = {
            "queued": started - self.added,
            "prefill": self.prefill_seconds,
            "decode": max(time.perf_counter() - started - self.prefill_seconds, 0.0),
        }
        self.close_span(version)
        return Completion(
            np.asarray(self.ids, np.int32),
            np.asarray(self.sampling_logps, np.float32),
            np.asarray(self.policy_logps, np.float32),
            finish_reason,
            self.error,
            seconds,
            self.spans[0][1] if self.spans else version,
            tuple(self.spans) if labelled else None,
        )


def refuse_unseen(prompt: Prompt, pixels: Pixels | None) -> None:
    if prompt.images and pixels is None:
        raise ValueError(
            f"Prompt {prompt.key} has images, and this engine was made without `pixels`: it reads texts only."
        )


def _text_of(prompt: Prompt) -> np.ndarray:
    """The tokens outside of images: placeholders may lie beyond the vocabulary, where the model puts features in their place."""
    is_text = np.ones(len(prompt.ids), dtype=bool)
    for image in prompt.images:
        is_text[image.start : image.stop] = False
    return prompt.ids[is_text]


def request_or_error(
    ticket: int, prompt: Prompt, params: SamplingParams, context: int | None, vocabulary: int
) -> Request | str:
    """A request, or a sentence that says why this prompt cannot be run. `context`: tokens a sequence may have."""
    length = len(prompt.ids)
    wanted = params.max_tokens if prompt.max_tokens is None else prompt.max_tokens
    if length == 0:
        return f"Prompt {prompt.key} has no tokens, so there is nothing to continue."
    text = _text_of(prompt)
    if text.min(initial=0) < 0 or text.max(initial=0) >= vocabulary:  # on CUDA this would end the process
        unknown = text.max() if text.min() >= 0 else text.min()
        return f"Prompt {prompt.key} has the token {unknown}; this model knows 0 to {vocabulary - 1}."
    if prompt.images and prompt.images[-1].stop >= length:
        return f"Prompt {prompt.key} ends with an image, and a completion follows a token of text: put some text behind it."
    if wanted < 1:
        return f"Prompt {prompt.key} asks for {wanted} tokens; `max_tokens` must be at least 1."
    if context is not None:
        if length >= context:
            return (
                f"Prompt {prompt.key} has {length} tokens, which leaves no room in a context of {context}. "
                "Shorten it, or leave the row out."
            )
        wanted = min(wanted, context - length)
    base = noise_base(params.seed, prompt.key, prompt.sample) if prompt.base is None else prompt.base
    return Request(ticket, prompt, wanted, base, time.perf_counter())


class EndOfText:
    """When is a completion over? By a stop id, a stop string, or its allowance."""

    def __init__(self, params: SamplingParams, decode: Decode | None) -> None:
        if params.stop and decode is None:
            raise ValueError(
                f"Sampling: `stop` has the strings {list(params.stop)}, but this engine was given no detokeniser. Hand it one "
                "(`decode=tokenizer.decode`), or stop by token ids (`stop_ids`)."
            )
        self._stop_ids = frozenset(params.stop_ids)
        self._strings = params.stop
        self._decode = decode
        # Every character may take up to four tokens (its bytes); a few more, for detokenisers that look back.
        self._reach = 4 * max((len(text) for text in params.stop), default=0) + 8

    def take_all(self, requests: Sequence[Request], ids: np.ndarray, logps: np.ndarray) -> list[str | None]:
        """`take` for the columns of ids (steps, rows) and logps (2, steps, rows); those that just continue are quick."""
        columns, numbers = ids.T.tolist(), logps.transpose(0, 2, 1).tolist()
        may_end = np.isin(ids, [*self._stop_ids]).any(0) | np.isnan(logps[1]).any(0) | bool(self._strings)
        found: list[str | None] = []
        for request, *drawn, ends in zip(requests, columns, *numbers, may_end.tolist()):
            if ends or request.remaining <= len(ids):
                found.append(self.take(request, *drawn))
            else:
                request.extend(*drawn)
                found.append(None)
        return found

    def take(
        self, request: Request, ids: Sequence[int], sampling_logps: Sequence[float], policy_logps: Sequence[float]
    ) -> str | None:
        """Give drawn tokens to a request, up to the one that ends it; the finish reason, or None where it continues."""
        before = len(request.ids)
        ids = ids[: request.remaining]
        reason = None
        if not self._stop_ids.isdisjoint(ids):
            ids = ids[: 1 + next(place for place, token in enumerate(ids) if token in self._stop_ids)]
            reason = STOP
        request.extend(ids, sampling_logps[: len(ids)], policy_logps[: len(ids)])
        if math.isnan(sum(policy_logps[: len(ids)])):
            request.error = f"The logits after prompt {request.prompt.key} are not numbers: the weights are broken."
            return ERROR
        cut = self._end_of_string(request.ids, before) if self._strings else None
        if cut is not None:
            for column in (request.ids, request.sampling_logps, request.policy_logps):
                del column[cut:]
            return STOP
        return reason or (LENGTH if request.remaining <= 0 else None)

    def _end_of_string(self, ids: list[int], checked: int) -> int | None:
        """How many tokens it takes to complete a stop string, where one of those after `checked` does."""
        start = max(checked - self._reach, 0)
        if not self._has_string(ids[start:]):
            return None
        return next(end for end in range(checked + 1, len(ids) + 1) if self._has_string(ids[start:end]))

    def _has_string(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return any(string in text for string in self._strings)
