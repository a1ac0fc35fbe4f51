"""Weights by CUDA IPC, between two processes on one GPU: this file is the trainer, and, run as a program, the server.

The server is the real one with the scripted engine, its weights on the GPU, behind a small HTTP server of the standard library, so
that nothing has to be installed. A machine whose driver cannot share memory between processes says so, and the tests that need it
are not run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from posttrain.core.transport import ServerError, ServerRefused
from posttrain.rollout.engines.vllm import weight_stream
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights, spec_of
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.weight_senders import _both
from posttrain.serve.errors import TransportFailed
from posttrain.serve.wire import block_sums
from posttrain.serve.wire.collective import NCCL, Rendezvous, available_backends
from posttrain.serve.wire.cuda_ipc import share
from posttrain.serve.wire.payload import HASH_BLOCK
from tests.rollout.served import streamed

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


def weights(number: int) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full((4,), float(number), device="cuda")) for name in NAMES]


def staged(number: int) -> KeptWeights:
    return KeptWeights.of(weights(number), "blake2b")


def next_version(client: ServerClient) -> int:
    return (client.info().version or 0) + 1


@pytest.fixture(scope="module")
def shares(served):
    """Skips where the driver cannot share memory between processes at all."""
    client = served.client("cuda_ipc")
    error = streamed(client, next_version(client), weights(1)).error
    if error is not None and ("cannot be read" in str(error) or "cannot be shared" in str(error)):
        pytest.skip(f"CUDA IPC does not work on this machine: not run ({error})")
    assert error is None, error
    return True


# ---- the trainer --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, HASH_BLOCK, HASH_BLOCK + 5, 9 * HASH_BLOCK + 6])
def test_sums_on_the_gpu_are_those_of_the_bytes(nbytes):
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    assert block_sums.of_tensor(data.cuda()) == block_sums.of_tensor(data)


def test_auto_takes_cuda_ipc_or_says_once_why_not(served, caplog):
    client = served.client("auto")
    with ServedVLLM([client], options=ServedOptions(DEADLINES, watch_seconds=1000)) as engine:
        for number in (1, 2, 3):
            engine.send(partial(weights, number))
            engine.load_weights(None, number)
            assert served.says() == [number] * 8
            assert engine.differing_tensors() == []
            engine.sleep()
            assert engine.target.kept.fingerprint == client.info().fingerprint
        in_use = client.channel.in_use
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    print(f"auto: {in_use}; {said}")
    if in_use == "cuda_ipc":
        assert said == []
    else:
        assert len(said) == 1
        assert "by cuda_ipc failed; this version is staged" in said[0]


@pytest.mark.whole_gpu
def test_versions_arrive_by_cuda_ipc_and_no_memory_is_left_behind(served, shares, monkeypatch):
    client = served.client("cuda_ipc")
    monkeypatch.setattr(weight_stream, "PART_BYTES", 256)  # several parts
    for number in range(2, 5):
        assert streamed(client, next_version(client), weights(number)).error is None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for number in range(5, 45):
        assert streamed(client, next_version(client), weights(number)).error is None
        assert served.says() == [number] * 8
        assert client.channel.in_use == "cuda_ipc"
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before[0] < 1 << 16
    assert before[1] - torch.cuda.mem_get_info()[0] < 64 << 20


def test_places_that_lie_are_refused_and_the_server_lives(served, shares):
    client = served.client("cuda_ipc")
    client.push(staged(6), next_version(client), 8)
    buffer = torch.zeros(64, dtype=torch.uint8, device="cuda")
    place = share(buffer)
    version, before = next_version(client), served.says()
    spec = spec_of("a", weights(7)[0][1], block_sums.KIND)
    entry = {**vars(spec), "shape": list(spec.shape), "offset": 0, "begin": 0, "end": 16}
    lies = [
        {"handle": "AAAA"}, {"handle": ""}, {"handle": "A" * 88}, {"gpu": "no-such-gpu"}, {"size": 1}, {"size": 4},
        {"counter": "L2V0Yy9wYXNzd2Q="}, {"counter_offset": 1 << 40}, {"offset": -1}, {"event": "AAAA"}, {"extra": 1},
        {},  # the place is right; the bytes that lie there are not those that were announced
    ]  # fmt: skip
    wire = client.channel._wire
    for lie in lies:
        client._post("/weights/stream", {"version": version}, 10)
        part = {"version": version, "part": 0, "last": True, "tensors": [entry]}
        with pytest.raises(ServerRefused) as caught:
            wire.stream_part("cuda_ipc", part, place | lie)
        print(lie, caught.value.status, str(caught.value)[-200:])
        assert caught.value.status in (400, 424)
        client.abort(version)
    assert served.says() == before
    assert streamed(client, version + 1, weights(9)).error is None
    assert served.says() == [9] * 8


def test_bytes_changed_on_the_gpu_are_noticed(served, shares, monkeypatch):
    client = served.client("cuda_ipc")
    assert streamed(client, next_version(client), weights(3)).error is None
    real = weight_stream.VersionStream._packed

    def damaged(stream, tensors):
        entries, data = real(stream, tensors)
        data[2] ^= 1
        return entries, data

    monkeypatch.setattr(weight_stream.VersionStream, "_packed", damaged)
    assert "do not have their checksum" in str(streamed(client, next_version(client), weights(4)).error)
    monkeypatch.undo()
    assert served.says() == [3] * 8  # the first part was refused before the engine was touched


def test_a_killed_server_is_an_error_of_the_trainer_and_not_a_hang(tmp_path, shares):
    one = Served(tmp_path)
    try:
        client = one.client("cuda_ipc")
        assert streamed(client, 1, weights(1)).error is None
        one.process.kill()
        one.process.wait(30)
        began = time.monotonic()
        assert isinstance(streamed(client, 2, weights(2)).error, ServerError)
        assert time.monotonic() - began < 20
    finally:
        one.close()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_group_of_gloo_serves_weights_that_are_on_the_gpu(served):
    client = served.client("collective")
    assert streamed(client, next_version(client), weights(6)).error is None
    assert client.channel.in_use == "collective"
    assert served.says() == [6] * 8


def test_nccl_that_cannot_form_a_group_is_an_error_and_both_processes_live(served):
    """NCCL does not take one GPU twice. What is shown here: its failure is typed, bounded in time, and kills nobody."""
    if NCCL not in available_backends():
        pytest.skip("this build of torch has no NCCL")
    client = served.client("http")
    wire = client.channel._wire
    key = secrets.token_hex(16)
    rendezvous = Rendezvous("127.0.0.1", 9, key, 30)
    where = {"backend": NCCL, "address": rendezvous.address, "port": rendezvous.port, "key": key}
    began = time.monotonic()
    try:
        _, pair = _both(
            lambda: wire.join(where, 30.0), lambda: rendezvous.pair(NCCL, 30.0, torch.device("cuda", 0)), 30.0
        )
        print("NCCL formed a group of two processes on one GPU", pair)
    except (TransportFailed, ServerRefused) as error:
        print(f"after {time.monotonic() - began:.1f} s: {error}")
    assert time.monotonic() - began < 45
    client.push(staged(8), next_version(client), 8)
    assert served.says() == [8] * 8
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert not torch.distributed.is_initialized()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
