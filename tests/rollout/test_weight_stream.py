"""Weights that go straight into a server's engine: by a group of gloo here, by CUDA IPC in tests/gpu. Whole versions, verified, and
where the stream ends half way: the version before, none, or the same version by another way, never a mixture."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
import torch

from posttrain.core.transport import ServerRefused
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm import weight_stream
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights, spec_of
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.weight_senders import STREAMERS
from posttrain.serve.bodies import StreamPart
from posttrain.serve.errors import Conflict, NotFound, PayloadError, ServeError, TransportFailed
from posttrain.serve.http.app import build_app
from posttrain.serve.server import RolloutServer, ServerOptions
from posttrain.serve.weights.update import UpdateLimits
from posttrain.serve.wire import block_sums
from posttrain.serve.wire.collective import Pair
from posttrain.serve.wire.payload import CHECKSUMS, HASH_BLOCK, Manifest, checksum, combined
from tests.forked import Child
from tests.rollout.served import NAMES, QUICK, echo_process, needs_uvicorn, numbered, says, streamed, warnings
from tests.serve.asgi_client import call
from tests.serve.echo_engine import EchoEngine, numbered_weights
from tests.waiting import eventually

TOKEN = "a-token-of-the-tests-7c1"
OPTIONS = ServedOptions(QUICK, watch_seconds=1000, bucket_bytes=8)


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    made = echo_process(folder, "--shared-folder", str(folder / "blocks"))
    made.start()
    made.wait_until_healthy()
    yield made
    made.close()


@pytest.fixture(params=[8, 300, 1 << 20], ids=lambda size: f"parts of {size} bytes")
def part_bytes(request, monkeypatch):
    monkeypatch.setattr(weight_stream, "PART_BYTES", request.param)
    return request.param


def client_of(process, way="collective"):
    return ServerClient(process.client.name, process._token, QUICK, way)


# ---- the checksum ------------------------------------------------------------------------------------------------------------


def test_the_sum_is_the_formula_and_one_changed_word_always_shows():
    data = bytes(range(1, 11))  # two words, and two bytes of a third
    words = [int.from_bytes(data[at : at + 4].ljust(4, b"\0"), "little", signed=True) for at in (0, 4, 8)]
    weights = [((i + 1) * 0x9E3779B97F4A7C15 % 2**64) | 1 for i in range(3)]
    total = sum(x * w for x, w in zip(words, weights)) % 2**64
    assert block_sums.of_bytes(data) == f"{total:016x}{10:016x}"
    assert CHECKSUMS["sum64"](data) == block_sums.of_bytes(data)
    assert block_sums.of_bytes(data + b"\0") != block_sums.of_bytes(data)  # the same words, another length
    rng = random.Random(0)
    for _ in range(300):
        other = bytearray(data)
        other[rng.randrange(10)] ^= 1 << rng.randrange(8)
        assert block_sums.of_bytes(other) != block_sums.of_bytes(data)
    swapped = data[4:8] + data[:4] + data[8:]
    assert block_sums.of_bytes(swapped) != block_sums.of_bytes(data)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, HASH_BLOCK, HASH_BLOCK + 5, 2 * HASH_BLOCK])
def test_tensors_and_their_bytes_have_the_same_sum(nbytes):
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    whole = combined(block_sums.of_tensor(flat), "sum64")
    assert whole == checksum(memoryview(flat.numpy()), "sum64")
    assert spec_of("a", flat, "sum64").checksum == whole


# ---- whole versions ----------------------------------------------------------------------------------------------------------


@needs_uvicorn
def test_versions_arrive_and_are_kept_for_a_server_that_is_restarted(process, part_bytes, caplog):
    client, now = client_of(process), [0]
    with ServedVLLM([client], lambda: numbered(now[0]), options=OPTIONS) as engine:
        for version in (1, 2, 3):
            now[0] = version
            engine.load_weights(None, version)
            (completion,) = generate(engine, [Prompt([1])], SamplingParams(12))
            assert completion.ids.tolist() == [version] * 12
            assert client.channel.in_use == "collective"
            assert engine.differing_tensors() == []
            engine.sleep()  # the end of the rollouts: the copy in host memory is there
            kept = engine.target.kept
            assert kept.fingerprint == engine.target.fingerprint == client.info().fingerprint
            assert kept.specs == engine.target.specs
        now[0] = 4
        assert engine.differing_tensors(9) == list(NAMES)
    assert warnings(caplog) == []


@needs_uvicorn
def test_an_export_that_is_read_once_only_is_copied_on_the_way(process):
    reads = []

    def export():
        reads.append(1)
        yield from numbered(6)

    with ServedVLLM([client_of(process)], options=OPTIONS) as engine:
        engine.send(export, is_repeatable=False)
        engine.load_weights(None, 6)
        assert engine.target.kept.fingerprint == engine.target.fingerprint
    assert reads == [1]
    assert says(process)["ids"] == [6] * 12


@needs_uvicorn
def test_a_copy_of_weights_that_moved_on_meanwhile_is_not_kept(process):
    numbers = iter((7, 8))
    with ServedVLLM([client_of(process)], lambda: numbered(next(numbers)), options=OPTIONS) as engine:
        engine.load_weights(None, 7)
        engine.sleep()
        assert engine.target.kept is None
        assert says(process)["ids"] == [7] * 12


@needs_uvicorn
def test_every_tensor_arrives_in_its_own_place(process):
    """Shown by the engine's answers, whose tokens are the first numbers of its tensors, in turn."""
    client, version = client_of(process), process.client.info().version + 1
    weights = [(name, torch.full((4,), 3.0 + number)) for number, name in enumerate(NAMES)]
    assert streamed(client, version, weights).error is None
    assert says(process)["ids"][:4] == [3, 4, 5, 6]


# ---- streams that end half way -----------------------------------------------------------------------------------------------


@needs_uvicorn
@pytest.mark.parametrize("is_repeatable", [True, False])
def test_bytes_changed_on_the_way_are_noticed_and_the_version_is_staged(process, is_repeatable, monkeypatch, caplog):
    """A hijacked or damaged broadcast, in the middle of a version."""
    monkeypatch.setattr(weight_stream, "PART_BYTES", 8)
    client, now, parts = client_of(process), [1], [0]
    with ServedVLLM([client], options=OPTIONS) as engine:
        engine.send(lambda: numbered(now[0]), is_repeatable=is_repeatable)
        engine.load_weights(None, 1)

        def broadcast(pair, data, seconds, real=Pair.broadcast):
            parts[0] += 1
            if parts[0] == 3:
                data[3] ^= 1
            real(pair, data, seconds)

        with monkeypatch.context() as patch:
            patch.setattr(Pair, "broadcast", broadcast)
            now[0] = 2
            engine.load_weights(None, 2)
        assert says(process)["ids"] == [2] * 12
        (sentence,) = warnings(caplog)
        assert "by collective failed; this version is staged in the server's host memory instead." in sentence
        assert "do not have their checksum" in sentence
        now[0] = 3
        engine.load_weights(None, 3)
        assert client.channel.in_use == "collective"  # it had worked before: the next version tries it once more
        assert says(process)["ids"] == [3] * 12


@needs_uvicorn
def test_a_stream_given_up_at_a_random_part_leaves_a_whole_version_or_none_and_the_next_one_arrives(
    process, monkeypatch
):
    monkeypatch.setattr(weight_stream, "PART_BYTES", 8)
    rng, client = random.Random(3), client_of(process)
    version = client.info().version
    real, left = STREAMERS["collective"].send, [0]

    def send(streamer, part, data):
        left[0] -= 1
        if left[0] < 0:
            raise TransportFailed("Interrupted by the test.")
        return real(streamer, part, data)

    monkeypatch.setattr(STREAMERS["collective"], "send", send)
    for attempt in range(20):
        left[0] = 1 << 30
        version += 1
        assert streamed(client, version, numbered(attempt)).error is None
        left[0] = rng.randrange(len(NAMES))
        begun, version = left[0], version + 1
        assert "Interrupted" in str(streamed(client, version, numbered(99)).error)
        # Parts of it are in the engine, and the version before was streamed, too: nothing is left to go back to.
        if begun:
            with pytest.raises(
                ServerRefused, match=r"No whole version of the weights is loaded: an update failed half way"
            ):
                eventually(lambda: says(process) is None, 30)
        else:
            eventually(lambda: client.info().not_ready is None, 30)
            assert says(process)["ids"] == [attempt] * 12
    version += 1
    client.push(KeptWeights.of(numbered(50), "blake2b"), version, 8)  # staged, and so in host memory
    left[0] = 2
    assert streamed(client, version + 1, numbered(99)).error is not None
    eventually(lambda: client.info().not_ready is None, 30)
    assert says(process)["ids"] == [50] * 12


@needs_uvicorn
@pytest.mark.parametrize("is_repeatable", [True, False])
def test_an_export_that_fails_ends_the_stream_at_once_and_the_server_names_the_cause(
    process, is_repeatable, monkeypatch
):
    monkeypatch.setattr(weight_stream, "PART_BYTES", 8)

    def fails():
        yield from numbered(2)[:2]
        raise MemoryError("no room for the third tensor")

    with ServedVLLM([client_of(process)], lambda: numbered(1), options=OPTIONS) as engine:
        engine.load_weights(None, 1)
        engine.send(fails, is_repeatable=is_repeatable)
        with pytest.raises(MemoryError, match="no room for the third tensor"):
            engine.load_weights(None, 2)
        info = process.client.info()  # nothing is waited for: the stream has ended before the error is raised
        assert "was given up. The trainer gave it up: MemoryError: no room for the third tensor" in info.not_ready
        engine.send(lambda: numbered(3), is_repeatable=is_repeatable)
        engine.load_weights(None, 3)
        assert says(process)["ids"] == [3] * 12


@needs_uvicorn
def test_a_trainer_killed_in_a_stream_is_forgotten_and_the_next_one_is_served(tmp_path):
    process = echo_process(tmp_path, "--update-idle-seconds", "1")
    process.start()
    process.wait_until_healthy()
    address, token = process.client.name, process._token

    def killed_at_its_third_part():
        weight_stream.PART_BYTES = 8
        real, count = STREAMERS["collective"].send, [0]

        def send(*args):
            count[0] += 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        STREAMERS["collective"].send = send
        streamed(ServerClient(address, token, QUICK, "collective"), 9, numbered(9))

    try:
        assert Child(killed_at_its_third_part, tmp_path / "log").wait() == -signal.SIGKILL
        eventually(lambda: process.client.info().not_ready is None, 60)  # the weights of the folder were put back
        assert says(process)["ids"] == [0] * 12
        assert streamed(client_of(process), 10, numbered(10)).error is None
        assert says(process)["ids"] == [10] * 12
    finally:
        process.close()


@needs_uvicorn
def test_a_way_that_was_asked_for_and_fails_at_its_first_use_is_an_error(process, monkeypatch):
    before = says(process)["ids"]

    def broken(streamer, part, data):
        raise TransportFailed("No way.")

    monkeypatch.setattr(STREAMERS["collective"], "send", broken)
    with (
        ServedVLLM([client_of(process)], lambda: numbered(5), options=OPTIONS) as engine,
        pytest.raises(ServerRefused, match=r"by collective, which `vllm_weight_transport` asks for: No way"),
    ):
        engine.load_weights(None, 5)
    eventually(lambda: process.client.info().not_ready is None, 30)
    assert says(process)["ids"] == before


# ---- the server's side -------------------------------------------------------------------------------------------------------


class Served:
    """A server in this process whose parts are handed over as tensors, without a way between."""

    def __init__(self, **limits):
        self.server = RolloutServer(EchoEngine(numbered_weights(0)), ServerOptions(update=UpdateLimits(**limits)))
        self.server.start()
        self.updater = self.server.updater

    def part(self, version, number, weights, last, **changes):
        entries, chunks, end = [], [], 0
        for name, tensor in weights:
            flat = tensor.flatten().view(torch.uint8)
            begin = -(-end // 256) * 256
            chunks += [torch.zeros(begin - end, dtype=torch.uint8), flat]
            end = begin + flat.numel()
            spec = spec_of(name, tensor, "sum64")
            entries.append({**vars(spec), "shape": list(spec.shape), "offset": 0, "begin": begin, "end": end} | changes)
        data = torch.cat(chunks)
        fields = {"version": version, "part": number, "last": last, "tensors": entries}
        asked = StreamPart(**fields, transport="collective", place={}, deadline_s=5.0)
        return self.updater.stream_part(asked, lambda nbytes: data[:nbytes])

    def serving(self):
        return self.server.versions.serving

    def answer(self):
        body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 8}}
        return asyncio.run(call(build_app(self.server, TOKEN), "POST", "/generate", body, token=TOKEN)).json()


@pytest.fixture
def served():
    made = Served()
    yield made
    made.server.close()


def test_parts_are_loaded_as_they_come_and_the_commit_says_what_serves(served):
    served.updater.open_stream(4, False, "drain", 5)
    served.part(4, 0, numbered(4)[:3], False)
    served.part(4, 1, numbered(4)[3:], True)
    state = served.updater.commit(4, "drain", 5)
    assert (state["serving_version"], state["phase"]) == (4, "idle")
    assert served.updater.commit(4, "drain", 5) == state  # the answer was lost: asked again
    assert served.answer()["completions"][0][0]["ids"] == [4] * 8
    assert served.updater.committed == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"checksum": "sum64:" + "0" * 32}, "do not have their checksum"),
        ({"checksum": "blake2b:" + "0" * 32}, "no checksum of the kind sum64"),
        ({"shape": [2]}, "the manifest says float32"),
        ({"dtype": "int32"}, "the manifest says int32"),
        ({"dtype": "float16"}, "cannot be float16"),
        ({"offset": 4}, "cannot be float32"),
        ({"begin": 1, "end": 17}, "cannot be float32"),
        ({"end": 15}, "cannot be float32"),
    ],
)
def test_a_part_that_is_not_what_it_says_ends_the_stream_before_the_engine_is_touched(served, changes, sentence):
    served.updater.open_stream(1, False, "drain", 5)
    with pytest.raises(PayloadError, match=sentence):
        served.part(1, 0, numbered(1)[:1], False, **changes)
    served.updater.abort(1)
    with pytest.raises(ServeError, match=f"{sentence}|Version 1 was given up"):
        served.updater.commit(1, "drain", 30)
    assert served.serving().version == 0
    assert served.answer()["completions"][0][0]["ids"] == [0] * 8


def test_a_version_without_all_tensors_does_not_serve_and_the_one_before_is_put_back(served):
    served.updater.open_stream(1, False, "drain", 5)
    served.part(1, 0, numbered(1)[:2], True)
    with pytest.raises(PayloadError, match="c is missing from the manifest, with 1 others"):
        served.updater.commit(1, "drain", 30)
    assert served.serving().version == 0
    assert served.answer()["completions"][0][0]["ids"] == [0] * 8


@pytest.mark.parametrize(
    ("number", "names", "sentence"), [(1, NAMES[:1], "part 0 is next"), (0, "aa", "a is listed twice")]
)
def test_parts_in_another_order_and_tensors_that_come_twice_are_refused(served, number, names, sentence):
    served.updater.open_stream(1, False, "drain", 5)
    with pytest.raises(ServeError, match=sentence):
        served.part(1, number, [(name, torch.ones(4)) for name in names], False)


def test_a_stream_that_falls_silent_is_given_up_and_a_late_part_is_not_taken():
    one = Served(idle_seconds=0.2)
    try:
        one.updater.open_stream(1, False, "drain", 5)
        one.part(1, 0, numbered(1)[:1], False)
        with pytest.raises(TransportFailed, match=r"No part of version 1 came for 0\.2 s"):
            one.updater.commit(1, "drain", 30)
        with pytest.raises(NotFound, match="No stream of version 1 is open"):
            one.part(1, 1, numbered(1)[1:], True)
        assert one.serving().version == 0
    finally:
        one.server.close()


def test_while_a_stream_is_under_way_nobody_is_served_and_the_next_one_takes_its_place(served):
    served.updater.open_stream(1, False, "drain", 5)
    served.part(1, 0, numbered(1)[:1], False)
    eventually(lambda: served.serving().version is None, 30)
    assert "on its way into the engine" in served.serving().reason
    with pytest.raises(Conflict, match="streaming cannot become staging"):
        served.updater.begin(Manifest(2, 1, tuple(spec_of(*one, "sum64") for one in numbered(2))), False, False, None)
    served.updater.open_stream(3, False, "drain", 5)
    with pytest.raises(NotFound, match="No stream of version 1 is open"):
        served.part(1, 1, numbered(1)[1:], True)
    served.part(3, 0, numbered(3), True)
    assert served.updater.commit(3, "drain", 30)["serving_version"] == 3


def test_60_damaged_parts_are_refused_and_the_server_lives(served):
    app, rng = build_app(served.server, TOKEN), random.Random(5)
    values = [
        None, True, -1, 0, 1 << 60, 1.5, "", "..", "a" * 70_000, [], {}, [1], {"name": "x"}, "é" * 10, "AAA",
        float("1e300"), "cuda_ipc", "nccl", "sum64:" + "0" * 32, [[4]], [{}],
    ]  # fmt: skip
    places = {
        "cuda_ipc": {
            "gpu": "x", "handle": "AAAA", "size": 24, "offset": 0, "counter": "AAAA", "counter_offset": 0, "event": "",
            "event_sync": False,
        },
        "collective": {"group": "0" * 32},
    }  # fmt: skip

    async def ask(path, body):
        return await call(app, "POST", path, body, token=TOKEN)

    async def go():
        for number in range(1, 61):
            assert (await ask("/weights/stream", {"version": number})).status == 200
            entry = {**vars(spec_of("a", torch.ones(4), "sum64")), "shape": [4], "offset": 0, "begin": 0, "end": 16}
            way = rng.choice(list(places))
            body = {"version": number, "part": 0, "last": True, "tensors": [entry], "transport": way}
            body["place"] = dict(places[way])
            where = rng.choice([body, body["place"], entry])
            where[rng.choice(list(where))] = rng.choice(values)
            reply = await ask("/weights/stream/part", body)
            assert 400 <= reply.status < 500, (body, reply)
            assert "error" in reply.json()
            assert (await ask("/weights/abort", {"version": number})).status == 200

    asyncio.run(go())
    assert served.serving().version == 0
    assert served.answer()["completions"][0][0]["ids"] == [0] * 8
