"""/generate and /score: a body becomes jobs, their outcomes become the answer."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response

from ..bodies import Generate, Prompt, Score, TokenRequest
from ..engine.protocol import ABORTED, ERROR, GenerateJob, Job, Outcome, ScoreJob
from ..engine.shown_images import ShownImage, ShownImages
from ..errors import Busy, Conflict, DeadlinePassed, EngineFailed, FieldError, ImagesMissing, NotReady, PromptDiffers
from ..server import RolloutServer
from ..wire.images import decode_image

REFUSALS = {error.status: error for error in (FieldError, Conflict, Busy, NotReady, PromptDiffers)}
USUAL_SECONDS = 600.0


async def generate(server: RolloutServer, request: Generate) -> Response:
    """Completions of token ids."""
    for i, prompt in enumerate(request.prompts):
        check_ids(server, prompt.ids, f"`ids` of entry {i} of `prompts` of the body")

    async def work(seconds: float) -> dict[str, Any]:
        server.thread.refuse_without_room(sum(prompt.n for prompt in request.prompts))
        jobs = [job for i, prompt in enumerate(request.prompts) for job in _jobs(server, i, prompt, request)]
        rest = iter(await _run(server, jobs, seconds))
        groups = [[_completion(next(rest), request) for _ in range(prompt.n)] for prompt in request.prompts]
        return {"completions": groups, "logprobs_mode": server.engine.info.logprobs_mode}

    return await _once(server, request, work)


async def score(server: RolloutServer, request: Score) -> Response:
    """Log-probs of given tokens under the model at temperature 1, and of the most likely ones, for teachers."""
    if not server.engine.info.capabilities.get("score"):
        raise FieldError("This server cannot score: vLLM has no log-probs of prompts with adapters on `lm_head`.")
    for i, sequence in enumerate(request.sequences):
        check_ids(server, sequence.ids, f"`ids` of entry {i} of `sequences` of the body")
        if not sequence.start < len(sequence.ids):
            raise FieldError(f"Sequence {i} has {len(sequence.ids)} tokens and is to be scored from {sequence.start}.")

    async def work(seconds: float) -> dict[str, Any]:
        server.thread.refuse_without_room(len(request.sequences))
        jobs = [
            ScoreJob(
                f"{request.request_id}/{i}",
                tuple(s.ids),
                s.start,
                request.top_k,
                request.accepted,
                request.base_weights,
            )
            for i, s in enumerate(request.sequences)
        ]
        outcomes = await _run(server, jobs, seconds)
        if ended := [outcome for outcome in outcomes if outcome.finish_reason == ABORTED]:
            raise Conflict(f"The scoring was ended: {ended[0].error}")
        return {"scores": [{"logps": o.logps, "top": _top(o), "version": o.version} for o in outcomes]}

    return await _once(server, request, work)


def check_ids(server: RolloutServer, ids: list[int], where: str) -> None:
    """Whether the model knows these tokens, and its context holds them."""
    info = server.engine.info
    if not 1 <= len(ids) <= info.context_length:
        raise FieldError(f"{where} is not a list of 1 to {info.context_length} token ids.")
    if min(ids) < 0 or max(ids) >= info.vocabulary:
        place = next(i for i, token in enumerate(ids) if not 0 <= token < info.vocabulary)
        raise FieldError(f"Entry {place} of {where} is not a token id from 0 to {info.vocabulary - 1}.")


async def _once(
    server: RolloutServer, request: TokenRequest, work: Callable[[float], Awaitable[dict[str, Any]]]
) -> Response:
    """The answer to a request that is run once, however often it is sent."""
    most = server.options.most_seconds
    seconds = min(USUAL_SECONDS, most) if request.deadline_s is None else request.deadline_s
    if seconds > most:
        raise FieldError(f"`deadline_s` of the body is not a number above 0 up to {most:g}.")

    async def answer() -> bytes:
        return json.dumps({"request_id": request.request_id} | await work(seconds)).encode()

    kind = type(request).__name__.encode()
    digest = hashlib.blake2b(request.model_dump_json().encode(), digest_size=16, person=kind).hexdigest()
    return Response(await server.requests.run(request.request_id, digest, answer), media_type="application/json")


def _jobs(server: RolloutServer, i: int, prompt: Prompt, request: Generate) -> list[Job]:
    seeds, noise = prompt.seeds or (None,) * prompt.n, prompt.noise or (None,) * prompt.n
    for what, given in (("seeds", seeds), ("entries of `noise`", noise)):
        if len(given) != prompt.n:
            raise FieldError(f"Prompt {i} has n = {prompt.n} and {len(given)} {what}.")
    if prompt.noise and not server.engine.info.capabilities.get("counted_noise"):
        raise FieldError(f"Prompt {i} says where its noise begins; this engine draws by seeds.")
    context = server.engine.info.context_length
    room = context - len(prompt.ids)
    if room < 1:
        raise FieldError(
            f"Prompt {i} has {len(prompt.ids)} tokens; the context is {context} and one token at least must fit behind it."
        )
    common, ids, shown = request.sampling.sampling(), tuple(prompt.ids), _shown(server, i, prompt, request)
    most = min(prompt.max_tokens or common.max_tokens, room)
    return [
        GenerateJob(
            f"{request.request_id}/{i}/{j}",
            ids,
            dataclasses.replace(common, max_tokens=most, seed=seed),
            request.accepted,
            request.top_logprobs,
            request.base_weights,
            shown,
            None if begin is None else (begin.base, begin.first_token),
        )
        for j, (seed, begin) in enumerate(zip(seeds, noise))
    ]


def _shown(server: RolloutServer, i: int, prompt: Prompt, request: Generate) -> ShownImages | None:
    """The images that a prompt names; they must have been sent, and lie in its tokens one after the other."""
    if not prompt.images:
        return None
    server.refuse_images(len(prompt.images))
    check_ids(server, request.image_mark, "`image_mark` of the body")
    edges = [0, *(edge for image in prompt.images for edge in (image.start, image.stop)), len(prompt.ids)]
    if edges != sorted(edges) or any(image.start == image.stop for image in prompt.images):
        raise FieldError(f"The images of prompt {i} do not lie one after the other in its {len(prompt.ids)} tokens.")
    kept = [server.images.get(image.key) for image in prompt.images]
    missing = sorted({image.key for image, data in zip(prompt.images, kept) if data is None})
    if missing:
        raise ImagesMissing(f"Prompt {i} shows {len(missing)} images that are not here, {missing[0]} first: PUT them.")
    images = (
        ShownImage(image.key, image.start, image.stop, decode_image(data)) for image, data in zip(prompt.images, kept)
    )
    return ShownImages(tuple(images), tuple(request.image_mark), request.image_options)


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
                outcomes.append(outcome := await future)
                if outcome.finish_reason == ERROR:
                    raise REFUSALS.get(outcome.stop_reason, EngineFailed)(outcome.error)
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


def _completion(outcome: Outcome, request: Generate) -> dict[str, Any]:
    answer = {
        "ids": outcome.ids,
        "logps": outcome.logps,
        "finish_reason": outcome.finish_reason,
        "stop_reason": outcome.stop_reason,
        "spans": outcome.spans,
        "version": outcome.version,
        "error": outcome.error,
    }
    if outcome.policy_logps:
        answer["policy_logps"] = outcome.policy_logps
    return answer | {"top": _top(outcome)} if request.top_logprobs else answer


def _top(outcome: Outcome) -> list[dict[str, list[Any]]]:
    return [{"ids": [i for i, _ in place], "logps": [value for _, value in place]} for place in outcome.top]
