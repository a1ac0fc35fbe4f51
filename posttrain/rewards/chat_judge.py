"""ChatJudge: a language model behind an OpenAI-compatible endpoint as a judge, and TRL's presets of it.

    judge = ChatJudge("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-7B-Instruct", orders="both")
    judge.judge(["What is 2 + 2?"], [["4", "5"]])          # [0]: the first is better

No request is without a deadline, and what goes wrong with one costs one comparison: it is a failure with a kind and a reason.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.secrets import hidden_text
from posttrain.rewards.judging import BESIDE, TIE, ScoringJudge, Verdict, checked_pairs, is_swapped, plain_lines
from posttrain.rewards.runtime.invoke import ERROR, INVALID, TIMEOUT, described

TEMPLATE = """Two assistants, 0 and 1, have answered the same instruction. Say whose answer is the better one: the one that
does what was asked, is right, and is clear. Neither its length nor its place in this list makes an answer better.

# Instruction
{prompt}

# Answer of assistant 0
{response0}

# Answer of assistant 1
{response1}

# Decision
Reply with a single character and nothing else: 0 if the answer of assistant 0 is better, 1 if that of assistant 1 is."""
ONE, BOTH = "one", "both"
PASSING = (408, 409, 425, 429)
"""Statuses besides 5xx after which the same request may succeed."""
TOP_LOGPROBS = 5
THOUGHT = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)


class JudgeError(RuntimeError):
    """A judge cannot continue; the message says why."""


class _Failed(Exception):
    """One question has no answer."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class _Clock:
    """What is left of the time of a call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start()

    def start(self) -> None:
        self._end = time.monotonic() + self.seconds

    def left(self) -> float:
        return self._end - time.monotonic()

    def stop(self) -> None:
        self._end = 0.0


class ChatJudge(ScoringJudge):
    """A chat model behind any OpenAI-compatible endpoint.

    Args:
        base_url: up to the version, such as http://127.0.0.1:8000/v1.
        model: its name there.
        system_prompt: the text of a question, with {prompt}, {response0} and {response1} in it (and {{ for a brace).
        api_key, api_key_env: the key, or the variable of the environment that holds it. It is shown nowhere.
        labels: how the model says that the first or the second is better.
        max_tokens: of its reply; more than 1 for a model that thinks first.
        max_requests: an error says so when one more would be sent. None: no limit. Retries do not count.
        timeout, deadline: seconds of one request, and of one call of `judge`, however many pairs it has.
        retries, backoff: how often a request is repeated after 429, 5xx, a time-out or a lost connection, and the seconds before
            the first repetition; each further one waits twice as long.
        concurrency: requests at the same time, over all calls.
        orders: "both" asks about every pair in both orders; a disagreement is a tie, and probabilities are averaged.
        soft: as a reward, give the probability of winning, from the log-probs of the labels.
        seed: decides, with prompt and pair, which of the two is shown first.
        body: further fields of the request; None removes one, as in {"max_tokens": None, "max_completion_tokens": 200}.
    """

    runs = BESIDE

    def __init__(
        self,
        base_url: str,
        model: str,
        system_prompt: str | None = None,
        *,
        api_key: str | None = None,
        api_key_env: str | None = None,
        labels: tuple[str, str] = ("0", "1"),
        max_tokens: int = 1,
        max_requests: int | None = None,
        timeout: float = 30.0,
        deadline: float = 600.0,
        retries: int = 5,
        backoff: float = 0.5,
        concurrency: int = 8,
        orders: str = ONE,
        soft: bool = False,
        seed: int = 0,
        body: dict[str, Any] | None = None,
    ) -> None:
        from posttrain.core.transport import Transport  # httpcore: only who asks a server needs it

        self.base_url, self.model, self.template = base_url.rstrip("/"), model, system_prompt or TEMPLATE
        self.labels, self.max_tokens, self.max_requests = tuple(labels), max_tokens, max_requests
        self.timeout, self.deadline, self.retries, self.backoff = timeout, deadline, retries, backoff
        self.concurrency, self.orders, self.soft, self.seed, self.body = concurrency, orders, soft, seed, body or {}
        self._check()
        if api_key_env is not None:
            api_key = _key_of(api_key_env, api_key)
        self._hidden = [api_key] if api_key else []
        self._transport = Transport(self.base_url, api_key)
        self._read = AnswerReader(self.labels)
        self.requests = 0  # sent or about to be, without repetitions
        self._counting, self._turn = threading.Lock(), threading.Lock()
        self._room = threading.Semaphore(concurrency)

    def __repr__(self) -> str:
        key = "with a key" if self._hidden else "without a key"
        return f"{type(self).__name__}({self.model!r} at {hidden_text(self.base_url)}, {key})"

    def _check(self) -> None:
        for name, holds, wanted in (
            ("model", bool(self.model), "the name of a model of the endpoint"),
            ("labels", len(self.labels) == 2 and len({*self.labels, ""}) == 3, "two different texts"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("max_requests", self.max_requests is None or self.max_requests >= 1, "at least 1, or None"),
            ("timeout", 0 < self.timeout < math.inf, "a number of seconds above 0"),
            ("deadline", 0 < self.deadline < math.inf, "a number of seconds above 0"),
            ("retries", self.retries >= 0, "0 or more"),
            ("backoff", 0 <= self.backoff < math.inf, "0 or more"),
            ("concurrency", self.concurrency >= 1, "at least 1"),
            ("orders", self.orders in (ONE, BOTH), f"{ONE!r} or {BOTH!r}"),
        ):
            if not holds:
                raise ValueError(f"{type(self).__name__}: `{name}` is {getattr(self, name)!r}; it must be {wanted}.")
        marks = {"prompt": "\x01p", "response0": "\x01a", "response1": "\x01b"}
        try:
            filled = self.template.format(**marks)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"`system_prompt` cannot be filled in ({type(error).__name__}: {error}): write {{{{ and }}}} for braces of its own."
            ) from error
        if missing := [name for name, mark in marks.items() if mark not in filled]:
            raise ValueError(f"`system_prompt` lacks {', '.join(f'{{{name}}}' for name in missing)}.")

    # ---- many questions ------------------------------------------------------------------------------------------------

    def verdicts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Sequence[Any]],
        shuffle_order: bool = True,
        soft: bool = False,
        temperature: float = 1.0,
        seconds: float | None = None,
    ) -> list[Verdict]:
        """Two completions that are the same text are a tie, and the judge is not asked."""
        pairs = [tuple(map(plain_lines, pair)) for pair in checked_pairs(prompts, completions)]
        questions: list[tuple[int, bool]] = []  # (pair, whether its second completion is shown first)
        for place, (prompt, first, second) in enumerate(pairs):
            if first != second:
                swap = shuffle_order and is_swapped(self.seed, prompt, first, second)
                questions += [(place, swap), (place, not swap)] if self.orders == BOTH else [(place, swap)]
        self._reserve(len(questions))
        clock = _Clock(min(self.deadline, seconds or self.deadline))

        def ask(number: int) -> Verdict:
            place, swap = questions[number]
            return self._verdict(*pairs[place], swap, soft, temperature, clock)

        answers: dict[int, list[Verdict]] = {}
        for (place, _), answer in zip(questions, self._ask_all(len(questions), ask, clock)):
            answers.setdefault(place, []).append(answer)
        return [_agreed(answers[place], soft) if place in answers else Verdict(TIE) for place in range(len(pairs))]

    def _reserve(self, count: int) -> None:
        with self._counting:
            if self.max_requests is not None and self.requests + count > self.max_requests:
                raise JudgeError(
                    f"{self!r} has sent {self.requests} requests and {count} more are wanted, but `max_requests` is "
                    f"{self.max_requests}: raise it, or set it to None for no limit."
                )
            self.requests += count

    def _ask_all(self, count: int, ask: Callable[[int], Verdict], clock: _Clock) -> list[Verdict]:
        """At most `concurrency` at once over all calls. The clock starts when this call has its places, so that calls which wait
        for others do not fail for it."""
        found: list[Verdict] = [Verdict()] * count
        # `next` of a count is one step of the interpreter
        numbers, size = itertools.count(), min(self.concurrency, count)
        with self._turn:  # all places of a call at once, so that two calls cannot wait for each other's
            for _ in range(size):
                self._room.acquire()
        clock.start()

        def work() -> None:
            try:
                while (number := next(numbers)) < count:
                    found[number] = ask(number)
            finally:
                self._room.release()

        threads = [threading.Thread(target=work, daemon=True, name="judge") for _ in range(size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()  # every request has a deadline
        finally:
            clock.stop()  # after an interrupt nothing more is asked
        return found

    # ---- one question --------------------------------------------------------------------------------------------------

    def _verdict(
        self, prompt: str, first: str, second: str, swap: bool, soft: bool, temperature: float, clock: _Clock
    ) -> Verdict:
        shown = (second, first) if swap else (first, second)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._question(prompt, *shown)}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **({"logprobs": True, "top_logprobs": TOP_LOGPROBS} if soft else {}),
            **self.body,
        }
        try:
            reply = self._reply({name: value for name, value in body.items() if value is not None}, clock)
            verdict = Verdict(self._read.probability(reply, temperature) if soft else self._read.decision(reply))
        except _Failed as failure:
            return Verdict(kind=failure.kind, reason=hidden_text(str(failure), self._hidden))
        except Exception as error:  # whatever it is, it costs one comparison and not the run
            return Verdict(kind=ERROR, reason=hidden_text(described(error), self._hidden))
        return verdict.swapped() if swap else verdict

    def _question(self, prompt: str, first: str, second: str) -> str:
        return self.template.format(prompt=prompt, response0=first, response1=second)

    def _reply(self, body: dict[str, Any], clock: _Clock) -> Any:
        from posttrain.core.transport import ServerAnswer, ServerError, ServerSlow

        for attempt in itertools.count():
            left = clock.left()
            if left <= 0:
                raise _Failed(TIMEOUT, f"the {clock.seconds:g} s of the call were over before {self!r} was asked.")
            try:
                return self._transport.ask("POST", "/chat/completions", body, min(self.timeout, left))
            except ServerError as error:
                pause = self.backoff * 2**attempt
                if attempt < self.retries and _may_pass(error) and pause < clock.left():
                    time.sleep(pause)
                    continue
                kind = (
                    TIMEOUT if isinstance(error, ServerSlow) else INVALID if isinstance(error, ServerAnswer) else ERROR
                )
                tried = f" ({attempt + 1} tries)" if attempt else ""
                raise _Failed(kind, f"{error}{tried}") from None  # the error may quote what was sent
        raise AssertionError("unreachable")


def _may_pass(error: Exception) -> bool:
    status = getattr(error, "status", None)
    return status is None or status in PASSING or status >= 500


def _agreed(answers: list[Verdict], soft: bool) -> Verdict:
    """Of one pair: the only answer, or that of both orders."""
    if failure := next((answer for answer in answers if answer.is_failure), None):
        return failure
    if soft:
        return Verdict(sum(answer.first_wins for answer in answers) / len(answers))
    return answers[0] if len({answer.winner for answer in answers}) == 1 else Verdict(TIE)


def _key_of(variable: str, key: str | None) -> str:
    if key is not None:
        raise ValueError("`api_key` and `api_key_env` are both given: leave one of them out.")
    if not os.environ.get(variable):
        raise ValueError(f"The environment variable {variable}, which should hold the key of the judge, is not set.")
    return os.environ[variable]


class AnswerReader:
    """Reads what a chat model replied."""

    def __init__(self, labels: tuple[str, str]) -> None:
        self.labels = tuple(label.lower() for label in labels)
        either = "|".join(map(re.escape, self.labels))
        self._named = re.compile(rf"(?<![\w.-])({either})(?![\w]|\.\d)")
        # A reply that begins with the answer alone may explain itself afterwards: "**1** because 0 is wrong".
        self._first = re.compile(rf"[^\w-]*({either})(?![\w]|\.\d)(?:[^\w\s]|\s*\n|\s*\Z|\s+(?:because|since|as)\b)")

    def decision(self, reply: Any) -> float:
        """1.0 where the first is better, 0.0 where the second is, TIE; _Failed where the reply does not say."""
        text = self._text(reply)
        said = THOUGHT.sub("", text).lower()
        if first := self._first.match(said):
            return float(first[1] == self.labels[0])
        named = {*self._named.findall(said)}
        if len(named) == 1:
            return float(named == {self.labels[0]})
        if not named and re.search(r"\b(tie|draw)\b", said):
            return TIE
        raise _Failed(
            INVALID, f"the judge replied {text[:80]!r}, in place of {self.labels[0]!r} or {self.labels[1]!r}."
        )

    def probability(self, reply: Any, temperature: float) -> float:
        """p(first label) / (p(first) + p(second)), where the model wrote one of them."""
        try:
            written = reply["choices"][0]["logprobs"]["content"]
            place = next(p for p in written if p["token"].strip().lower() in self.labels)
            known = [(one["token"], float(one["logprob"])) for one in (place, *(place.get("top_logprobs") or ()))]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise _Failed(
                INVALID,
                f"the reply has no log-probs of {self.labels[0]!r} and {self.labels[1]!r} ({type(error).__name__}: {error}): the "
                "judge cannot give probabilities; ask it for decisions.",
            ) from None
        logps = [
            max((logp for token, logp in known if token.strip().lower() == label), default=-math.inf)
            for label in self.labels
        ]
        gap = (logps[1] - logps[0]) / temperature
        if math.isnan(gap):
            raise _Failed(INVALID, f"the log-probs of the labels are {logps}.")
        return 1 / (1 + math.exp(min(gap, 700.0)))

    def _text(self, reply: Any) -> str:
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise _Failed(INVALID, f"the reply is not that of a chat model: {str(reply)[:120]!r}.")
        return text


class OpenAIPairwiseJudge(ChatJudge):
    """TRL's judge at OpenAI (or OPENAI_BASE_URL), with the key in OPENAI_API_KEY. `more`: arguments of ChatJudge."""

    def __init__(
        self,
        model: str = "gpt-4-turbo-preview",
        system_prompt: str | None = None,
        max_requests: int | None = 1000,
        **more: Any,
    ) -> None:
        address = os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        if "api_key" not in more:
            more.setdefault("api_key_env", "OPENAI_API_KEY")
        super().__init__(address, model, system_prompt, max_requests=max_requests, **more)


class HfPairwiseJudge(ChatJudge):
    """TRL's judge at Hugging Face's inference providers; `token` None: the one that you are logged in with."""

    def __init__(
        self,
        model: str = "meta-llama/Meta-Llama-3-70B-Instruct",
        token: str | None = None,
        system_prompt: str | None = None,
        **more: Any,
    ) -> None:
        if model.startswith(("http://", "https://")):
            raise ValueError(
                f"HfPairwiseJudge takes the id of a model; for an endpoint take ChatJudge({model!r}, model)."
            )
        if token is None:
            from huggingface_hub import get_token

            token = get_token()
        super().__init__("https://router.huggingface.co/v1", model, system_prompt, api_key=token, **more)
