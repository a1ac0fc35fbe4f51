"""What all requests together may take: completions in flight, and bytes of bodies."""

import asyncio
import itertools
import threading
import time

import pytest
from starlette.requests import Request

from posttrain.serve.errors import Busy
from posttrain.serve.http.app import BodyMemory, read_body
from posttrain.serve.server import ServerOptions
from tests.serve.served_app import TOKEN, asked


def group(n, prompts=1):
    return [{"ids": [1], "n": n}] * prompts


async def until_in_flight(one, count):
    """What was given up ends at the next step of the engine."""
    end = time.monotonic() + 60
    while one.server.thread.in_flight != count and time.monotonic() < end:
        await asyncio.sleep(0.01)
    assert one.server.thread.in_flight == count


@pytest.mark.parametrize("route", ["/generate", "/score"])
def test_never_more_in_flight_than_the_limit_however_requests_come(served, route):
    one = served(options=ServerOptions(most_in_flight=10))
    most = [0]
    step = one.engine.step

    def watched():
        most[0] = max(most[0], len(one.engine._jobs))
        return step()

    one.engine.step = watched
    standing, all_asked = threading.Event(), threading.Event()

    def stand_still(engine):
        """Nothing ends before the last request has come."""
        standing.set()
        return all_asked.wait(60)

    async def go():
        if route == "/generate":
            bodies = [asked(f"r{i}", tokens=2, prompts=group(3)) for i in range(8)]
        else:
            bodies = [{"request_id": f"s{i}", "sequences": [{"ids": [1, 2]}] * 3} for i in range(8)]
        held = asyncio.ensure_future(asyncio.to_thread(one.server.thread.call, stand_still, 60))
        await asyncio.to_thread(standing.wait, 60)
        under_way = [asyncio.ensure_future(one("POST", route, body)) for body in bodies]
        refused = [await reply for reply in itertools.islice(asyncio.as_completed(under_way), 5)]
        assert [reply.status for reply in refused] == [429] * 5
        assert "9 completions are in flight and 3 more are asked for" in refused[0].json()["error"]
        all_asked.set()
        assert await held
        assert sorted([reply.status for reply in await asyncio.gather(*under_way)]) == [200] * 3 + [429] * 5
        assert one.server.thread.in_flight == 0
        assert (await one("POST", route, bodies[-1])).status == 200  # tried again, as a trainer does

    asyncio.run(go())
    assert most[0] == 9


def test_a_request_that_can_never_be_taken_is_refused_before_its_jobs_are_made(served):
    one = served()

    async def go():
        body = asked(prompts=group(1024, 400), tokens=1)
        reply = await one("POST", "/generate", body)
        assert one.engine.started == []
        assert reply.status == 413
        assert "for 409600 completions; this server takes at most 4096" in reply.json()["error"]
        assert (await one("POST", "/generate", asked(prompts=group(1024, 4), tokens=1))).status == 200

    asyncio.run(go())
    assert len(one.engine.started) == 4096


def test_room_is_free_again_however_a_job_ends(served):
    one = served(options=ServerOptions(most_in_flight=4), step_seconds=0.01)

    async def go():
        late = await one("POST", "/generate", asked("late", tokens=1000, prompts=group(4), deadline_s=0.1))
        await until_in_flight(one, 0)
        stale = await one("POST", "/generate", asked("stale", prompts=group(4), accept={"min": 5}))
        await until_in_flight(one, 0)
        one.engine.add, add = lambda job, adapter: 1 / 0, one.engine.add
        refused = await one("POST", "/generate", asked("refused", prompts=group(4)))
        one.engine.add = add
        assert (late.status, stale.status, refused.status) == (504, 409, 400)
        await until_in_flight(one, 0)
        assert (await one("POST", "/generate", asked("whole", prompts=group(4)))).status == 200
        assert one.server.thread.in_flight == 0
        running = [asyncio.ensure_future(one("POST", "/generate", asked(f"x{i}", tokens=1000))) for i in range(4)]
        await until_in_flight(one, 4)
        await asyncio.to_thread(one.server.thread.stop)
        assert [reply.status for reply in await asyncio.gather(*running)] == [500] * 4
        assert one.server.thread.in_flight == 0

    asyncio.run(go())


def test_bodies_that_are_under_way_have_a_bound_together(served):
    one = served(options=ServerOptions(most_bodies_bytes=100_000))
    memory = one.app.app.state.bodies

    async def go():
        held = asyncio.Event()

        async def slow_receive():
            await held.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError("nobody is there to be answered")

        headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-length", b"99000")]
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": headers}
        slow = asyncio.ensure_future(one.app(scope, slow_receive, send))
        await asyncio.sleep(0)
        assert memory.held == 99_000
        reply = await one("POST", "/weights/part", b"x" * 2000)
        assert reply.status == 429
        assert "have 99000 bytes, and this one 2000" in reply.json()["error"]
        assert (await one("POST", "/weights/part", chunks=[b"x" * 600] * 3)).status == 429
        assert (await one("GET", "/health")).status == 200
        assert (await one("POST", "/generate", asked())).status == 200
        held.set()
        await slow
        assert memory.held == 0
        assert (await one("POST", "/weights/part", b"x" * 2000)).status == 400

    asyncio.run(go())
    assert memory.held == 0


def test_a_body_without_a_length_is_counted_as_it_comes():
    memory = BodyMemory(100)
    seen = []

    async def receive():
        seen.append(memory.held)
        return {"type": "http.request", "body": b"x" * 30, "more_body": True}

    async def go():
        with memory.share() as hold:
            await read_body(Request({"type": "http", "headers": []}, receive), 1000, hold)

    with pytest.raises(Busy, match="have 90 bytes, and this one 120"):
        asyncio.run(go())
    assert (seen, memory.held) == ([0, 30, 60, 90], 0)
