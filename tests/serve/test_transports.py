"""Weights that come beside HTTP: what is opened, what is refused, and that nothing waits for ever."""

import asyncio
import base64
import json
import os
import random
import secrets
import socket
import stat
import threading
import time
from typing import Annotated

import pytest
import torch
from pydantic import Field

from posttrain.serve.bodies import Body, Bytes, read
from posttrain.serve.errors import FieldError, PayloadError, TransportFailed
from posttrain.serve.http.app import build_app
from posttrain.serve.launch import bind
from posttrain.serve.server import RolloutServer, ServerOptions
from posttrain.serve.weights.staging import parse_head
from posttrain.serve.weights.transports import RECEIVERS
from posttrain.serve.wire import shared_blocks
from posttrain.serve.wire.collective import GLOO, Rendezvous, join
from posttrain.serve.wire.payload import encode_manifest
from posttrain.serve.wire.shared_blocks import SharedFolder
from tests.forked import Child
from tests.serve.asgi_client import call
from tests.serve.echo_engine import EchoEngine, numbered_weights
from tests.serve.serving import update_of
from tests.waiting import eventually

TOKEN = "a-token-of-the-tests-7c1"


@pytest.fixture
def folder(tmp_path):
    made = SharedFolder(tmp_path / "blocks")
    yield made
    made.close()


def names(folder):
    return sorted(os.listdir(folder.path))


def taken(folder, name, nbytes):
    """What a server copies out of a block."""
    into = bytearray(nbytes)
    folder.read(name, memoryview(into))
    return into


# shared blocks ---------------------------------------------------------------------------------------------------------


def test_a_block_arrives_bit_for_bit_again_and_again_and_is_removed_by_its_maker(folder):
    pieces = [secrets.token_bytes(n) for n in (0, 1, 4096, 100_001)] + [b"x"] * 3000
    wanted = b"".join(pieces)
    with folder.write(pieces) as block:
        found = os.stat(folder.path / block.name)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_size == len(wanted)
        assert taken(folder, block.name, len(wanted)) == wanted
        sizes = (70_000, 5, 0, 4096, 300_000, 299_999, 1, 400_000)
        for size in sizes:  # shorter and longer, in the same memory as far as it goes
            other = secrets.token_bytes(size)
            block.write([other[: size // 3], other[size // 3 :]])
            assert os.stat(folder.path / block.name).st_size == size
            assert taken(folder, block.name, size) == other
        assert names(folder) == [block.name]
    assert names(folder) == []
    with folder.write(pieces) as block:
        assert bytes(folder.map(block.name, len(wanted))) == wanted
    assert names(folder) == []
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700


def test_only_plain_files_of_this_user_and_folder_are_taken(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")
    name = "block-" + "0" * 32
    bad = [
        "../secret",
        str(secret),
        "..",
        ".",
        "",
        "block-",
        name + "/../../secret",
        name + "\0",
        name.upper(),
        "x" * 200,
    ]
    for one in bad:
        with pytest.raises(TransportFailed, match="not one that a trainer gives"):
            taken(folder, one, 8)
    with pytest.raises(TransportFailed, match="No such file"):
        taken(folder, name, 8)
    (folder.path / name).symlink_to(secret)
    with pytest.raises(TransportFailed, match="cannot be opened"):
        taken(folder, name, 8)
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    with pytest.raises(TransportFailed, match="not a plain file"):
        taken(folder, name, 8)
    (folder.path / name).unlink()
    (folder.path / name).mkdir()
    with pytest.raises(TransportFailed, match="not a plain file"):
        taken(folder, name, 8)
    with folder.write([b"12345678"]) as block:
        for size in (0, 7, 9, 1 << 20):
            with pytest.raises(TransportFailed, match="it has 8 bytes"):
                taken(folder, block.name, size)
        assert taken(folder, block.name, 8) == b"12345678"  # what was refused was left where it is
    assert secret.read_bytes() == b"12345678"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_block_of_another_user_is_refused(folder):
    with folder.write([b"12345678"]) as block:
        os.chown(folder.path / block.name, 12345, 12345)
        with pytest.raises(TransportFailed, match="belongs to user 12345"):
            taken(folder, block.name, 8)


def test_a_folder_that_others_may_write_to_or_that_is_a_link_is_not_used(tmp_path):
    open_one = tmp_path / "open"
    open_one.mkdir()
    open_one.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 0700"):
        SharedFolder(open_one)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(private)
    with pytest.raises(OSError, match=r"link"):
        SharedFolder(tmp_path / "link")


def test_blocks_of_a_killed_process_are_swept_and_those_of_a_living_one_stay(folder, tmp_path, monkeypatch):
    place = folder.path

    def writer():
        block = SharedFolder(place).write([b"abc"])
        (tmp_path / "name.new").write_text(block.name)
        (tmp_path / "name.new").rename(tmp_path / "name")
        time.sleep(600)

    process = Child(writer, tmp_path / "log")
    process.wait_until((tmp_path / "name").exists, "its block was written")
    name = (tmp_path / "name").read_text()
    with folder.write([b"mine"]) as mine:
        assert folder.sweep() == 0
        monkeypatch.setattr(shared_blocks, "STALE_SECONDS", -1.0)
        assert folder.sweep() == 0
        assert names(folder) == sorted([name, mine.name])
        process.end()
        assert folder.sweep() == 1
        assert names(folder) == [mine.name]


# the routes ------------------------------------------------------------------------------------------------------------


class Served:
    def __init__(self, folder, **options):
        self.engine = EchoEngine(numbered_weights(0))
        self.server = RolloutServer(self.engine, ServerOptions(shared_folder=folder, **options))
        self.server.start()
        self.app = build_app(self.server, TOKEN)

    async def __call__(self, path, body, method="POST"):
        return await call(self.app, method, path, body, token=TOKEN)

    async def begin(self, version, bucket=24):
        """(head, data) of every part of a version that was announced."""
        manifest, payloads = update_of(version, numbered_weights(version), bucket)
        reply = await self("/weights/begin", {"manifest": encode_manifest(manifest), "replace": True})
        assert reply.status == 200, reply
        return [split(payload) for payload in payloads]

    async def answer(self):
        body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 8}}
        return (await self("/generate", body)).json()["completions"][0][0]["ids"]


def split(payload):
    _, data = parse_head(payload)
    return payload[: len(payload) - len(data)], bytes(data)


def fetch(head, place, transport="shared_memory", **more):
    return {"transport": transport, "head": base64.b64encode(head).decode(), "place": place, **more}


@pytest.fixture
def served(tmp_path):
    made = Served(tmp_path / "blocks")
    yield made
    made.server.close()


def test_parts_come_from_shared_blocks_and_the_version_flips(served, folder):
    async def go():
        about = (await served("/info", b"", "GET")).json()["transports"]
        assert about["ways"]["shared_memory"] == folder.describe()
        assert set(about["ways"]) <= set(RECEIVERS)
        assert len(about["instance"]) == 16
        parts = await served.begin(1)
        for head, data in parts:
            with folder.write([data]) as block:
                assert (await served("/weights/fetch", fetch(head, {"name": block.name}))).status == 200
                assert names(folder) == [block.name]
                block.write([bytes(len(data))])
                # the answer was lost: asked again it is one part, although something else lies there by now
                assert (await served("/weights/fetch", fetch(head, {"name": block.name}))).status == 200
        assert (
            await served("/weights/part", parts[0][0] + parts[0][1])
        ).status == 200  # and over HTTP it is the same one
        assert (await served("/weights/commit", {"version": 1})).status == 200
        assert await served.answer() == [1] * 8

    asyncio.run(go())


def test_other_bytes_than_the_head_says_are_refused_whichever_way_they_came(served, folder):
    async def go():
        (head, data), *_ = await served.begin(1)
        for wrong in (data[:-1] + bytes([data[-1] ^ 1]), bytes(len(data)), data[::-1] + b""):
            with folder.write([wrong]) as block:
                reply = await served("/weights/fetch", fetch(head, {"name": block.name}))
            assert (reply.status, reply.json()["kind"]) == (400, "PayloadError")
        for wrong in (data[:-1], data + b"x", b"z"):
            with folder.write([wrong]) as block:
                reply = await served("/weights/fetch", fetch(head, {"name": block.name}))
            assert (reply.status, reply.json()["kind"]) == (424, "TransportFailed")
        assert (await served("/weights/commit", {"version": 1})).status == 409
        assert await served.answer() == [0] * 8

    asyncio.run(go())


def test_a_part_that_nobody_began_is_not_fetched(served, folder):
    async def go():
        parts = await served.begin(1)
        await served("/weights/abort", {"version": 1})
        with folder.write([parts[0][1]]) as block:
            assert (await served("/weights/fetch", fetch(parts[0][0], {"name": block.name}))).status == 404
            assert names(folder) == [block.name]

    asyncio.run(go())


def test_300_damaged_requests_are_refused_and_nothing_is_opened_or_mixed(served, folder, tmp_path):
    rng = random.Random(4)
    (tmp_path / "outside").write_bytes(b"12345678" * 3)
    values = [
        None, True, -1, 0, 1 << 60, 1.5, "", "..", "../outside", "/etc/passwd", "a" * 70_000, [], {}, [1], {"name": "x"},
        "block-" + "0" * 32, "é" * 10, "====", "AAA", "\ud800", float("1e300"), base64.b64encode(b"x" * 99).decode(),
    ]  # fmt: skip

    async def go():
        parts = await served.begin(1)
        for i in range(300):
            head, data = parts[i % len(parts)]
            with folder.write([data]) as block:
                body = fetch(head, {"name": block.name}, rng.choice(["shared_memory"] * 3 + ["cuda_ipc"]))
                where = rng.choice([body, body["place"]])
                field = rng.choice(list(where))
                where[field] = rng.choice(values)
                if i % 3 == 0:
                    damaged = bytearray(head)
                    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
                    body["head"] = base64.b64encode(damaged).decode()
                if i % 7 == 0:
                    where["more"] = 1
                reply = await served("/weights/fetch", json.dumps(body).encode())
            assert 400 <= reply.status < 500, (body, reply)
            assert "error" in reply.json()
            if i % 30 == 0:
                assert await served.answer() == [0] * 8
        for head, data in parts:
            with folder.write([data]) as block:
                assert (await served("/weights/fetch", fetch(head, {"name": block.name}))).status == 200
        assert (await served("/weights/commit", {"version": 1})).status == 200
        assert await served.answer() == [1] * 8

    asyncio.run(go())
    assert names(folder) == []
    assert (tmp_path / "outside").read_bytes() == b"12345678" * 3


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"backend": "mpi"}, 400),
        ({"backend": "nccl"}, 424),
        ({"address": "localhost"}, 400),
        ({"address": "evil.example"}, 400),
        ({"address": "1.2.3.4.5"}, 400),
        ({"port": 0}, 400),
        ({"port": "80"}, 400),
        ({"key": "../" * 10 + "xy"}, 400),
        ({"key": "a"}, 400),
        ({"deadline_s": 0}, 400),
        ({"deadline_s": 1e9}, 400),
        ({"more": 1}, 400),
        ({}, 424),  # right in itself, and nobody is there
    ],
)
def test_a_group_is_joined_only_where_the_body_makes_sense(served, change, status):
    if status == 424 and "backend" in change and torch.cuda.is_available():
        pytest.skip("this machine may have NCCL")
    with_nobody = {"backend": "gloo", "address": "127.0.0.1", "port": 9, "key": "0" * 32, "deadline_s": 1.0}
    began = time.monotonic()
    reply = asyncio.run(served("/weights/collective", with_nobody | change))
    assert reply.status == status, reply
    assert time.monotonic() - began < 60


def test_parts_larger_than_allowed_and_empty_ones_are_not_fetched(tmp_path, folder):
    one = Served(tmp_path / "blocks", most_part_bytes=8)

    async def go():
        (head, data), *_ = await one.begin(1)
        with folder.write([data]) as block:
            assert (await one("/weights/fetch", fetch(head, {"name": block.name}))).status == 413

    asyncio.run(go())
    one.server.close()


def test_base64_is_strict():
    class Short(Body):
        x: Annotated[Bytes, Field(max_length=6)]

    assert read({"x": "AAEC"}, Short).x == b"\0\1\2"
    for wrong in (None, 3, "A", "AA", "A A=", "AAAA\n", "é", "A" * 400, b"AAAA"):
        with pytest.raises(FieldError, match="`x` of the body is wrong: "):
            read({"x": wrong}, Short)
    with pytest.raises(PayloadError):
        parse_head(b"")


def test_answers_are_not_held_back():
    bound = bind("127.0.0.1", 0)
    assert bound.proto == socket.IPPROTO_TCP  # by which asyncio knows that it may send at once
    bound.close()


# groups ----------------------------------------------------------------------------------------------------------------


def pair_up(seconds=10.0):
    """Both ends, in this process."""
    rendezvous = Rendezvous("127.0.0.1", 9, secrets.token_hex(16), seconds)
    ends = []
    other = threading.Thread(
        target=lambda: ends.append(join(GLOO, rendezvous.address, rendezvous.port, rendezvous.key, seconds))
    )
    other.start()
    mine = rendezvous.pair(GLOO, seconds, torch.device("cpu"))
    other.join(seconds)
    return mine, ends[0]


def test_a_group_passes_bytes_on_and_leaves_the_default_group_alone():
    assert not torch.distributed.is_initialized()
    mine, theirs = pair_up()
    for size in (1, 1000, 3_000_001):
        sent = torch.randint(0, 256, (size,), dtype=torch.uint8)
        other = threading.Thread(target=theirs.broadcast, args=(theirs.buffer(size), 10))
        other.start()
        mine.broadcast(sent, 10)
        other.join(10)
        assert torch.equal(theirs.buffer(size), sent)
    assert not torch.distributed.is_initialized()
    mine.close()
    theirs.close()
    with pytest.raises(TransportFailed, match="closed"):
        mine.broadcast(sent, 1)


def test_a_silent_end_costs_the_deadline_and_not_more():
    mine, theirs = pair_up()
    began = time.monotonic()
    with pytest.raises(TransportFailed, match=r"broadcast of weights"):
        theirs.broadcast(theirs.buffer(1000), 0.5)
    theirs.close()
    assert time.monotonic() - began < 60
    mine.close()


def test_a_meeting_without_the_other_is_over_at_its_deadline():
    rendezvous = Rendezvous("127.0.0.1", 9, secrets.token_hex(16), 0.5)
    began = time.monotonic()
    with pytest.raises(TransportFailed):
        rendezvous.pair(GLOO, 0.5, torch.device("cpu"))
    with pytest.raises(TransportFailed):  # somebody who does not know the key meets nobody
        join(GLOO, rendezvous.address, rendezvous.port, secrets.token_hex(16), 0.5)
    assert time.monotonic() - began < 60
    waiting = lambda: [one for one in threading.enumerate() if one.name == "collective: Making the group"]  # noqa: E731
    eventually(lambda: not waiting(), 60)  # the threads in which the two waited are gone: torch has the deadline, too


def test_a_broadcast_may_take_longer_than_the_group_took_to_connect():
    mine, theirs = pair_up(1.0)
    sent, received = torch.arange(7, dtype=torch.uint8), theirs.buffer(7)
    other = threading.Thread(target=theirs.broadcast, args=(received, 60))
    other.start()
    time.sleep(1.5)  # the trainer is late by more than the second that the group had
    mine.broadcast(sent, 60)
    other.join(60)
    assert received.tolist() == list(range(7))
    mine.close()
    theirs.close()
