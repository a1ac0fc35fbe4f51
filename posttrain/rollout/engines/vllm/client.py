"""The client of `posttrain vllm-serve`: one method per thing that the server does, checked answers, typed errors."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posttrain.core.transport import ServerAnswer, ServerError, ServerRefused, Token, Transport, checked
from posttrain.rollout.engines.protocol import LENGTH, STOP, SamplingParams
from posttrain.rollout.engines.vllm.kept_weights import BUCKET_BYTES, KeptWeights
from posttrain.rollout.engines.vllm.pictures import KEPT_KEYS, SentImages
from posttrain.rollout.engines.vllm.transport import Deadlines, parallel_calls
from posttrain.rollout.engines.vllm.weight_channel import AUTO, NOT_OFFERED, WeightChannel
from posttrain.rollout.engines.vllm.weight_senders import PARALLEL_PARTS, Sides, Streamer, Wire
from posttrain.serve.errors import ImagesMissing, TransportFailed
from posttrain.serve.recent import Recent
from posttrain.serve.wire.payload import CUDA_IPC, MAX_REASON, Manifest, encode_manifest

ABORTED = "aborted"
PROTOCOL = 3
MARGIN_SECONDS = 10.0
"""How much longer than the server itself the client waits: the server's own refusal says more than a silence."""
IMAGE_TRIES = 5
NO_ROOM = 507
"""The status of a refusal that this client makes itself: the server does not keep images for as long as a prompt needs them."""
DRAIN, CONTINUE, ABORT = "drain", "continue", "abort"
"""What a commit does with requests that still run: let them end first, continue them with the new weights, or end them."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says about itself."""

    model: str
    engine: str
    context_length: int
    vocabulary: int | None
    logprobs_mode: str
    version: int | None  # of the weights that serve
    fingerprint: str | None  # None: as loaded from the model's folder
    not_ready: str | None = None
    capabilities: dict[str, bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checksums: tuple[str, ...] = ("blake2b",)
    part_bytes: int = BUCKET_BYTES
    most_seconds: float = math.inf
    in_flight: int = 0
    dtype: str | None = None  # in which it computes
    transports: dict[str, Any] = field(default_factory=dict)  # by which it takes weights, see `weight_senders`
    world_size: int = 1  # GPUs that hold its model, the first of those that it sees
    images: int = 0  # most in a prompt; 0: it is shown none

    @property
    def gpus(self) -> list[str]:
        """Ids of the GPUs that it works on; none where it does not say."""
        return (self.transports.get(CUDA_IPC) or {}).get("gpus", [])[: self.world_size]


@dataclass(frozen=True)
class GenerateRequest:
    """One completion. Sent again under the same id it is not written again but joined, or its answer given again."""

    request_id: str
    ids: Sequence[int]
    seed: int
    max_tokens: int
    params: SamplingParams
    version: int  # of the weights that must write it, or begin it, as the servers count
    images: SentImages | None = None
    may_change: bool = False  # newer weights, which come while it is being written, may continue it
    noise: tuple[int, int] | None = None  # (base, number of the first token), for servers that draw as our engine does


@dataclass(frozen=True)
class ServerCompletion:
    """A completion as it came from a server."""

    ids: list[int]
    logps: list[float]
    finish_reason: str  # stop, length or aborted
    version: int | None
    logprobs_mode: str
    error: str | None = None
    spans: tuple[tuple[int, int], ...] | None = (
        None  # (one past the last token, version); None: the server does not say
    )
    policy_logps: list[float] | None = None  # where the server knows them, and they are not `logps`


class Client:
    """Calls of one server, each with its deadline. Any number of threads may use it."""

    def __init__(self, base_url: str, token: Token, deadlines: Deadlines | None) -> None:
        self.deadlines = deadlines or Deadlines()
        self._transport = Transport(base_url, token, self.deadlines.connect)
        self.name = str(self._transport.address)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def cancel_calls(self, why: str) -> None:
        """End all calls that are under way, with ServerGone."""
        self._transport.cancel_calls(why)

    def close(self) -> None:
        """Close the connections. A later call opens what it needs."""
        self.cancel_calls("this client was closed.")

    def can_stream(self, device: torch.device) -> bool:
        """Whether weights on that device can go straight into the server's engine."""
        return False

    def why_no_images(self, info: ServerInfo, most: int) -> str | None:
        """Why prompts with up to so many images cannot be sent there; None: they can."""
        raise NotImplementedError

    def _checked(self, path: str, read: Callable[[Any], Any], value: Any) -> Any:
        return checked(f"{path} of {self.name}", read, value)


class ServerClient(Client):
    """Calls of a `posttrain vllm-serve`."""

    def __init__(
        self,
        base_url: str,
        token: Token = None,
        deadlines: Deadlines | None = None,
        weight_transport: str = AUTO,
    ) -> None:
        super().__init__(base_url, token, deadlines)
        address = self._transport.address
        wire = Wire(self._post, address.host, address.port, self.deadlines.part)
        self.channel = WeightChannel(self.name, wire, weight_transport)
        self._transports: dict[str, Any] = {}  # as the server last reported
        self._streamer: Streamer | None = None  # of the version that is on its way
        self._most_seconds, self._counts_noise = math.inf, False
        self._sending_images = threading.Lock()
        self._sent_images: Recent[str, float] = Recent(KEPT_KEYS, KEPT_KEYS)  # as far as this client knows

    def close(self) -> None:
        """Also of shared memory and groups."""
        super().close()
        self.channel.close()

    def use_token(self, token: str) -> None:
        """From now on: the server was restarted."""
        self._transport.use_token(token)

    def _get(self, path: str, seconds: float) -> Any:
        return self._transport.ask("GET", path, None, seconds)

    def _post(self, path: str, body: Any, seconds: float) -> Any:
        return self._transport.ask("POST", path, body, seconds)

    # state ----------------------------------------------------------------------------------------------------------

    def health(self) -> None:
        """Returns where the process can do its work at all; ServerRefused (503) says why it cannot."""
        answer = self._get("/health", self.deadlines.health)
        self._checked("/health", lambda fields: bool(fields["healthy"]), answer)

    def info(self) -> ServerInfo:
        info = self._checked("/info", _info, self._get("/info", self.deadlines.control))
        self._most_seconds, self._transports = info.most_seconds, info.transports
        self._counts_noise = bool(info.capabilities.get("counted_noise"))
        return info

    def sleep(self, level: int) -> str | None:
        """None, or the sentence that says why no memory was given back."""
        answer = self._post("/sleep", {"level": level}, self.deadlines.control)
        return self._checked("/sleep", lambda fields: fields["reason"], answer)

    def wake(self) -> None:
        self._post("/wake", {}, self.deadlines.control)

    def shutdown(self, seconds: float) -> None:
        """Take nothing new, let running requests end for at most `seconds`, then end the process."""
        self._post("/shutdown", {"deadline_s": seconds}, self.deadlines.control)

    # tokens ---------------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> ServerCompletion:
        if request.images is None:
            return self._generate(request)
        for _ in range(IMAGE_TRIES):
            sent = self._send_images(request.images)
            try:
                return self._generate(request)
            except ServerRefused as refusal:
                if refusal.kind != ImagesMissing.__name__:
                    raise
                # It was restarted, or others have pushed them out. What another thread has sent again meanwhile is there.
                self._sent_images.forget([key for key, when in sent.items() if self._sent_images.get(key) == when])
        raise ServerRefused(
            f"{self.name} was sent the {len(request.images.keys)} images of a prompt {IMAGE_TRIES} times and has dropped some of "
            "them each time before they were used: too many are in flight for the memory that it keeps images in.",
            NO_ROOM,
        )

    def _send_images(self, images: SentImages) -> dict[str, float]:
        """Those that it does not have; one at a time, as all samples of a group ask for the same. Key -> when it was sent."""
        sent: dict[str, float] = {}
        for key in images.keys:
            with self._sending_images:
                if self._sent_images.get(key) is None:
                    answer = self._transport.ask("PUT", f"/images/{key}", images.read(key), self.deadlines.part)
                    self._checked("/images", lambda fields: int(fields["images"]), answer)
                    self._sent_images.put(key, time.monotonic(), 1)
                sent[key] = self._sent_images.get(key) or 0.0
        return sent

    def why_no_images(self, info: ServerInfo, most: int) -> str | None:
        if info.images >= most and info.capabilities.get("images"):
            return None
        found = f"with --images {info.images}" if info.images else "without --images"
        return f"{self.name} was started {found}. Start it with `posttrain vllm-serve --images {most}`. {' '.join(info.notes)}"

    def _generate(self, request: GenerateRequest) -> ServerCompletion:
        seconds = min(self.deadlines.completion, self._most_seconds)
        body = {
            "request_id": request.request_id,
            "prompts": [{"ids": list(request.ids), "seeds": [request.seed], "max_tokens": request.max_tokens}],
            "sampling": sampling_fields(request.params),
            "accept": {"min": request.version} | ({} if request.may_change else {"max": request.version}),
            "deadline_s": seconds,
        }
        if request.noise is not None and self._counts_noise:
            body["prompts"][0]["noise"] = [dict(zip(("base", "first_token"), request.noise))]
        if request.images is not None:
            body["prompts"][0]["images"] = request.images.entries
            body |= {"image_mark": list(request.images.mark), "image_options": dict(request.images.options)}
        answer = self._post("/generate", body, seconds + MARGIN_SECONDS)
        return self._checked("/generate", lambda fields: _written(fields, request), answer)

    def score(
        self, sequences: Sequence[Sequence[int]], version: int | None = None, start: int = 1
    ) -> list[list[float]]:
        """The log-probs of the tokens from number `start` on of each sequence, at temperature 1."""
        seconds = min(self.deadlines.completion, self._most_seconds)
        body: dict[str, Any] = {
            "request_id": f"score-{uuid.uuid4().hex}",
            "sequences": [{"ids": [int(token) for token in ids], "start": start} for ids in sequences],
            "deadline_s": seconds,
        }
        if version is not None:
            body["accept"] = {"min": version, "max": version}
        answer = self._post("/score", body, seconds + MARGIN_SECONDS)
        wanted = [len(ids) - start for ids in sequences]
        return self._checked("/score", lambda fields: _scores(fields, wanted, version), answer)

    # weights --------------------------------------------------------------------------------------------------------

    def stage(self, kept: KeptWeights, version: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Send all parts of a version. What serves is not touched."""
        plan = kept.plan(bucket_bytes)
        manifest = encode_manifest(Manifest(version, len(plan), kept.specs))
        body = {"manifest": manifest, "replace": True, "rollback": True, "adapter_config": kept.adapter_config}
        self._post("/weights/begin", body, self.deadlines.control)
        if not self._transports:
            self.info()
        self.channel.prepare(Sides(self._transports, kept.device))
        missing = [len(plan)]

        def send(number: int) -> None:
            state = self.channel.send(*kept.split_payload(version, plan, number))
            missing.append(self._checked("/weights/part", lambda fields: int(fields["missing"]), state))

        try:
            parallel_calls(len(plan), send, PARALLEL_PARTS)
        finally:
            self.channel.end_version()
        if min(missing):  # answers to parts that went side by side come in any order
            raise ServerAnswer(
                f"{self.name} was sent all parts of version {version} and says that {min(missing)} are missing."
            )

    def commit(self, kept: KeptWeights, version: int, in_flight: str = DRAIN) -> None:
        """Let the staged version serve; returns when it does."""
        self._commit(version, kept.fingerprint, in_flight)

    def _commit(self, version: int, fingerprint: str, in_flight: str = DRAIN) -> None:
        seconds = self.deadlines.commit
        body = {"version": version, "in_flight": in_flight, "deadline_s": min(seconds / 2, 3600.0)}
        state = self._post("/weights/commit", body, seconds)
        serves = self._checked(
            "/weights/commit", lambda fields: (fields["serving_version"], fields["fingerprint"]), state
        )
        if serves != (version, fingerprint):
            raise ServerAnswer(
                f"{self.name} took version {version} with the fingerprint {fingerprint} and says that version "
                f"{serves[0]} with {serves[1]} serves."
            )

    def can_stream(self, device: torch.device) -> bool:
        if not self._transports:
            self.info()
        return self.channel.stream_transport(Sides(self._transports, device)) is not None

    def open_stream(self, version: int, in_flight: str, device: torch.device) -> None:
        """Announce a version whose parts go straight into the engine; from its first part on nothing else serves."""
        with self._noting_failure():
            self._streamer = self.channel.streamer(Sides(self._transports, device))
            waits = {"in_flight": in_flight, "deadline_s": min(self.deadlines.commit / 2, 3600.0)}
            self._post("/weights/stream", {"version": version, "rollback": True, **waits}, self.deadlines.control)

    def stream_part(self, part: dict[str, Any], data: Tensor) -> None:
        with self._noting_failure():
            self._streamer.send(part, data)

    def commit_stream(self, version: int, fingerprint: str) -> None:
        """Wait until the version serves."""
        with self._noting_failure():
            self._commit(version, fingerprint)
        self.channel.streamed()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (ServerError, TransportFailed) as error:
            self.channel.stream_failed(error)
            raise

    def abort(self, version: int, reason: str = "") -> None:
        """Drop the staged version, or give up the one that is on its way into the engine."""
        self._post("/weights/abort", {"version": version, "reason": reason[:MAX_REASON]}, self.deadlines.control)

    def push(self, kept: KeptWeights, version: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Stage and commit on this server alone."""
        self.stage(kept, version, bucket_bytes)
        self.commit(kept, version)

    def refuse_if_not_offered(self, kept: KeptWeights, info: ServerInfo) -> None:
        """Whether this server takes such an update at all."""
        what = "weights" if kept.adapter_config is None else "adapters"
        if not info.capabilities.get(what):
            notes = " ".join(info.notes) or "Adapters need --adapter-folder at its start."
            raise ServerRefused(f"{self.name} cannot take {what}. {notes}", NOT_OFFERED)
        self.channel.refuse_if_impossible(Sides(info.transports, kept.device))


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """The `sampling` field of a body; every option is written out, so nothing depends on defaults of the server."""
    sent = {name: value for name, value in vars(params).items() if name != "seed"}  # each prompt has a seed of its own
    bias = [[int(token), float(value)] for token, value in params.logit_bias.items()]
    return sent | {"stop_ids": list(params.stop_ids), "stop": list(params.stop), "logit_bias": bias}


INFO: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("model", "engine", "logprobs_mode", "dtype"), str),
    **dict.fromkeys(("context_length", "vocabulary", "in_flight", "world_size"), int),
    **dict.fromkeys(("capabilities", "transports"), dict),
    **dict.fromkeys(("notes", "checksums"), tuple),
    **dict.fromkeys(("fingerprint", "not_ready"), lambda value: value),
    "version": lambda value: None if value is None else int(value),
}
"""How the fields of /info are read."""


def _info(fields: Any) -> ServerInfo:
    if fields["protocol"] != PROTOCOL:
        raise ValueError(f"it speaks protocol {fields['protocol']}, this client {PROTOCOL}")
    limits, found = fields["limits"], {name: read(fields[name]) for name, read in INFO.items()}
    found["images"] = int(fields.get("images", 0))  # servers of before have no such field
    return ServerInfo(**found, part_bytes=int(limits["part_bytes"]), most_seconds=float(limits["seconds"]))


def _written(fields: Any, request: GenerateRequest) -> ServerCompletion:
    """The one completion that was asked for, and nothing else."""
    if fields["request_id"] != request.request_id:
        raise ValueError(f"it is that of request {str(fields['request_id'])[:60]}")
    ((completion,),) = fields["completions"]
    ids, logps = completion["ids"], completion["logps"]
    check_tokens(ids, logps, request.max_tokens)
    reason = completion["finish_reason"]
    if reason not in (STOP, LENGTH, ABORTED) or (not ids and reason != ABORTED):
        raise ValueError(f"it ends with {str(reason)[:60]!r} after {len(ids)} tokens")
    spans = _spans(completion["spans"], len(ids), request)
    policy = completion.get("policy_logps")
    if policy is not None:
        check_tokens(ids, policy, request.max_tokens)
        policy = [float(x) for x in policy]
    mode, error = str(fields["logprobs_mode"]), completion["error"]
    return ServerCompletion(ids, [float(x) for x in logps], reason, completion["version"], mode, error, spans, policy)


def _spans(said: Any, tokens: int, request: GenerateRequest) -> tuple[tuple[int, int], ...]:
    """Which version wrote which tokens: all of them, without a gap, and by weights that were asked for."""
    end, newest, found = 0, request.version, []
    for first, last, version in said:
        if version != request.version and not request.may_change:
            raise ValueError(f"tokens {first} to {last} are of version {version}, and {request.version} was asked for")
        if not isinstance(version, int) or first != end or last <= first or not newest <= version:
            raise ValueError(f"tokens {first} to {last} are of version {version}, after {end} tokens up to {newest}")
        end, newest = last, version
        found.append((last, version))
    if end != tokens:
        raise ValueError(f"it says which weights wrote {end} of {tokens} tokens")
    return tuple(found)


def check_tokens(ids: Any, logps: Any, most: int) -> None:
    """ValueError unless these are at most `most` token ids with a log-prob each (NaN is left to the caller)."""
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise ValueError("its ids are not token ids")
    if len(logps) != len(ids) or not all(type(x) in (int, float) for x in logps):
        raise ValueError(f"it has {len(ids)} tokens and {len(logps)} log-probs")
    if len(ids) > most:
        raise ValueError(f"it has {len(ids)} tokens, more than the {most} allowed")


def _scores(fields: Any, wanted: list[int], version: int | None) -> list[list[float]]:
    scores = [[float(x) for x in entry["logps"]] for entry in fields["scores"]]
    if [len(logps) for logps in scores] != wanted:
        raise ValueError(f"it has log-probs of {[len(logps) for logps in scores]} tokens instead of {wanted}")
    others = {entry["version"] for entry in fields["scores"]} - {version}
    if version is not None and others:
        raise ValueError(f"version {others.pop()} scored, and {version} was asked for")
    return scores
