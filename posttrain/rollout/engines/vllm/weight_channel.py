"""Which transport takes the weights to one server, and what happens when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from posttrain.core.transport import ServerError, ServerRefused
from posttrain.rollout.engines.vllm.weight_senders import (
    HTTP,
    SENDERS,
    STREAMERS,
    HttpSender,
    Sender,
    Sides,
    Streamer,
    Wire,
)
from posttrain.serve.errors import TransportFailed

log = logging.getLogger(__name__)

AUTO = "auto"
TRANSPORTS = (AUTO, *STREAMERS, *SENDERS)
NOT_OFFERED = 0
"""The "status" of a refusal by a client itself: this kind of server does not do that, now or later."""
WRONG_BYTES, NOT_FETCHED, BUSY = 400, 424, 429
FALLS_BACK = frozenset({WRONG_BYTES, NOT_FETCHED, BUSY})
"""Refusals of a part that may be the fault of its transport: it is sent once more, over HTTP."""


class WeightChannel:
    """Sends parts to one server. A transport that fails is replaced by another, with one sentence in the log.

    A staged version: any thread calls `send`, one thread calls `prepare` before and `end_version` after. A version that is
    streamed straight into the engine: one thread does all of it, with `streamer`.
    """

    def __init__(self, name: str, wire: Wire, wanted: str = AUTO) -> None:
        if wanted not in TRANSPORTS:
            raise ValueError(f"`{wanted}` is not a transport for weights; choose one of {', '.join(TRANSPORTS)}.")
        self._name, self._wire, self._wanted = name, wire, wanted
        self._http = HttpSender(wire, Sides({}, torch.device("cpu")))
        self._sender: Sender | None = None
        self._failed: Sender | None = None  # other threads may still be using it; closed when they have ended
        self._lock = threading.Lock()  # of the step from a transport to HTTP
        self._instance: str | None = None  # of the server's process that the sender speaks to
        self._has_worked = self._ever_worked = False
        self._given_up = False
        self._transport = HTTP  # of the sender
        self._streamer: Streamer | None = None
        self._has_streamed = self._no_streams = False
        self.in_use = HTTP  # for the latest version

    def refuse_if_impossible(self, sides: Sides) -> None:
        """A transport that was asked for by name is used, or it is an error."""
        if self._wanted == AUTO:
            return
        if why_not := (STREAMERS | SENDERS)[self._wanted].why_not(sides):
            raise ServerRefused(
                f"Weights cannot go to {self._name} by {self._wanted}: {why_not} Leave `vllm_weight_transport` at 'auto', or "
                "choose another.",
                NOT_OFFERED,
            )

    def prepare(self, sides: Sides) -> None:
        """Before the parts of a version: have a sender for the process that serves now."""
        self._renew(sides)
        self.in_use = self._transport
        if self._sender is not None:
            return
        self.refuse_if_impossible(sides)
        self._transport = self.in_use = HTTP if self._given_up else self._chosen(sides)
        try:
            self._sender, self._has_worked = SENDERS[self._transport](self._wire, sides), False
            log.info("Weights go to %s by %s.", self._name, self._transport)
        except (TransportFailed, ServerError) as error:
            self._fall_back_or_raise(error)

    def _renew(self, sides: Sides) -> None:
        instance = sides.server.get("instance")
        if instance != self._instance:  # restarted: a group with the old process is useless
            self.close()
            self._instance = instance

    def _chosen(self, sides: Sides) -> str:
        if self._wanted in SENDERS:
            return self._wanted
        return next(name for name, sender in SENDERS.items() if sender.suits(sides))

    # straight into the engine ---------------------------------------------------------------------------------------

    def stream_transport(self, sides: Sides) -> str | None:
        """The transport that takes a version straight into the engine; None: there is none, so it is staged."""
        if self._no_streams or self._wanted in SENDERS:
            return None
        if self._wanted != AUTO:
            return self._wanted if STREAMERS[self._wanted].why_not(sides) is None else None
        return next((name for name, streamer in STREAMERS.items() if streamer.suits(sides)), None)

    def streamer(self, sides: Sides) -> Streamer:
        """Before the parts of a version, for the process that serves now."""
        self._renew(sides)
        self.in_use = self.stream_transport(sides) or self.in_use
        if self._streamer is None:
            self._streamer = STREAMERS[self.in_use](self._wire, sides)
            log.info("Weights go to %s by %s, straight into its engine.", self._name, self.in_use)
        return self._streamer

    def streamed(self) -> None:
        """A version has arrived."""
        self._has_streamed = True

    def stream_failed(self, error: Exception) -> None:
        """The version will be staged, and so will later ones unless streams have worked before."""
        if self._streamer is not None:
            self._streamer.close()
        self._streamer = None
        if self._wanted != AUTO and not self._has_streamed and _falls_back(error):
            raise ServerRefused(
                f"Weights cannot go to {self._name} by {self._wanted}, which `vllm_weight_transport` asks for: {error}",
                NOT_OFFERED,
            ) from error
        self._no_streams = not self._has_streamed and _falls_back(error)
        log.warning(
            "Sending weights to %s by %s failed; this version is staged in the server's host memory instead. %s",
            self._name,
            self.in_use,
            error,
        )

    # staged ---------------------------------------------------------------------------------------------------------

    def send(self, head: bytes, chunks: Sequence[memoryview]) -> Any:
        """What the server answers to the part."""
        sender = self._sender
        if sender is None or self._transport == HTTP or not any(len(chunk) for chunk in chunks):
            return self._http.send(head, chunks)
        try:
            answer = sender.send(head, chunks)
            self._has_worked = self._ever_worked = True
            return answer
        except (TransportFailed, ServerError) as error:
            with self._lock:
                if sender is self._sender:
                    self._failed = sender
                    self._fall_back_or_raise(error)
                elif not _falls_back(error):
                    raise
        return self._http.send(head, chunks)  # also where another part has found out, and reported it

    def _fall_back_or_raise(self, error: Exception) -> None:
        transport, worked = self._transport, self._has_worked
        self._sender, self._transport, self.in_use = None, HTTP, HTTP
        if not _falls_back(error):
            raise error  # the server itself is gone, slow, or would refuse it over HTTP, too
        if not self._ever_worked and self._wanted != AUTO:
            raise ServerRefused(
                f"Weights cannot go to {self._name} by {transport}, which `vllm_weight_transport` asks for: {error}",
                NOT_OFFERED,
            ) from error
        self._given_up = not worked and getattr(error, "status", None) != BUSY
        rest = "the rest of this version goes" if worked else "weights go"
        log.warning("Sending weights to %s by %s failed; %s over HTTP instead. %s", self._name, transport, rest, error)

    def end_version(self) -> None:
        """After the parts of a version: free what the next one does not need, and a transport that failed."""
        for sender in (self._http, self._sender):
            if sender is not None:
                sender.free_buffers()
        failed, self._failed = self._failed, None
        if failed is not None:
            failed.close()

    def close(self) -> None:
        """Free blocks, buffers and groups; the next version begins with new ones."""
        transports = (self._sender, self._failed, self._streamer)
        self._sender = self._failed = self._streamer = None
        self._transport = self.in_use = HTTP
        for transport in transports:
            if transport is not None:
                transport.close()


def _falls_back(error: Exception) -> bool:
    return not isinstance(error, ServerError) or (isinstance(error, ServerRefused) and error.status in FALLS_BACK)
