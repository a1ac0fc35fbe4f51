"""Handlers for everything but tokens: state, weights, sleep, shutdown."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse, Response
from torch import Tensor

from .. import bodies
from ..errors import FieldError, NotReady, PayloadError, TooLarge
from ..server import RolloutServer
from ..wire.images import check_image, image_key
from ..wire.payload import Buffer

CALL_SECONDS = 50.0

Fields = dict[str, Any]


async def health(server: RolloutServer, _: bytearray) -> Response:
    """200 while the process can do its work at all, ready or not."""
    server.updater.tick()
    why = server.unhealthy_reason()
    return JSONResponse({"healthy": why is None, "error": why, "time": time.time()}, 503 if why else 200)


async def ready(server: RolloutServer, _: bytearray) -> Response:
    """200 while requests are answered."""
    why = server.why_not_ready()
    fields = {"ready": why is None, "error": why, "version": server.versions.serving.version}
    return JSONResponse(fields, 503 if why else 200)


async def info(server: RolloutServer, _: bytearray) -> Fields:
    return server.info()


async def metrics(server: RolloutServer, _: bytearray) -> Response:
    text, kind = server.metrics.text()
    return Response(text, media_type=kind)


async def put_image(server: RolloutServer, body: bytearray, key: str) -> Fields:
    """An image that prompts may name from now on, until others have pushed it out. `key`: the sha-256 of the body."""
    server.refuse_if_stopping()
    server.refuse_images(1)
    data = bytes(body)
    found = await asyncio.to_thread(image_key, data)
    if found != key:
        raise PayloadError(f"The sha-256 of the {len(data)} bytes that came is {found}, and not the key in the path.")
    check_image(data)
    if len(data) > server.images.most_bytes:
        raise TooLarge(
            f"The image has {len(data)} bytes; this server keeps {server.images.most_bytes} of all together."
        )
    server.images.put(key, data, len(data))
    return {"images": len(server.images)}


async def weights_begin(server: RolloutServer, body: bodies.Begin) -> Fields:
    server.refuse_if_stopping()
    _refuse_without(server, "weights" if body.adapter_config is None else "adapters")
    manifest = await asyncio.to_thread(body.manifest.manifest)
    return await asyncio.to_thread(server.updater.begin, manifest, body.replace, body.rollback, body.adapter_config)


async def weights_part(server: RolloutServer, body: bytearray) -> Fields:
    return await asyncio.to_thread(server.updater.part, body)


async def weights_fetch(server: RolloutServer, body: bodies.Fetch) -> Fields:
    """A part whose head is in the body, and whose data is in a shared block."""

    def fetch(nbytes: int) -> Buffer:
        return server.transports.receive(body.transport, body.place, nbytes, body.deadline_s)

    return await asyncio.to_thread(server.updater.fetched, body.head, fetch)


async def weights_stream(server: RolloutServer, body: bodies.OpenStream) -> Fields:
    """Open a version that goes straight into the engine; its parts follow, and a commit waits for its end."""
    server.refuse_if_stopping()
    _refuse_without(server, "weights")
    _refuse_asleep(server)
    return await asyncio.to_thread(
        server.updater.open_stream, body.version, body.rollback, body.in_flight, body.deadline_s
    )


async def weights_stream_part(server: RolloutServer, body: bodies.StreamPart) -> Fields:
    def receive(nbytes: int) -> Tensor:
        return server.transports.receive(body.transport, body.place, nbytes, body.deadline_s)

    return await asyncio.to_thread(server.updater.stream_part, body, receive)


async def weights_collective(server: RolloutServer, body: bodies.Rendezvous) -> Fields:
    """Join the group that a trainer makes for its weights; answered when both are in it."""
    server.refuse_if_stopping()
    return await asyncio.to_thread(server.transports.join, body)


async def weights_commit(server: RolloutServer, body: bodies.Commit) -> Fields:
    _refuse_asleep(server)
    return await asyncio.to_thread(server.updater.commit, body.version, body.in_flight, body.deadline_s)


async def weights_abort(server: RolloutServer, body: bodies.Abort) -> Fields:
    return await asyncio.to_thread(server.updater.abort, body.version, body.reason)


async def sleep(server: RolloutServer, body: bodies.Sleep) -> Fields:
    """Level 1: weights go to host memory; level 2: weights are dropped, and must be sent again after waking."""
    why_not = await asyncio.to_thread(server.thread.sleep, body.level, CALL_SECONDS)
    return {"sleeping": why_not is None, "reason": why_not}


async def wake(server: RolloutServer, body: bodies.Wake) -> Fields:
    await asyncio.to_thread(server.thread.wake, body.tags, CALL_SECONDS)
    return {"sleeping": server.thread.sleeping is not None}


async def shutdown(server: RolloutServer, body: bodies.Shutdown) -> Response:
    """Answer first, then end: running requests have `deadline_s`."""
    server.stopping = True
    server.stopper = asyncio.ensure_future(server.stop_gracefully(body.deadline_s))
    return JSONResponse({"stopping": True, "in_flight": server.thread.in_flight}, 202)


def _refuse_asleep(server: RolloutServer) -> None:
    if server.thread.sleeping and "weights" in server.thread.sleeping_parts:
        raise NotReady("The weights are asleep; wake them (tags: weights) before an update ends.")


def _refuse_without(server: RolloutServer, capability: str) -> None:
    if not server.engine.info.capabilities.get(capability):
        raise FieldError(f"The engine of this server cannot take {capability}; see `notes` of /info.")
