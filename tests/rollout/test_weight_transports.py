"""Every way by which weights reach a server: whole versions only, and another way where one fails."""

from __future__ import annotations

import math
import os
import random
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from posttrain import GRPOConfig
from posttrain.core.transport import ServerError, ServerRefused
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm import weight_senders
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from posttrain.rollout.engines.vllm.weight_channel import TRANSPORTS, WeightChannel
from posttrain.rollout.engines.vllm.weight_senders import PARALLEL_PARTS, SENDERS, STREAMERS, Sides, Wire
from posttrain.serve.errors import TransportFailed
from posttrain.serve.http.app import ENDPOINTS
from posttrain.serve.weights.transports import RECEIVERS, STREAMED
from posttrain.serve.wire.shared_blocks import Block, SharedFolder, host_id
from posttrain.trainer.online.vllm_setup import client_of as plain_client
from tests.forked import Child
from tests.rollout.served import (
    INTERRUPTIONS,
    QUICK,
    CuttingProxy,
    SocketServer,
    echo_process,
    http,
    needs_uvicorn,
    numbered,
    read_request,
    says,
    streamed,
    warnings,
)
from tests.waiting import eventually

WAYS = ["http", "shared_memory"]
OPTIONS = ServedOptions(QUICK, watch_seconds=1000, bucket_bytes=8)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server that no test harms; its blocks are in a folder of its own."""
    folder = tmp_path_factory.mktemp("server")
    made = echo_process(folder, "--shared-folder", str(folder / "blocks"))
    made.start()
    made.wait_until_healthy()
    made.blocks = folder / "blocks"
    yield made
    made.close()


def client_of(process, way, url=None, deadlines=QUICK):
    return ServerClient(url or process.client.name, process._token, deadlines, way)


# ---- whole updates ---------------------------------------------------------------------------------------------------------


def test_the_two_tables_and_the_option_name_the_same_ways():
    assert list(STREAMERS) == ["cuda_ipc", "collective"]
    assert list(SENDERS) == ["shared_memory", "http"]
    assert {*STREAMERS, *SENDERS} == {"http", *RECEIVERS}
    assert set(STREAMERS) == STREAMED
    assert ("auto", *STREAMERS, *SENDERS) == TRANSPORTS
    allowed = {route.path: route.concurrency for route in ENDPOINTS}
    assert min(allowed["/weights/fetch"], allowed["/weights/part"]) >= PARALLEL_PARTS
    with pytest.raises(ValueError, match="`pigeon` is not a transport for weights"):
        ServerClient("http://127.0.0.1:1", None, QUICK, "pigeon")


@needs_uvicorn
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bucket", [5, 64, 1 << 20])
def test_versions_arrive_by_every_way(process, way, bucket, caplog):
    client = client_of(process, way)
    with ServedVLLM([client], options=ServedOptions(QUICK, watch_seconds=1000, bucket_bytes=bucket)) as engine:
        for version in (1, 2, 3):
            weights = [*numbered(version)]
            engine.load_weights(weights, version)
            (completion,) = generate(engine, [Prompt([1])], SamplingParams(12))
            assert completion.ids.tolist() == [version] * 12
            assert client.channel.in_use == way
    assert warnings(caplog) == []
    assert list(process.blocks.iterdir()) == []


@needs_uvicorn
def test_auto_takes_shared_memory_on_one_machine(process):
    client = client_of(process, "auto")
    with ServedVLLM([client], options=OPTIONS) as engine:
        engine.load_weights(numbered(4), 4)
        assert client.channel.in_use == "shared_memory"
    assert says(process)["ids"] == [4] * 12


@needs_uvicorn
def test_large_tensors_in_several_pieces(process):
    client = client_of(process, "shared_memory")
    torch.manual_seed(0)
    kept = KeptWeights.of([(name, torch.randn(4)) for name in "abcd"], "blake2b")
    version = client.info().version + 1
    client.push(kept, version, 7)
    info = client.info()
    assert (info.version, info.fingerprint) == (version, kept.fingerprint)
    assert client.channel.in_use == "shared_memory"


# ---- bar 6: an update interrupted at a random tensor -------------------------------------------------------------------------


@needs_uvicorn
@pytest.mark.parametrize("attempts", INTERRUPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_an_update_interrupted_at_random_tensors_leaves_one_whole_version(process, way, attempts, monkeypatch):
    """Cut connections on the way there or back, a trainer that stops between two parts, bytes that change on the way."""
    proxy = CuttingProxy(process.port)
    client = client_of(process, way, proxy.url)
    rng, outcomes, sent = random.Random(7), [], []
    real = SENDERS[way].send
    monkeypatch.setattr(SENDERS[way], "send", lambda *args: (sent.append(1), real(*args))[1])
    with ServedVLLM([client], options=OPTIONS) as engine:
        engine.load_weights(numbered(1), 1)
        before = list(proxy.passed)
        engine.load_weights(numbered(2), 2)
        whole = [now - then for now, then in zip(proxy.passed, before)]
        for attempt in range(3, 3 + attempts):
            kept = engine._kept(numbered(attempt))
            version = engine.fleet._next_version = engine.fleet._next_version + 1
            serving = process.client.info().version
            interrupt(attempt, rng, client, proxy, whole, kept, version)
            proxy.allowed = [math.inf, math.inf]
            said = says(process)
            assert len(set(said["ids"])) == 1, said
            assert said["version"] in (serving, version)
            assert said["ids"][0] == (attempt if said["version"] == version else (outcomes or [2])[-1])
            outcomes.append(said["ids"][0])
        assert len(sent) > 2 * attempts, "the parts did not take this way"
        engine.load_weights(numbered(99), 99)
        assert client.channel.in_use == way
        (completion,) = generate(engine, [Prompt([1])], SamplingParams(12))
        assert completion.ids.tolist() == [99] * 12
    proxy.close()
    eventually(lambda: list(process.blocks.iterdir()) == [], 60)


def interrupt(attempt, rng, client, proxy, whole, kept, version):
    """Begin to send a version, and do not get to its end."""
    if attempt % 3 < 2:
        way = attempt % 3
        proxy.allowed[way] = proxy.passed[way] + rng.randint(0, whole[way] - 1)
        with pytest.raises(ServerError):
            client.push(kept, version, 8)
        return
    send, left = client.channel.send, [rng.randrange(8)]

    def stops(head, chunks):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return send(head, chunks)

    client.channel.send = stops
    try:
        with pytest.raises(KeyboardInterrupt):
            client.push(kept, version, 8)
    finally:
        del client.channel.send


@needs_uvicorn
def test_bytes_changed_on_the_way_are_noticed_and_sent_again_over_http(process, monkeypatch, caplog):
    """A block that somebody wrote to."""
    client = client_of(process, "shared_memory")
    kept = KeptWeights.of(numbered(5), "blake2b")
    version = client.info().version + 1
    client.push(kept, version, 8)
    damaged = []

    def write(folder, pieces, real=SharedFolder.write):
        if not damaged:
            damaged.append(pieces)
            pieces = [b"\1" * len(piece) for piece in pieces]
        return real(folder, pieces)

    monkeypatch.setattr(SharedFolder, "write", write)
    client.push(KeptWeights.of(numbered(6), "blake2b"), version + 1, 8)
    assert damaged
    assert says(process)["ids"] == [6] * 12
    assert len(warnings(caplog)) == 1
    assert "do not have their checksum" in warnings(caplog)[0]
    assert "by shared_memory failed; the rest of this version goes over HTTP" in warnings(caplog)[0]
    client.push(KeptWeights.of(numbered(7), "blake2b"), version + 2, 8)
    assert client.channel.in_use == "shared_memory"  # it had worked before: the next version tries it once more
    assert len(warnings(caplog)) == 1


@needs_uvicorn
def test_parts_that_fail_side_by_side_are_one_warning_and_all_go_over_http(process, monkeypatch, caplog):
    client = client_of(process, "auto")
    version = client.info().version + 1
    client.push(KeptWeights.of(numbered(5), "blake2b"), version, 8)
    together = threading.Barrier(PARALLEL_PARTS)

    def fetch(wire, transport, head, place, real=Wire.fetch):
        together.wait(10)  # none of them has found out before the others are on their way
        return real(wire, transport, head, {"name": "block-" + "0" * 32})

    monkeypatch.setattr(Wire, "fetch", fetch)
    client.push(KeptWeights.of(numbered(6), "blake2b"), version + 1, 8)
    assert says(process)["ids"] == [6] * 12
    (sentence,) = warnings(caplog)
    assert "by shared_memory failed; the rest of this version goes over HTTP" in sentence
    assert list(process.blocks.iterdir()) == []
    monkeypatch.undo()
    client.push(KeptWeights.of(numbered(7), "blake2b"), version + 2, 8)
    assert client.channel.in_use == "shared_memory"
    assert says(process)["ids"] == [7] * 12


# ---- ways that fail ----------------------------------------------------------------------------------------------------------


@needs_uvicorn
def test_a_way_that_fails_at_its_first_use_is_left_for_http_with_one_sentence(process, monkeypatch, caplog):
    def full(folder, pieces):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedFolder, "write", full)
    client = client_of(process, "auto")
    with ServedVLLM([client], options=OPTIONS) as engine:
        for version in (1, 2, 3):
            engine.load_weights(numbered(version), version)
            assert says(process)["ids"] == [version] * 12
    (sentence,) = warnings(caplog)
    assert "by shared_memory failed; weights go over HTTP instead." in sentence
    assert "No space left on device" in sentence
    asked = client_of(process, "shared_memory")
    with (
        ServedVLLM([asked], options=OPTIONS) as engine,
        pytest.raises(
            ServerRefused, match=r"by shared_memory, which `vllm_weight_transport` asks for: .*No space left"
        ),
    ):
        engine.load_weights(numbered(9), 9)
    assert says(process)["ids"] == [3] * 12


@needs_uvicorn
def test_a_way_that_was_asked_for_and_cannot_be_is_a_sentence(process):
    with ServedVLLM([client_of(process, "cuda_ipc")], options=OPTIONS) as engine:
        before = says(process)["ids"]
        with pytest.raises(ServerRefused, match=r"by cuda_ipc: the trainer's weights are not on a CUDA device"):
            engine.load_weights(numbered(9), 9)
    assert says(process)["ids"] == before


@needs_uvicorn
@pytest.mark.parametrize("way", ["shared_memory", "collective"])
def test_a_server_killed_and_restarted_is_sent_its_version_by_the_same_way(tmp_path, way):
    process = echo_process(tmp_path, "--shared-folder", str(tmp_path / "blocks"))
    process.client = ServerClient(process.client.name, process._token, QUICK, way)
    with ServedVLLM([process], options=ServedOptions(QUICK, watch_seconds=0.2, bucket_bytes=8)) as engine:
        engine.send(lambda: numbered(1))
        engine.load_weights(None, 1)
        process.kill()
        (completion,) = generate(engine, [Prompt([1])], SamplingParams(8))
        assert completion.ids.tolist() == [1] * 8
        assert process.starts == 2
        engine.send(lambda: numbered(2))
        engine.load_weights(None, 2)
        assert process.client.channel.in_use == way
        (completion,) = generate(engine, [Prompt([1])], SamplingParams(8))
        assert completion.ids.tolist() == [2] * 8


@needs_uvicorn
def test_a_stopped_server_does_not_hold_the_trainer_in_a_broadcast(tmp_path):
    process = echo_process(tmp_path)
    process.start()
    process.wait_until_healthy()
    deadlines = Deadlines(connect=1, health=1, control=2, part=2, commit=5, completion=10)
    client = ServerClient(process.client.name, process._token, deadlines, "collective")
    try:
        assert streamed(client, 1, numbered(1)).error is None
        send = STREAMERS["collective"].send

        def stop_then_send(streamer, part, data):
            os.kill(process.pid, signal.SIGSTOP)
            return send(streamer, part, data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(STREAMERS["collective"], "send", stop_then_send)
            # a broadcast that waited for the server would end after gloo's half an hour
            assert isinstance(streamed(client, 2, numbered(2)).error, ServerError | TransportFailed)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: client.info().not_ready is not None or client.info().version == 1, 60)
        client.push(KeptWeights.of(numbered(3), "blake2b"), 3, 8)
        assert says(process)["ids"] == [3] * 12
    finally:
        process.close()


@needs_uvicorn
def test_a_trainer_killed_in_an_update_leaves_the_old_version_and_no_blocks(process, tmp_path, monkeypatch):
    client = client_of(process, "shared_memory")
    serving = client.info().version + 1
    client.push(KeptWeights.of(numbered(8), "blake2b"), serving, 8)
    address, token = process.client.name, process._token

    def killed_at_its_fourth_block():
        real, count = Block.write, [0]

        def write(block, pieces):
            real(block, pieces)
            count[0] += 1
            if count[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        Block.write = write
        client = ServerClient(address, token, QUICK, "shared_memory")
        client.push(KeptWeights.of(numbered(9), "blake2b"), serving + 1, 8)

    assert Child(killed_at_its_fourth_block, tmp_path / "log").wait() == -signal.SIGKILL
    assert says(process)["ids"] == [8] * 12
    assert 0 < len(list(process.blocks.iterdir())) <= PARALLEL_PARTS
    monkeypatch.setattr("posttrain.serve.wire.shared_blocks.STALE_SECONDS", -1.0)
    client = client_of(process, "shared_memory")  # the next trainer finds it when it begins
    client.push(KeptWeights.of(numbered(10), "blake2b"), serving + 2, 8)
    assert list(process.blocks.iterdir()) == []
    assert says(process)["ids"] == [10] * 12


@needs_uvicorn
def test_a_group_for_weights_lives_beside_the_default_group_of_the_trainer(process, tmp_path):
    """In a process of its own: torch knows one default group for each."""
    version = process.client.info().version + 1
    address, token = process.client.name, process._token

    def with_a_default_group():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        group = dist.group.WORLD
        client = ServerClient(address, token, QUICK, "collective")
        for number in (0, 1):
            assert streamed(client, version + number, numbered(40 + number)).error is None
        assert client.channel.in_use == "collective"
        assert dist.group.WORLD is group
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [1, 1, 1]
        dist.destroy_process_group()
        assert streamed(client, version + 2, numbered(42)).error is None
        assert client.channel.in_use == "collective"
        assert not dist.is_initialized()

    child = Child(with_a_default_group, tmp_path / "log")
    assert child.wait() == 0, child.output()
    assert says(process)["ids"] == [42] * 12


# ---- which way -----------------------------------------------------------------------------------------------------------------

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def offers(tmp_path, host="here", gpus=None, backends=("gloo",), shared=True):
    ways = {"collective": {"backends": list(backends)}}
    if gpus:
        ways["cuda_ipc"] = {"gpus": gpus}
    if shared:
        ways["shared_memory"] = SharedFolder(tmp_path / "blocks").describe()
    return {"host": host_id() if host == "here" else host, "instance": "x", "ways": ways}


@pytest.mark.parametrize(
    ("server", "device", "way"),
    [
        ({}, CPU, "shared_memory"),
        ({"gpus": ["G0"]}, GPU, "cuda_ipc"),
        ({"gpus": ["G1"]}, GPU, "shared_memory"),
        ({"gpus": ["G0"]}, CPU, "shared_memory"),
        ({"host": "there"}, CPU, "http"),
        ({"host": "there", "gpus": ["G7"], "backends": ("nccl", "gloo")}, GPU, "collective"),
        ({"host": "there", "gpus": ["G0"], "backends": ("gloo",)}, GPU, "http"),
        ({"shared": False}, CPU, "http"),
        ({"shared": False, "gpus": ["G0"], "backends": ("nccl", "gloo")}, GPU, "cuda_ipc"),
        ({"gpus": ["G1"], "backends": ("nccl", "gloo")}, GPU, "collective"),
    ],
)
def test_auto_chooses_by_what_both_sides_have(tmp_path, monkeypatch, server, device, way):
    monkeypatch.setattr(weight_senders.cuda_ipc, "gpu_ids", lambda: ["G0"])
    monkeypatch.setattr(weight_senders, "available_backends", lambda: ["nccl", "gloo"])
    channel = WeightChannel("server", Wire(None, "127.0.0.1", 1, 1.0))
    sides = Sides(offers(tmp_path, **server), device)
    assert (channel.stream_transport(sides) or channel._chosen(sides)) == way


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_senders.cuda_ipc, "gpu_ids", lambda: ["G0"])
    elsewhere = Sides(offers(tmp_path, "there", ["G0"]), GPU)
    assert "another machine" in SENDERS["shared_memory"].why_not(elsewhere)
    assert "does not see the trainer's GPU G0" in STREAMERS["cuda_ipc"].why_not(elsewhere)
    other = offers(tmp_path)
    other["ways"]["shared_memory"]["inode"] += 1
    assert "different containers" in SENDERS["shared_memory"].why_not(Sides(other, CPU))
    assert "offers no shared memory" in SENDERS["shared_memory"].why_not(Sides({}, CPU))
    assert "no backend of torch in common" in STREAMERS["collective"].why_not(Sides({}, CPU))
    assert SENDERS["http"].why_not(Sides({}, CPU)) is None


# ---- the option ----------------------------------------------------------------------------------------------------------------


def test_the_option_names_a_way_and_belongs_to_server_mode(tmp_path):
    def config(**options):
        return GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)

    assert config().vllm_weight_transport == "auto"
    for way in TRANSPORTS:
        served = config(use_vllm=True, vllm_mode="server", vllm_weight_transport=way)
        assert served.vllm_weight_transport == way
    with pytest.raises(ValueError, match=r"vllm_weight_transport.*pigeon"):
        config(use_vllm=True, vllm_mode="server", vllm_weight_transport="pigeon")
    with pytest.raises(ValueError, match="`vllm_weight_transport` says how servers are reached"):
        config(use_vllm=True, vllm_weight_transport="http")
    with pytest.raises(ValueError, match="`use_vllm` is not"):
        config(vllm_weight_transport="http")


def test_a_plain_vllm_takes_no_way_but_its_own():
    def no_such_route(connection, number):
        while True:
            read_request(connection)
            connection.sendall(http(b"{}", "404 Not Found"))

    server = SocketServer(no_such_route)
    try:
        assert isinstance(plain_client(server.url, None, QUICK, None, "raw_logprobs", "auto"), UpstreamClient)
        with pytest.raises(ValueError, match=r"plain `vllm serve`, to which no weights can go by 'collective'"):
            plain_client(server.url, None, QUICK, None, "raw_logprobs", "collective")
    finally:
        server.close()
