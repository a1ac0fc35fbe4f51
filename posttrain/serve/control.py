"""Handlers that are not about tokens: state, weights, adapters, sleep, the end."""

from __future__ import annotations

import asyncio
import time

from . import fields as f
from .adapters import confined
from .asgi import TEXT, Answer, Request, as_json
from .engine_thread import DRAIN, IN_FLIGHT, KEEP
from .errors import Conflict, FieldError, NotReady
from .fields import Field, read_fields
from .payload import MAX_HEADER_BYTES, MAX_VERSION, PREFIX_BYTES, Buffer, parse_checksums, parse_manifest
from .server import RolloutServer
from .transports import MOST_FETCH_SECONDS, RECEIVERS

CALL_SECONDS = 50.0
VERSION = Field(f.integer(0, MAX_VERSION))
SECONDS = Field(f.number(0.0, 3600.0), 60.0)


async def health(server: RolloutServer, request: Request) -> Answer:
    """200 while the process can do its work at all, ready or not."""
    server.updater.tick()
    trouble = server.trouble()
    return as_json({"healthy": trouble is None, "error": trouble, "time": time.time()}, 200 if trouble is None else 503)


async def ready(server: RolloutServer, request: Request) -> Answer:
    """200 while requests are answered."""
    why = server.why_not_ready()
    return as_json(
        {"ready": why is None, "error": why, "version": server.versions.serving.version}, 503 if why else 200
    )


async def info(server: RolloutServer, request: Request) -> Answer:
    return as_json(server.info())


async def metrics(server: RolloutServer, request: Request) -> Answer:
    return Answer(server.refresh_metrics().encode(), kind=TEXT)


async def weights_begin(server: RolloutServer, request: Request) -> Answer:
    table = {
        "manifest": Field(f.any_object),
        "replace": Field(f.boolean, False),
        "rollback": Field(f.boolean, False),
        "adapter_config": Field(f.optional(f.any_object), None),
    }
    asked = read_fields(await request.json(), table)
    server.refuse_if_stopping()
    _refuse_without(server, "weights" if asked["adapter_config"] is None else "adapters")
    manifest = await asyncio.to_thread(parse_manifest, asked["manifest"])
    state = server.updater.begin(manifest, asked["replace"], asked["rollback"], asked["adapter_config"])
    return as_json(state)


async def weights_part(server: RolloutServer, request: Request) -> Answer:
    return as_json(await asyncio.to_thread(server.updater.part, request.body))


async def weights_fetch(server: RolloutServer, request: Request) -> Answer:
    """A part whose head is in the body, and whose data is somewhere else: a shared block, memory of a GPU, a group."""
    table = {
        "transport": Field(f.one_of(*RECEIVERS)),
        "head": Field(f.base64_bytes(MAX_HEADER_BYTES + PREFIX_BYTES)),
        "place": Field(f.any_object),
        "deadline_s": Field(f.number(0.0, MOST_FETCH_SECONDS, above=True), 60.0),
    }
    asked = read_fields(await request.json(), table)

    def fetch(nbytes: int) -> Buffer:
        return server.transports.fetch(asked["transport"], asked["place"], nbytes, asked["deadline_s"])

    return as_json(await asyncio.to_thread(server.updater.fetched, asked["head"], fetch))


async def weights_collective(server: RolloutServer, request: Request) -> Answer:
    """Join the group that a trainer makes for its weights; answered when both are in it."""
    meeting = await request.json()
    server.refuse_if_stopping()
    return as_json(await asyncio.to_thread(server.transports.join, meeting))


async def weights_commit(server: RolloutServer, request: Request) -> Answer:
    table = {
        "version": VERSION,
        "checksums": Field(f.any_object, {}),
        "in_flight": Field(f.one_of(*IN_FLIGHT), DRAIN),
        "deadline_s": SECONDS,
    }
    asked = read_fields(await request.json(), table)
    checksums = parse_checksums(asked["checksums"])
    if server.thread.sleeping and "weights" in server.thread.sleeping_parts:
        raise NotReady("The weights are asleep; wake them (tags: weights) before the commit.")
    state = await asyncio.to_thread(
        server.updater.commit, asked["version"], checksums, asked["in_flight"], asked["deadline_s"]
    )
    return as_json(state)


async def weights_abort(server: RolloutServer, request: Request) -> Answer:
    asked = read_fields(await request.json(), {"version": VERSION})
    return as_json(server.updater.abort(asked["version"]))


async def adapters_load(server: RolloutServer, request: Request) -> Answer:
    """Let the adapter in a folder serve, as this version."""
    table = {"path": Field(f.text(4096, 1)), "name": Field(f.identifier), "version": VERSION}
    asked = read_fields(await request.json(), table)
    _refuse_without(server, "adapters")
    path = confined(server.adapters.folder, asked["path"])
    name, version = asked["name"], asked["version"]
    await asyncio.to_thread(
        server.thread.flip,
        lambda engine: server.adapters.load(engine, path, name, version, None),
        version,
        KEEP,
        CALL_SECONDS,
    )
    return as_json({"adapter": name, "version": version})


async def adapters_unload(server: RolloutServer, request: Request) -> Answer:
    """Back to the base weights."""
    read_fields(await request.json_or_empty(), {})
    await asyncio.to_thread(server.thread.flip, server.adapters.unload, 0, KEEP, CALL_SECONDS)
    return as_json({"adapter": None, "version": server.versions.serving.version})


async def reset_prefix_cache(server: RolloutServer, request: Request) -> Answer:
    asked = read_fields(await request.json_or_empty(), {"running": Field(f.boolean, False)})
    running = asked["running"]
    done = await asyncio.to_thread(server.thread.call, lambda engine: engine.reset_prefix_cache(running), CALL_SECONDS)
    if not done:
        raise Conflict("Requests that run hold cached keys and values; let them end, or say `running`.")
    return as_json({"reset": True})


async def sleep(server: RolloutServer, request: Request) -> Answer:
    """Level 1: weights go to host memory; level 2: weights are dropped, and must be sent again after waking."""
    asked = read_fields(await request.json_or_empty(), {"level": Field(f.integer(1, 2), 1)})
    why_not = await asyncio.to_thread(server.thread.sleep, asked["level"], CALL_SECONDS)
    return as_json({"sleeping": why_not is None, "reason": why_not})


async def wake(server: RolloutServer, request: Request) -> Answer:
    tags = Field(f.optional(f.list_of(f.one_of("weights", "kv_cache"), 2, 1)), None)
    asked = read_fields(await request.json_or_empty(), {"tags": tags})
    await asyncio.to_thread(server.thread.wake, asked["tags"], CALL_SECONDS)
    return as_json({"sleeping": server.thread.sleeping is not None})


async def shutdown(server: RolloutServer, request: Request) -> Answer:
    """Answer first, then end: running requests have `deadline_s`."""
    asked = read_fields(await request.json_or_empty(), {"deadline_s": SECONDS})
    server.stopping = True
    server.stopper = asyncio.ensure_future(server.stop_gracefully(asked["deadline_s"]))
    return as_json({"stopping": True, "in_flight": server.thread.in_flight}, 202)


def _refuse_without(server: RolloutServer, capability: str) -> None:
    if not server.engine.info.capabilities.get(capability):
        raise FieldError(f"The engine of this server cannot take {capability}; see `notes` of /info.")
