"""Waits that have an end, servers that came back as others, and what is left of an engine that nobody has any more."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from posttrain.core.transport import ServerAnswer, ServerGone, ServerRefused, ServerSlow
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from tests.rollout.served import QUICK, FakeClient, echo_process, needs_uvicorn, numbered
from tests.waiting import eventually

HASTY = Deadlines(completion=0.5, back=0.5)


@pytest.fixture
def fakes():
    made = []

    def make(count=1, deadlines=HASTY):
        clients = [FakeClient(f"fake-{i}") for i in range(count)]
        made.append(ServedVLLM(clients, options=ServedOptions(deadlines, watch_seconds=0.05)))
        return made[-1], clients

    yield make
    for engine in made:
        engine.close()


def within(seconds, action):
    """What the action raises; an error where it has not ended in time."""
    raised = []

    def run():
        try:
            action()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it still waits after {seconds} s"
    return raised[0] if raised else None


def test_scores_that_never_come_are_a_sentence(fakes):
    engine, clients = fakes()
    clients[0].fail["score"] = [ServerAnswer("no prompt_logprobs in the answer")] * 1000
    error = within(15, lambda: engine.scores_by_server([[1, 2, 3]]))
    assert isinstance(error, ServerSlow)
    assert "the last time no prompt_logprobs in the answer" in str(error)
    assert len(clients[0].fail["score"]) >= 980  # at most 20 questions


def test_a_watcher_outlives_errors_that_nobody_foresaw(fakes):
    """Without it a server that is down would never be brought back, and the run would wait for all of `back`."""
    engine, clients = fakes(deadlines=Deadlines(back=60))
    clients[0].fail["health"] = [RuntimeError("can't start new thread")]
    eventually(lambda: not clients[0].fail["health"])
    clients[0].fail["generate"] = [ServerGone("it died")]
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(4))
    assert completion.ids.tolist() == [0, 0]
    eventually(lambda: engine.fleet.up())


def test_whoever_waits_for_servers_that_are_closed_is_told_at_once(fakes):
    """Nobody brings them back any more; the deadline of a run without servers is half an hour."""
    engine, clients = fakes(deadlines=Deadlines())
    clients[0].fail = {"generate": [ServerGone("it died")] * 5, "health": [ServerGone("it died")] * 10_000}
    closing = threading.Thread(target=lambda: (eventually(lambda: not engine.fleet.up()), engine.close()))
    closing.start()
    error = within(60, lambda: generate(engine, [Prompt([1])], SamplingParams(4)))
    closing.join(60)
    assert str(error) == "The servers were closed by this trainer while it still waited for them."


def test_scores_that_come_late_are_taken(fakes):
    engine, clients = fakes(deadlines=Deadlines())
    clients[0].fail["score"] = [ServerGone("cut off")] * 3
    found = engine.scores_by_server([[1, 2, 3]])
    assert [one.tolist() for one in found["fake-0"]] == [[-1.0, -1.0]]


def test_a_server_that_is_busy_for_ever_is_a_sentence(fakes):
    engine, clients = fakes()
    clients[0].fail["generate"] = [ServerRefused("too many requests", 429)] * 1000
    error = within(15, lambda: generate(engine, [Prompt([1, 2], key=3)], SamplingParams(4)))
    assert isinstance(error, ServerSlow)
    assert str(error).startswith("Prompt 3 was refused for more than 0.5 s")
    assert "too many requests" in str(error)


def test_a_server_that_is_busy_with_our_own_prompts_is_waited_for(fakes):
    """The last prompt waits for longer than a completion may take; but all the time others come back."""
    engine, clients = fakes()
    write, room = clients[0].generate, threading.Semaphore(1)

    def one_at_a_time(request):
        if not room.acquire(blocking=False):
            raise ServerRefused("too many requests", 429)
        try:
            time.sleep(0.1)
            return write(request)
        finally:
            room.release()

    clients[0].generate = one_at_a_time
    began = time.monotonic()
    completions = generate(engine, [Prompt([1])] * 8, SamplingParams(4))
    assert [one.error for one in completions] == [None] * 8
    assert time.monotonic() - began > 2 * HASTY.completion


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("logprobs_mode", "raw_logprobs", "with logprobs_mode raw_logprobs; this run began with processed_logprobs"),
        ("context_length", 16, "with context_length 16; this run began with 100"),
        ("vocabulary", 999, "with vocabulary 999; this run began with 1000"),
    ],
)
def test_a_server_that_came_back_as_another_is_refused(fakes, field, value, said):
    engine, clients = fakes(deadlines=Deadlines(back=20))
    engine.load_weights(numbered(1), 1)
    clients[0].about = {field: value}
    clients[0].fail["generate"] = [ServerGone("it was restarted")]
    with pytest.raises(ServerRefused, match=said) as caught:
        generate(engine, [Prompt([1])], SamplingParams(4))
    assert caught.value.status == 400
    clients[0].about = {}  # as before: it is taken again
    eventually(lambda: engine.fleet.up())
    (completion,) = generate(engine, [Prompt([1])], SamplingParams(4))
    assert completion.ids.tolist() == [1, 1]


def watchers(name="fake"):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"watch {name}")]


def test_an_engine_that_nobody_has_any_more_ends_its_watch_and_lets_go_of_its_weights():
    client = FakeClient("fake-dropped")
    engine = ServedVLLM([client], options=ServedOptions(HASTY, watch_seconds=0.05))
    engine.load_weights(numbered(1), 1)
    kept = weakref.ref(engine.target.kept)
    del engine
    gc.collect()
    eventually(lambda: not watchers("fake-dropped"))
    eventually(lambda: client.closed == 1)
    eventually(lambda: kept() is None)
    client.served = (77, "a later trainer's")
    time.sleep(0.3)
    assert client.served == (77, "a later trainer's")


def test_a_closed_engine_is_closed_once_and_holds_no_weights(fakes):
    engine, clients = fakes(2)
    engine.load_weights(numbered(1), 1)
    engine.close()
    assert not watchers()
    assert (engine.target.kept, engine.version) == (None, 1)
    made = weakref.ref(engine.fleet)
    assert [client.closed for client in clients] == [1, 1]
    assert made()._closing.is_set()


@needs_uvicorn
def test_shared_memory_is_let_go_of_at_the_end(tmp_path):
    server = echo_process(tmp_path)
    try:
        server.restart()
        client = ServerClient(server.client.name, server._token, QUICK, "shared_memory")
        engine = ServedVLLM([client], options=ServedOptions(QUICK))
        engine.load_weights(numbered(1), 1)
        folder = client.channel._sender._folder
        engine.close()
        assert client.channel._sender is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            folder.write([memoryview(b"x")])
    finally:
        server.close()
