"""Weights by CUDA IPC, between two processes on one GPU: this file is the trainer, and, run as a program, the server.

The server is the real one with the scripted engine, its weights on the GPU, behind a small HTTP server of the standard library, so
that nothing has to be installed. A machine whose driver cannot share memory between processes says so, and the tests that need it
are not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from posttrain.rollout.engines.vllm import weight_senders
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights, common_checksum
from posttrain.rollout.engines.vllm.transport import Deadlines, ServerError, ServerRefused
from posttrain.rollout.engines.vllm.weight_senders import _both
from posttrain.serve.errors import TransportFailed
from posttrain.serve.wire.collective import NCCL, Meeting, available_backends
from posttrain.serve.wire.cuda_ipc import share
from posttrain.serve.wire.host_memory import HostMemory
from posttrain.serve.wire.payload import Manifest, encode_manifest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests-7c1"
NAMES = ("a", "b", "c", "d")
DEADLINES = Deadlines(connect=5, health=10, control=60, part=60, commit=60)


# ---- the server --------------------------------------------------------------------------------------------------------------


def serve(size: int, folder: str) -> None:
    """Print the port, then answer until the process is killed."""
    from posttrain.serve.http.app import build_app
    from posttrain.serve.server import RolloutServer, ServerOptions
    from tests.serve.echo_engine import EchoEngine, numbered_weights

    server = RolloutServer(
        EchoEngine(numbered_weights(0, NAMES, size), device="cuda"), ServerOptions(shared_folder=Path(folder))
    )
    server.start()
    app = build_app(server, TOKEN)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
            scope = {"type": "http", "method": self.command, "path": self.path, "headers": headers, "query_string": b""}
            replies: list[dict] = []

            async def receive() -> dict:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: dict) -> None:
                replies.append(message)

            asyncio.run(app(scope, receive, send))
            self.send_response(replies[0]["status"])
            for name, value in replies[0]["headers"]:
                self.send_header(name.decode(), value.decode())
            self.end_headers()
            self.wfile.write(replies[1]["body"])

        do_GET = do_POST = answer

        def log_message(self, *words: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(listener.server_address[1], flush=True)
    listener.serve_forever()


class Served:
    def __init__(self, folder: Path, size: int = 4) -> None:
        self.blocks, self.size = folder / "blocks", size
        self.log = folder / "server.log"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(size), str(self.blocks)],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        timer = threading.Timer(120, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line.strip(), f"the server did not start: {self.log.read_text()[-3000:]}"
        self.url = f"http://127.0.0.1:{line.strip()}"

    def client(self, way: str) -> ServerClient:
        return ServerClient(self.url, TOKEN, DEADLINES, way)

    def says(self) -> list[int]:
        body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 8}}
        return self.client("http")._post("/generate", body, 30)["completions"][0][0]["ids"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    made = Served(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


def weights(number: int) -> KeptWeights:
    return KeptWeights.of([(name, torch.full((4,), float(number), device="cuda")) for name in NAMES], "blake2b")


def next_version(client: ServerClient) -> int:
    return (client.info().version or 0) + 1


@pytest.fixture(scope="module")
def shares(served):
    """Skips where the driver cannot share memory between processes at all."""
    client = served.client("cuda_ipc")
    try:
        client.push(weights(1), next_version(client), 8)
    except ServerRefused as error:
        if "cannot be read" in str(error) or "cannot be shared" in str(error):
            pytest.skip(f"CUDA IPC does not work on this machine: not run ({error})")
        raise
    return True


# ---- the trainer --------------------------------------------------------------------------------------------------------------


def test_auto_takes_cuda_ipc_or_says_once_why_not(served, caplog):
    client = served.client("auto")
    for number in (1, 2, 3):
        client.push(weights(number), next_version(client), 8)
        assert served.says() == [number] * 8
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    print(f"auto: {client.channel.in_use}; {said}")
    if client.channel.in_use == "cuda_ipc":
        assert said == []
    else:
        assert len(said) == 1
        assert "by cuda_ipc failed; weights go over HTTP instead" in said[0]


@pytest.mark.whole_gpu
def test_versions_arrive_by_cuda_ipc_and_no_memory_is_left_behind(served, shares):
    client = served.client("cuda_ipc")
    for number in range(2, 5):
        client.push(weights(number), next_version(client), 8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for number in range(5, 45):
        client.push(weights(number), next_version(client), 5 + number % 20)
        assert served.says() == [number] * 8
        assert client.channel.in_use == "cuda_ipc"
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before[0] < 1 << 16
    assert before[1] - torch.cuda.mem_get_info()[0] < 64 << 20


def test_places_that_lie_are_refused_and_the_server_lives(served, shares):
    client = served.client("cuda_ipc")
    kept, version = weights(7), next_version(client)
    plan = kept.plan(8)
    buffer = torch.zeros(64, dtype=torch.uint8, device="cuda")
    place = share(buffer)
    before = served.says()
    manifest = encode_manifest(Manifest(version, len(plan), kept.specs))
    client._post("/weights/begin", {"manifest": manifest, "replace": True}, 10)
    head, _ = kept.split_payload(version, plan, 0)
    lies = [
        {"handle": "AAAA"}, {"handle": ""}, {"handle": "A" * 88}, {"gpu": "no-such-gpu"}, {"size": 1}, {"size": 4},
        {"counter": "L2V0Yy9wYXNzd2Q="}, {"counter_offset": 1 << 40}, {"offset": -1}, {"event": "AAAA"}, {"extra": 1},
        {},  # the place is right; the bytes that lie there are not those of the head
    ]  # fmt: skip
    wire = client.channel._wire
    for lie in lies:
        with pytest.raises(ServerRefused) as caught:
            wire.fetch("cuda_ipc", head, place | lie)
        print(lie, caught.value.status, str(caught.value)[-200:])
        assert caught.value.status in (400, 424)
    assert served.says() == before
    client.push(weights(9), version + 1, 8)
    assert served.says() == [9] * 8


def test_bytes_changed_on_the_gpu_are_noticed(served, shares, monkeypatch, caplog):
    client = served.client("cuda_ipc")
    client.push(weights(3), next_version(client), 8)
    real = weight_senders._copy_into

    def damaged(buffer, chunks):
        real(buffer, chunks)
        buffer[2] ^= 1

    monkeypatch.setattr(weight_senders, "_copy_into", damaged)
    client.push(weights(4), next_version(client), 8)
    monkeypatch.undo()
    assert served.says() == [4] * 8
    assert "do not have their checksum" in caplog.text


def test_a_killed_server_is_an_error_of_the_trainer_and_not_a_hang(tmp_path, shares):
    one = Served(tmp_path)
    try:
        client = one.client("cuda_ipc")
        client.push(weights(1), 1, 8)
        one.process.kill()
        one.process.wait(30)
        began = time.monotonic()
        with pytest.raises(ServerError):
            client.push(weights(2), 2, 8)
        assert time.monotonic() - began < 20
    finally:
        one.close()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_group_of_gloo_serves_weights_that_are_on_the_gpu(served):
    client = served.client("collective")
    client.push(weights(6), next_version(client), 8)
    assert client.channel.in_use == "collective"
    assert served.says() == [6] * 8


def test_nccl_that_cannot_form_a_group_is_an_error_and_both_processes_live(served):
    """NCCL does not take one GPU twice. What is shown here: its failure is typed, bounded in time, and kills nobody."""
    if NCCL not in available_backends():
        pytest.skip("this build of torch has no NCCL")
    client = served.client("http")
    wire = client.channel._wire
    key = secrets.token_hex(16)
    meeting = Meeting("127.0.0.1", 9, key, 30)
    where = {"backend": NCCL, "address": meeting.address, "port": meeting.port, "key": key}
    began = time.monotonic()
    try:
        _, pair = _both(lambda: wire.join(where, 30.0), lambda: meeting.pair(NCCL, 30.0, torch.device("cuda", 0)), 30.0)
        print("NCCL formed a group of two processes on one GPU", pair)
    except (TransportFailed, ServerRefused) as error:
        print(f"after {time.monotonic() - began:.1f} s: {error}")
    assert time.monotonic() - began < 45
    client.push(weights(8), next_version(client), 8)
    assert served.says() == [8] * 8
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert not torch.distributed.is_initialized()


@pytest.mark.whole_gpu
def test_how_fast_each_way_is(tmp_path):
    """Numbers to look at, in the output: 1 GiB in buckets of 64 MiB. From the third version on both sides use memory again."""
    size, memory = 1 << 26, HostMemory()
    one = Served(tmp_path, size)
    try:
        for way in ("http", "shared_memory", "cuda_ipc", "collective"):
            client = one.client(way)
            kind = common_checksum([client.info().checksums])
            with contextlib.suppress(ServerRefused):
                for number in (1, 2, 3):
                    tensors = [(name, torch.full((size,), float(number), device="cuda")) for name in NAMES]
                    version = next_version(client)
                    torch.cuda.synchronize()
                    times = [time.perf_counter()]
                    kept = KeptWeights.of(tensors, kind, memory=memory)
                    times.append(time.perf_counter())
                    client.stage(kept, version)
                    times.append(time.perf_counter())
                    client.commit(kept, version)
                    times.append(time.perf_counter())
                    keep, stage, commit = (after - before for before, after in itertools.pairwise(times))
                    print(
                        f"{way}, update {number}: stage {kept.nbytes / stage / 1e9:.2f} GB/s ({stage * 1e3:.0f} ms), "
                        f"KeptWeights.of {keep * 1e3:.0f} ms, commit {commit * 1e3:.0f} ms ({client.channel.in_use}, {kind})"
                    )
                    assert one.says() == [number] * 8
    finally:
        one.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
