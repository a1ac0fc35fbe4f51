"""Connections that keep the server waiting, without a token: closed after a while, and never in the way of others."""

import asyncio
import contextlib
import importlib.util
import socket
import time

import pytest

from posttrain.serve.http.app import build_app
from posttrain.serve.http.connections import HEAD_SECONDS, MAX_CONNECTIONS, bounded_protocol, connections_for
from posttrain.serve.server import RolloutServer, ServerOptions
from tests.serve.echo_engine import EchoEngine, numbered_weights

uvicorn = pytest.importorskip("uvicorn")

TOKEN = "a-token-of-the-tests-7c1"
WITH_TOKEN = b"Authorization: Bearer %s\r\n" % TOKEN.encode()
HALF = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + WITH_TOKEN
LEFT_OUT = pytest.mark.skipif(not importlib.util.find_spec("httptools"), reason="httptools is not installed")


def protocol(name):
    from uvicorn.protocols.http import auto, h11_impl

    return auto.AutoHTTPProtocol if name == "httptools" else h11_impl.H11Protocol


@pytest.fixture(params=["h11", pytest.param("httptools", marks=LEFT_OUT)])
def serve(request):
    """`serve(test, most, seconds)`: runs `test(port)` in the loop of a server with these bounds."""
    server = RolloutServer(EchoEngine(numbered_weights(0), step_seconds=0.05), ServerOptions())
    server.start()

    def run(test, most=100, seconds=0.3):
        async def both():
            bound = socket.create_server(("127.0.0.1", 0))
            made = bounded_protocol(protocol(request.param), most, seconds)
            config = uvicorn.Config(build_app(server, TOKEN), http=made, lifespan="off", log_config=None)
            web = uvicorn.Server(config)
            task = asyncio.ensure_future(web.serve(sockets=[bound]))
            while not web.started:
                assert not task.done(), "the server has ended"
                await asyncio.sleep(0.01)
            try:
                await asyncio.wait_for(test(bound.getsockname()[1]), 120)
            finally:
                web.should_exit = True
                await task

        asyncio.run(both())

    yield run
    server.close()


async def opened(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def answered(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(length)


async def seconds_until_closed(reader):
    began = time.monotonic()
    with contextlib.suppress(ConnectionResetError):  # closed, too
        assert await reader.read() == b""
    return time.monotonic() - began


def test_half_a_head_is_waited_for_so_long_and_no_longer(serve):
    async def test(port):
        silent, first = await opened(port)
        half, second = await opened(port, HALF)
        slow, trickle = await opened(port)
        again, once = await opened(port, HALF + b"\r\n")
        assert (await answered(again))[0] == 200
        once.write(HALF)  # a second request on a connection whose first one was whole

        async def drip():
            for byte in HALF * 10:
                trickle.write(bytes([byte]))
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        for reader in (silent, half, slow, again):
            assert await seconds_until_closed(reader) < 10  # the trickle goes on for 17
        for writer in (first, second):  # kept until here: a writer that nobody keeps is closed
            writer.close()
        dripping.cancel()

    serve(test)


def test_long_answers_slow_bodies_and_second_requests_are_not_cut(serve):
    async def test(port):
        body = b'{"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 20}}'
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (WITH_TOKEN, len(body))
        reader, writer = await opened(port, head)
        for start in range(0, len(body), 20):
            await asyncio.sleep(0.2)
            writer.write(body[start : start + 20])
        assert (await answered(reader))[0] == 200  # after 1 s of steps
        await asyncio.sleep(0.5)
        writer.write(HALF)
        await asyncio.sleep(0.05)
        writer.write(b"\r\n")
        assert (await answered(reader))[0] == 200

    serve(test)


def test_when_all_connections_are_taken_the_oldest_that_waits_makes_room(serve):
    async def test(port):
        body = b'{"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 20}}'
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (WITH_TOKEN, len(body))
        working, kept = await opened(port, head + body)
        await asyncio.sleep(0.1)
        half = [await opened(port, HALF) for _ in range(30)]
        for _ in range(5):
            reader, writer = await opened(port, HALF + b"\r\n")
            assert (await answered(reader))[0] == 200
            writer.close()
        for reader, _ in half[:20]:
            assert await seconds_until_closed(reader) < 10  # not the 30 that it may wait
        assert (await answered(working))[0] == 200
        kept.close()

    serve(test, most=10, seconds=30)


def test_the_bounds_of_the_server():
    assert HEAD_SECONDS == 10.0
    assert [connections_for(count) for count in (64, 256, 1024, 1 << 20)] == [32, 128, 768, MAX_CONNECTIONS]
