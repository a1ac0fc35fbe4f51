"""Every route there is. The application is built from this table and from nothing else."""

from __future__ import annotations

from . import control, generation
from .asgi import Route
from .server import ServerOptions
from .transports import MOST_FETCH_SECONDS

PARTS_AT_ONCE = 8


def _json(options: ServerOptions) -> int:
    return options.most_json_bytes


def _small(options: ServerOptions) -> int:
    return 1 << 16


def _part(options: ServerOptions) -> int:
    return options.most_part_bytes


def _long(options: ServerOptions) -> float:
    return options.most_seconds + 30.0  # the handlers end earlier, by the deadline in the body


def _fetch(options: ServerOptions) -> float:
    return MOST_FETCH_SECONDS + 30.0  # likewise


ROUTES = (
    Route("GET", "/health", control.health, seconds=lambda options: 10.0),
    Route("GET", "/ready", control.ready, seconds=lambda options: 10.0),
    Route("GET", "/info", control.info, seconds=lambda options: 10.0),
    Route("GET", "/metrics", control.metrics, seconds=lambda options: 10.0),
    Route("POST", "/generate", generation.generate, _json, _long),
    Route("POST", "/chat", generation.chat, _json, _long),
    Route("POST", "/score", generation.score, _json, _long),
    Route("POST", "/weights/begin", control.weights_begin, _json, at_once=4),
    Route("POST", "/weights/part", control.weights_part, _part, lambda options: 600.0, at_once=PARTS_AT_ONCE),
    Route("POST", "/weights/fetch", control.weights_fetch, _json, _fetch, at_once=4),
    Route("POST", "/weights/collective", control.weights_collective, _small, _fetch, at_once=2),
    Route("POST", "/weights/commit", control.weights_commit, _json, _long, at_once=4),
    Route("POST", "/weights/abort", control.weights_abort, _small),
    Route("POST", "/adapters/load", control.adapters_load, _small),
    Route("POST", "/adapters/unload", control.adapters_unload, _small),
    Route("POST", "/reset_prefix_cache", control.reset_prefix_cache, _small),
    Route("POST", "/sleep", control.sleep, _small),
    Route("POST", "/wake", control.wake, _small),
    Route("POST", "/shutdown", control.shutdown, _small),
)
