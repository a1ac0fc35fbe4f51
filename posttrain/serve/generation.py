"""/generate, /chat and /score: a body becomes jobs, their outcomes become the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

from . import fields as f
from .asgi import Answer, Request
from .engine import ABORTED, ERROR, Accepted, GenerateJob, Job, Outcome, Sampling, ScoreJob
from .errors import (
    Busy,
    Conflict,
    DeadlinePassed,
    EngineFailed,
    FieldError,
    NotReady,
    ServeError,
)
from .fields import Field, read_fields
from .payload import MAX_VERSION
from .server import RolloutServer

MOST_PROMPTS, MOST_SAMPLES, MOST_TOP = 4096, 1024, 1024
SEED = f.integer(0, (1 << 63) - 1)
REFUSALS = {error.status: error for error in (FieldError, Conflict, Busy, NotReady)}

VERSIONS = {
    "min": Field(f.integer(0, MAX_VERSION), 0),
    "max": Field(f.integer(0, MAX_VERSION), MAX_VERSION),
}
SAMPLING = {
    "max_tokens": Field(f.integer(1, 1 << 24)),
    "temperature": Field(f.number(0.0, 1e6), 1.0),
    "top_p": Field(f.number(0.0, 1.0, above=True), 1.0),
    "top_k": Field(f.integer(0, 1 << 24), 0),
    "min_p": Field(f.number(0.0, 1.0), 0.0),
    "repetition_penalty": Field(f.number(0.0, 1e6, above=True), 1.0),
    "stop_ids": Field(f.list_of(f.integer(0, 1 << 31), 1024), ()),
    "stop": Field(f.list_of(f.text(1024, 1), 64), ()),
    "logit_bias": Field(f.list_of(f.list_of(f.number(-1e9, 1e9), 2, 2), 4096), ()),
    "regex": Field(f.optional(f.text(1 << 16, 1)), None),
}


def _common(server: RolloutServer) -> dict[str, Field]:
    """Fields of all three bodies."""
    most = server.options.most_seconds
    return {
        "request_id": Field(f.identifier, None),
        "accept": Field(f.object_of(VERSIONS), {"min": 0, "max": MAX_VERSION}),
        "deadline_s": Field(f.number(0.0, most, above=True), min(600.0, most)),
        "base_weights": Field(f.boolean, False),
    }


def _drawing() -> dict[str, Field]:
    """Fields of a body that asks for completions."""
    return {
        "sampling": Field(f.object_of(SAMPLING)),
        "top_logprobs": Field(f.integer(0, MOST_TOP), 0),
        "text": Field(f.boolean, False),
    }


def _prompt_fields(server: RolloutServer, **what: Field) -> dict[str, Field]:
    return {
        **what,
        "n": Field(f.integer(1, MOST_SAMPLES), 1),
        "seeds": Field(f.optional(f.list_of(SEED, MOST_SAMPLES)), None),
        "max_tokens": Field(f.optional(f.integer(1, 1 << 24)), None),
    }


async def generate(server: RolloutServer, request: Request) -> Answer:
    """Completions of token ids or texts."""
    about = server.engine.info
    ids = Field(f.optional(f.token_ids(about.context_length, about.vocabulary)), None)
    what = _prompt_fields(server, ids=ids, text=Field(f.optional(f.text(1 << 24, 1)), None))
    table = _common(server) | _drawing() | {"prompts": Field(f.list_of(f.object_of(what), MOST_PROMPTS, 1))}
    asked = read_fields(await request.json(), table)
    for i, prompt in enumerate(asked["prompts"]):
        if (prompt["ids"] is None) == (prompt["text"] is None):
            raise FieldError(f"Entry {i} of `prompts` needs `ids` or `text`, and not both.")
        if prompt["ids"] is None:
            prompt["ids"] = tuple(await asyncio.to_thread(server.engine.text_ids, prompt["text"]))
    return await _completions(server, request, asked)


async def chat(server: RolloutServer, request: Request) -> Answer:
    """Completions of conversations, in the model's chat template."""
    message = f.list_of(f.any_object, 1 << 16, 1)
    what = _prompt_fields(server, messages=Field(message))
    more = {
        "conversations": Field(f.list_of(f.object_of(what), MOST_PROMPTS, 1)),
        "template_options": Field(f.any_object, {}),
        "tools": Field(f.optional(f.list_of(f.any_object, 1024)), None),
    }
    asked = read_fields(await request.json(), _common(server) | _drawing() | more)
    options = asked.pop("template_options") | ({"tools": list(asked["tools"])} if asked["tools"] else {})
    asked["prompts"] = asked.pop("conversations")
    for i, conversation in enumerate(asked["prompts"]):
        messages = list(conversation["messages"])
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list | None):
                raise FieldError(f"A message of conversation {i} has no `role`, or a `content` that is no text.")
        try:
            ids = await asyncio.to_thread(server.engine.chat_ids, messages, options)
        except ServeError:
            raise
        except Exception as error:  # templates are programs and raise anything
            raise FieldError(
                f"The chat template refused conversation {i} ({type(error).__name__}: {error})."
            ) from error
        conversation["ids"] = tuple(ids)
    return await _completions(server, request, asked)


async def score(server: RolloutServer, request: Request) -> Answer:
    """Log-probs of given tokens under the model at temperature 1, and of the most likely ones, for teachers."""
    about = server.engine.info
    if not about.capabilities.get("score"):
        raise FieldError("This server cannot score: vLLM has no log-probs of prompts with adapters on `lm_head`.")
    what = {
        "ids": Field(f.token_ids(about.context_length, about.vocabulary)),
        "start": Field(f.integer(1, about.context_length), 1),
    }
    more = {
        "sequences": Field(f.list_of(f.object_of(what), MOST_PROMPTS, 1)),
        "top_k": Field(f.integer(0, MOST_TOP), 0),
    }
    asked = read_fields(await request.json(), _common(server) | more)
    for i, sequence in enumerate(asked["sequences"]):
        if not sequence["start"] < len(sequence["ids"]):
            raise FieldError(
                f"Sequence {i} has {len(sequence['ids'])} tokens and is to be scored from {sequence['start']}."
            )
    request_id = asked["request_id"] or uuid.uuid4().hex
    accepted = Accepted(asked["accept"]["min"], asked["accept"]["max"])

    async def work() -> bytes:
        server.thread.refuse_without_room(len(asked["sequences"]))
        jobs = [
            ScoreJob(f"{request_id}/{i}", s["ids"], s["start"], asked["top_k"], accepted, asked["base_weights"])
            for i, s in enumerate(asked["sequences"])
        ]
        outcomes = await _run(server, jobs, asked["deadline_s"])
        if ended := [outcome for outcome in outcomes if outcome.finish_reason == ABORTED]:
            raise Conflict(f"The scoring was ended: {ended[0].error}")
        scores = [{"logps": o.logps, "top": _top(o), "version": o.version} for o in outcomes]
        return json.dumps({"request_id": request_id, "scores": scores}).encode()

    return Answer(await server.book.run(request_id, _digest("score", request), work))


async def _completions(server: RolloutServer, request: Request, asked: dict[str, Any]) -> Answer:
    request_id = asked["request_id"] or uuid.uuid4().hex

    async def work() -> bytes:
        server.thread.refuse_without_room(sum(prompt["n"] for prompt in asked["prompts"]))
        jobs = [job for i, prompt in enumerate(asked["prompts"]) for job in _jobs(server, request_id, i, prompt, asked)]
        outcomes = await _run(server, jobs, asked["deadline_s"])
        rest = iter(outcomes)
        groups = [[_completion(server, next(rest), asked) for _ in range(p["n"])] for p in asked["prompts"]]
        answer = {"request_id": request_id, "completions": groups, "logprobs_mode": server.engine.info.logprobs_mode}
        if any(prompt.get("messages") or prompt.get("text") for prompt in asked["prompts"]):
            answer["prompt_ids"] = [list(prompt["ids"]) for prompt in asked["prompts"]]
        return json.dumps(answer).encode()

    return Answer(await server.book.run(request_id, _digest("generate", request), work))


def _jobs(server: RolloutServer, request_id: str, i: int, prompt: dict[str, Any], asked: dict[str, Any]) -> list[Job]:
    seeds = prompt["seeds"] or (None,) * prompt["n"]
    if len(seeds) != prompt["n"]:
        raise FieldError(f"Prompt {i} has n = {prompt['n']} and {len(seeds)} seeds.")
    room = server.engine.info.context_length - len(prompt["ids"])
    if room < 1 or not prompt["ids"]:
        raise FieldError(
            f"Prompt {i} has {len(prompt['ids'])} tokens; the context is {server.engine.info.context_length} and one token "
            "at least must fit behind it."
        )
    bias = tuple((int(token), value) for token, value in asked["sampling"]["logit_bias"])
    common = Sampling(**(asked["sampling"] | {"logit_bias": bias}))
    most = min(prompt["max_tokens"] or common.max_tokens, room)
    accepted = Accepted(asked["accept"]["min"], asked["accept"]["max"])
    return [
        GenerateJob(
            f"{request_id}/{i}/{j}",
            prompt["ids"],
            dataclasses.replace(common, max_tokens=most, seed=seed),
            accepted,
            asked["top_logprobs"],
            asked["base_weights"],
        )
        for j, seed in enumerate(seeds)
    ]


async def _run(server: RolloutServer, jobs: Sequence[Job], seconds: float) -> list[Outcome]:
    """The outcomes, in the order of the jobs. Where one is refused all are ended and the refusal is raised."""
    server.refuse_if_stopping()
    loop = asyncio.get_running_loop()
    waits: list[asyncio.Future[Outcome]] = []
    try:
        async with asyncio.timeout(seconds):
            futures = [loop.create_future() for _ in jobs]
            server.thread.submit([(job, _deliver(loop, future)) for job, future in zip(jobs, futures)])
            waits = futures
            outcomes = []
            for future in waits:
                outcomes.append(await future)
                _raise_refusal(outcomes[-1])
            return outcomes
    except TimeoutError as error:
        raise DeadlinePassed(f"The completions were not done within {seconds:g} s, and were ended.") from error
    finally:
        unfinished = [job.job_id for job, future in zip(jobs, waits) if not future.done() or future.cancelled()]
        if unfinished:
            server.thread.abort(unfinished, "the request was given up.")


def _deliver(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Outcome]) -> Any:
    def settle(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def done(outcome: Outcome) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    return done


def _raise_refusal(outcome: Outcome) -> None:
    if outcome.finish_reason == ERROR:
        raise REFUSALS.get(outcome.stop_reason, EngineFailed)(outcome.error)


def _completion(server: RolloutServer, outcome: Outcome, asked: dict[str, Any]) -> dict[str, Any]:
    answer = {
        "ids": outcome.ids,
        "logps": outcome.logps,
        "finish_reason": outcome.finish_reason,
        "stop_reason": outcome.stop_reason,
        "spans": outcome.spans,
        "version": outcome.version,
        "error": outcome.error,
    }
    if asked["top_logprobs"]:
        answer["top"] = _top(outcome)
    if asked["text"]:
        answer["text"] = server.engine.decode(outcome.ids)
    return answer


def _top(outcome: Outcome) -> list[dict[str, list[Any]]]:
    return [{"ids": [i for i, _ in place], "logps": [value for _, value in place]} for place in outcome.top]


def _digest(kind: str, request: Request) -> str:
    return hashlib.blake2b(request.body, digest_size=16, person=kind.encode()).hexdigest()
