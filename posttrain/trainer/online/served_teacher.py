"""A teacher on a server: asked once for each sample, when it is collected, for log-probs of its tokens and for the likeliest ones.

Two kinds of server answer: `posttrain vllm-serve` (/score), and a plain `vllm serve` (`prompt_logprobs` of /v1/completions).
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.core.transport import ServerAnswer, ServerError, ServerGone, ServerRefused, ServerSlow
from posttrain.models.load.model import load_tokenizer
from posttrain.models.load.teacher import check_tokenizers
from posttrain.rollout.engines.vllm.client import MARGIN_SECONDS, Client, ServerClient
from posttrain.rollout.engines.vllm.params import RAW
from posttrain.rollout.engines.vllm.transport import Deadlines, in_parallel, parallel_calls
from posttrain.rollout.rollout import TEACHER_LOGPS
from posttrain.trainer.online.vllm_setup import NOT_FOUND, client_of
from posttrain.trainer.online.vllm_setup import _token as token_of

TEACHER_TOP_IDS, TEACHER_TOP_LOGPS = "teacher_top_ids", "teacher_top_logps"
"""Columns of a sample beside `TEACHER_LOGPS`: the teacher's likeliest tokens at each trained one and their log-probs (tokens, k);
-inf where it has named fewer."""
TEACHER_ID = "teacher_id"
"""Column of a row: the name of its teacher, where there are several."""
AT_ONCE = 32  # calls; a server works on many sequences together
AGAIN_SECONDS = 0.5
PASSES = (429, 500, 502, 503, 504)
"""Refusals that may pass: the server is busy, or its engine is on its way."""
OFFERS = "A teacher's server is a `posttrain vllm-serve`, or a plain `vllm serve`."
PROBE = "A probe: naïve Ωmega 東京 12,345.678\n\tdef f(x): return x ** 2  # ok?"
Place = tuple[float, list[tuple[int, float]]]
"""What a teacher says of a token: its log-prob, and (id, log-prob) of the likeliest, in any order."""


class ServedTeacher:
    """Answers about samples, not about batches: its numbers travel with them. Threads call one server side by side."""

    words: int | None = None  # of its vocabulary, where the server says so

    def __init__(
        self,
        url: str,
        top_k: int = 1,
        *,
        token_file: str | None = None,
        wait_seconds: float = 240.0,
        call_seconds: float = 300.0,
        tokenizer: Any = None,
        student_words: int | None = None,
    ) -> None:
        """Nothing is sent yet. `tokenizer`: the teacher's, where neither the server nor the name of its model says which.
        `student_words`: likely tokens beyond these, padding of the teacher's, are left out."""
        self.url = self.name = url.rstrip("/").removesuffix("/v1")  # which OpenAI's own clients want
        self.top_k, self.tokenizer = top_k, tokenizer
        self._token_file, self._wait = token_file, wait_seconds
        self._student_words = student_words or 1 << 31
        self._deadlines = Deadlines(completion=call_seconds, start=wait_seconds)
        self._client: Client | None = None
        self._most_seconds = math.inf
        self._failing_since: float | None = None  # no call has succeeded since then

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"

    # ---- the start -------------------------------------------------------------------------------------------------------

    def check(self, tokenizer: Any) -> None:
        """Wait for the server; refuse one that is not there, or whose tokens are not the student's."""
        try:
            self._client = client_of(self.url, token_of(self._token_file), self._deadlines, None, RAW)
            info = self._client.info()
        except ServerSlow as absence:
            raise ConnectionError(
                f"No teacher answered at {self.url} within `teacher_server_timeout`={self._wait:g} s "
                f"({absence.__cause__ or absence}). Start one with `posttrain vllm-serve --model TEACHER`, or with `vllm serve`."
            ) from absence
        except ServerError as error:  # its sentence names the option of a server that writes
            said = str(error).replace("vllm_server_token_file", "teacher_server_token_file")
            raise ConnectionError(f"The teacher's server cannot be asked: {said}") from error
        self.name, self.words, self._most_seconds = info.model, info.vocabulary, info.most_seconds
        needed = max(tokenizer.get_vocab().values()) + 1
        if self.words is not None and self.words < needed:
            raise ValueError(
                f"The teacher {self} has a vocabulary of {self.words} tokens, the student's tokenizer one of {needed}: it cannot "
                "read all of the student's tokens. Take a teacher with the student's tokenizer."
            )
        self._check_tokens(tokenizer)
        self._check_answers(needed - 1)

    def _check_answers(self, highest: int) -> None:
        """One short question, with the highest of the student's tokens, as samples will be asked about; what of it is refused is
        found out by leaving parts of it away."""
        try:
            self._answered([0, highest], 1)
        except ServerRefused as refusal:
            if self.top_k > 1 and self._answers([0, highest], 1):
                raise ValueError(
                    f"The teacher {self} gives log-probs of fewer tokens than `loss_top_k`={self.top_k}: {refusal} Start it with "
                    f"`--max-logprobs {self.top_k}`, or ask for fewer tokens."
                ) from refusal
            if self._answers([0, 0], 0):
                raise ValueError(
                    f"The teacher {self} does not know token {highest}, which the student's tokenizer has: {refusal} Take a "
                    "teacher with the student's tokenizer."
                ) from refusal
            raise ConnectionError(
                f"The teacher {self} gives no log-probs of given tokens: {refusal} {OFFERS}"
            ) from refusal
        except ServerAnswer as error:
            raise ConnectionError(f"The teacher {self} gives no log-probs of given tokens: {error} {OFFERS}") from error
        except (ServerGone, ServerSlow) as absence:
            raise ConnectionError(f"The teacher {self} is there and does not answer: {absence}") from absence

    def _answers(self, ids: list[int], top_k: int) -> bool:
        """Whether it can be asked about these tokens, for so many likely ones."""
        try:
            self._ask(ids, 1, top_k)
        except ServerRefused:
            return False
        return True

    def _check_tokens(self, student: Any) -> None:
        """Compare tokenizers, by what can be had: the teacher's own, or what a plain vLLM makes of a text."""
        if self.tokenizer is None and not isinstance(self._client, ServerClient):
            body = {"model": self.name, "prompt": PROBE, "add_special_tokens": False}
            try:
                answer = self._client._transport.ask("POST", "/tokenize", body, self._deadlines.control)
            except ServerRefused as refusal:
                if refusal.status != NOT_FOUND:
                    raise
            else:
                theirs = self._client._checked("/tokenize", lambda fields: [int(i) for i in fields["tokens"]], answer)
                ours = student(PROBE, add_special_tokens=False)["input_ids"]
                if ours != theirs:
                    place = next(
                        (i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs))
                    )
                    raise ValueError(
                        f"The tokenizers of the student and of the teacher {self} differ: token {place} of a text is "
                        f"{ours[place : place + 1]} for the student and {theirs[place : place + 1]} for the teacher. Take a "
                        "teacher with the student's tokenizer."
                    )
                return
        if self.tokenizer is None:
            try:
                self.tokenizer = load_tokenizer(self.name, {}, False)
            except (OSError, ValueError):  # a folder of the server's machine, or a name that the server was given
                return
        check_tokenizers(student, self.tokenizer, str(self))

    # ---- questions -------------------------------------------------------------------------------------------------------

    def annotate(self, samples: Sequence[Sample]) -> dict[int, str]:
        """Write the columns on each sample; numbers of those that got no answer -> why."""
        failed: dict[int, str] = {}

        def one(number: int) -> None:
            try:
                self._annotate(samples[number])
            except ServerError as error:
                failed[number] = str(error)

        parallel_calls(len(samples), one, AT_ONCE)
        return dict(sorted(failed.items()))

    def _annotate(self, sample: Sample) -> None:
        trained = np.flatnonzero(sample.trained[1:]) + 1
        ids = np.zeros((len(trained), self.top_k), np.int64)
        logps, top = np.zeros(len(trained), np.float32), np.full(ids.shape, -np.inf, np.float32)
        if len(trained):
            start, tokens = int(trained[0]), sample.input_ids.tolist()
            places = self._answered(tokens, start)
            for row, at in enumerate(trained - start):
                logps[row], likeliest = places[at]
                for column, (token, logp) in enumerate(self._sorted(likeliest) if self.top_k else ()):
                    ids[row, column], top[row, column] = token, logp
        sample.write_trained(TEACHER_LOGPS, logps)
        if self.top_k:
            sample.write_trained(TEACHER_TOP_IDS, ids)
            sample.write_trained(TEACHER_TOP_LOGPS, top)

    def _sorted(self, likeliest: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """The k likeliest: vLLM adds the token that stands there, and sorts nothing."""
        known = [entry for entry in likeliest if entry[0] < self._student_words]
        if not known:
            raise ServerAnswer(f"{self} finds no token likely that the student has.")
        return sorted(known, key=lambda entry: (-entry[1], entry[0]))[: self.top_k]

    def _answered(self, ids: list[int], start: int) -> list[Place]:
        """The places from `start` on. What may pass is tried again for as long as a server may be away."""
        began = time.monotonic()
        while True:
            try:
                found = self._ask(ids, start)
            except (ServerGone, ServerSlow, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status not in PASSES:
                    raise
                now, since = time.monotonic(), self._failing_since
                if since is None:
                    since = self._failing_since = now
                if now + AGAIN_SECONDS - min(began, since) > self._wait:
                    raise
                time.sleep(AGAIN_SECONDS)
            else:
                self._failing_since = None
                return found

    def _ask(self, ids: list[int], start: int, top_k: int | None = None) -> list[Place]:
        client, top_k = self._client, self.top_k if top_k is None else top_k
        if isinstance(client, ServerClient):
            seconds = min(self._deadlines.completion, self._most_seconds)
            body = {"request_id": f"teacher-{uuid.uuid4().hex}", "sequences": [{"ids": ids, "start": start}]}
            body |= {"top_k": top_k, "deadline_s": seconds}
            answer, path, read = client._post("/score", body, seconds + MARGIN_SECONDS), "/score", _scored
        else:
            body = {"model": self.name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "add_special_tokens": False}
            answer = client._ask_completions(body | {"prompt_logprobs": top_k})
            path, read = "/v1/completions", _prompt_logprobs
        places = client._checked(path, lambda fields: read(fields, ids, start), answer)
        if len(places) != len(ids) - start:
            raise ServerAnswer(f"{path} of {self.url} has {len(places)} places instead of {len(ids) - start}.")
        numbers = [number for own, likeliest in places for number in (own, *(logp for _, logp in likeliest))]
        if any(math.isnan(number) or number > 1e-3 for number in numbers):
            raise ServerAnswer(f"{path} of {self.url} has a number that is not a log-prob.")
        if any(sum(math.exp(logp) for _, logp in likeliest) > 1 + 1e-3 for _, likeliest in places):
            raise ServerAnswer(f"{path} of {self.url} has probabilities that sum to more than 1.")
        words = self.words
        if any(not 0 <= token < (words or 1 << 31) for _, likeliest in places for token, _ in likeliest):
            raise ServerAnswer(f"{path} of {self.url} names a token that is not in the vocabulary.")
        return places


def chosen_teacher(names: Collection[str], columns: Mapping[str, Any], row: int) -> str:
    """Which of several teachers is that of a row."""
    name, known = columns.get(TEACHER_ID), ", ".join(map(repr, names))
    if name is None:
        raise ValueError(
            f"Row {row} has no `{TEACHER_ID}`, and `teacher_server_urls` names several teachers ({known}): add the column, which "
            "says who is asked about the completions of a row, or name one server with `teacher_model_server_url`."
        )
    if name not in names:
        raise ValueError(
            f"The column `{TEACHER_ID}` of row {row} is {name!r}; the teachers of `teacher_server_urls` are {known}. Correct the "
            "row, or name a server for it."
        )
    return name


class ServedTeachers:
    """Several teachers, each on a server of its own; they are asked at the same time. A row names its teacher in `teacher_id`."""

    def __init__(self, by_name: dict[str, ServedTeacher]) -> None:
        self.by_name = by_name

    def __str__(self) -> str:
        return "; ".join(f"{name}: {teacher}" for name, teacher in self.by_name.items())

    @property
    def name(self) -> str:
        """Of all models."""
        return "; ".join(f"{name}: {teacher.name}" for name, teacher in sorted(self.by_name.items()))

    @property
    def words(self) -> int | None:
        """That all of them have, of those that say so."""
        return min((teacher.words for teacher in self.by_name.values() if teacher.words is not None), default=None)

    def check(self, tokenizer: Any) -> None:
        for teacher in self.by_name.values():
            teacher.check(tokenizer)

    def annotate(self, samples: Sequence[Sample], names: Sequence[str]) -> dict[int, str]:
        """As ServedTeacher's; each sample by the teacher that `names` says."""

        def ask(name: str) -> dict[int, str]:
            places = [number for number, one in enumerate(names) if one == name]
            failed = self.by_name[name].annotate([samples[place] for place in places])
            return {places[number]: why for number, why in failed.items()}

        failed: dict[int, str] = {}
        for found in in_parallel(ask, self.by_name):
            if isinstance(found, BaseException):
                raise found
            failed |= found
        return dict(sorted(failed.items()))


def _scored(fields: Any, ids: list[int], start: int) -> list[Place]:
    (score,) = fields["scores"]
    said = score["top"] or [{"ids": (), "logps": ()}] * len(score["logps"])
    tops = [[(int(i), float(x)) for i, x in zip(top["ids"], top["logps"], strict=True)] for top in said]
    return [(float(own), top) for own, top in zip(score["logps"], tops, strict=True)]


def _prompt_logprobs(fields: Any, ids: list[int], start: int) -> list[Place]:
    (choice,) = fields["choices"]
    if not choice.get("prompt_logprobs"):
        raise ValueError("it has no `prompt_logprobs`")
    places = choice["prompt_logprobs"][start:]
    return [
        (float(place[str(token)]["logprob"]), [(int(i), float(entry["logprob"])) for i, entry in place.items()])
        for token, place in zip(ids[start:], places, strict=True)
    ]
