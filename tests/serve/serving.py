"""A running engine thread with a scripted engine, and updates as a trainer would send them."""

from __future__ import annotations

import threading

import torch

from posttrain.rollout.engines.vllm.kept_weights import plan_parts
from posttrain.serve.engine.engine_thread import EngineThread
from posttrain.serve.engine.protocol import Accepted, GenerateJob, Sampling
from posttrain.serve.engine.versions import Serving, Versions
from posttrain.serve.weights.staging import Part, parse_head
from posttrain.serve.weights.update import UpdateLimits, Updater
from posttrain.serve.wire.payload import MAX_VERSION, Manifest, TensorSpec, checksum, split_part
from tests.serve.echo_engine import EchoEngine, numbered_weights

ANY = Accepted(0, MAX_VERSION)


def encoded(version: int, part: int, parts: int, pieces, kind: str = "blake2b") -> bytes:
    """The body of a request that brings one part, from (tensor, offset in its bytes, bytes)."""
    return joined(split_part(version, part, parts, [(*piece, checksum(piece[2], kind)) for piece in pieces]))


def joined(head_and_data) -> bytes:
    head, chunks = head_and_data
    return b"".join([head, *chunks])


def parsed(body) -> Part:
    """As the server reads such a body."""
    head, data = parse_head(body)
    return head.with_data(data)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def update_of(version: int, weights: dict[str, torch.Tensor], bucket: int = 24):
    """(manifest, payloads of the parts)."""
    data = {name: raw(tensor) for name, tensor in weights.items()}
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), checksum(data[name]))
        for name, t in weights.items()
    ]
    plan = plan_parts(specs, bucket)
    payloads = [
        encoded(
            version, i, len(plan), [(s.spec, s.offset, data[s.spec.name][s.offset : s.offset + s.length]) for s in part]
        )
        for i, part in enumerate(plan)
    ]
    return Manifest(version, len(plan), tuple(specs)), payloads


class Rig:
    """Engine, thread, versions and updater, started."""

    def __init__(self, limits: UpdateLimits | None = None, clock=None, **engine_options) -> None:
        self.engine = EchoEngine(numbered_weights(0), **engine_options)
        self.versions = Versions(Serving(0))
        self.thread = EngineThread(self.engine, self.versions)
        more = {"clock": clock} if clock else {}
        self.updater = Updater(self.engine, self.versions, self.thread, self._no_adapter, limits, **more)
        self.thread.start()

    @staticmethod
    def _no_adapter(*_):
        raise AssertionError("no adapters here")

    def submit(self, job_id: str, tokens: int = 8, accepted: Accepted = ANY):
        """A function that waits for the outcome."""
        box, done = [], threading.Event()
        job = GenerateJob(job_id, (1, 2, 3), Sampling(max_tokens=tokens), accepted)
        self.thread.submit([(job, lambda outcome: (box.append(outcome), done.set()))])

        def wait():
            assert done.wait(10), "no outcome within 10 s"
            return box[0]

        return wait

    def completion(self, job_id: str, tokens: int = 8):
        return self.submit(job_id, tokens)()

    def push(self, version: int, in_flight: str = "drain", seconds: float = 5.0, **options):
        manifest, payloads = update_of(version, numbered_weights(version), **options)
        self.updater.begin(manifest, replace=False, rollback=False, adapter=None)
        for payload in payloads:
            self.updater.part(payload)
        return self.updater.commit(version, in_flight, seconds)

    def close(self) -> None:
        self.thread.stop()
