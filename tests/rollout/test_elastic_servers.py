"""Servers that join a run, leave it, stop, and come back: every prompt is written once, by the weights that it was asked of."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from posttrain.core.transport import ServerRefused
from posttrain.rollout.engines.protocol import SamplingParams, generate
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.fleet import RETRY_SECONDS
from posttrain.rollout.engines.vllm.fleet_members import Member
from posttrain.rollout.engines.vllm.roster import Roster
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from tests.rollout.served import QUICK, FakeClient, echo_process, needs_uvicorn, numbered, prompts
from tests.waiting import eventually

TOKEN = "the-same-for-all-of-them"
OPTIONS = ServedOptions(QUICK, watch_seconds=0.1)


@pytest.fixture
def fakes():
    """Makes engines over servers in this process."""
    made = []

    def make(count=1, options=OPTIONS):
        made.append(ServedVLLM([FakeClient(f"fake-{i}") for i in range(count)], options=options))
        made[-1].load_weights(numbered(7), 1)
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def numbers(engine, count=12):
    return {token for one in generate(engine, prompts(count, random.Random(0)), SamplingParams(8)) for token in one.ids}


def state(engine, name):
    return next((member for member in engine.fleet.members if member.name == name), None)


def test_a_server_that_joins_is_fed_before_it_is_asked(fakes):
    engine, late = fakes(), FakeClient("late")
    engine.fleet.join(Member(late))
    eventually(lambda: state(engine, "late").is_up)
    assert (late.number, late.served) == (7, (engine.target.version, engine.target.fingerprint))
    first = state(engine, "fake-0").client
    first.generate = lambda request: time.sleep(0.02) or FakeClient.generate(first, request)
    assert numbers(engine) == {7}
    assert late.written > 0
    engine.load_weights(numbered(8), 2)  # and it belongs to them from now on
    assert (late.number, numbers(engine)) == (8, {8})


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"context_length": 99}, "added with context_length 99; this run began with 100"),
        ({"vocabulary": 7}, "added with vocabulary 7"),
        ({"logprobs_mode": "raw_logprobs"}, "added with logprobs_mode"),
        (401, "another run's secret"),
    ],
)
def test_a_server_that_is_refused_for_good_is_asked_once_and_again_when_its_entry_is_new(
    fakes, tmp_path, caplog, about, said
):
    engine, late, asked = fakes(), FakeClient("late"), []

    def info():
        asked.append(1)
        if about == 401:
            raise ServerRefused("another run's secret", 401)
        return FakeClient.info(late)

    late.info, late.about = info, {} if about == 401 else about
    file = tmp_path / "rollout_servers"
    roster = Roster(file, engine.fleet, lambda line: late)
    file.write_text("http://late\n")
    roster.look()
    eventually(lambda: state(engine, "late") is None)
    time.sleep(3 * RETRY_SECONDS)
    roster.look()
    assert (len(asked), late.written, numbers(engine)) == (1, 0, {7})
    (line,) = [record.getMessage() for record in caplog.records if "cannot join" in record.getMessage()]
    assert said in line
    late.info, late.about = FakeClient.info.__get__(late), {}
    for content in ("", "http://late\n"):
        file.write_text(content)
        roster.look()
    eventually(lambda: state(engine, "late").is_up)


def test_a_server_that_computes_otherwise_is_not_asked(fakes):
    engine, late = fakes(), FakeClient("late")
    engine.probed([np.arange(9)])
    late.score = lambda sequences, version: [[-3.0] * (len(ids) - 1) for ids in sequences]
    engine.fleet.join(Member(late))
    eventually(lambda: "its log-probs differ from those of the other servers by 2" in state(engine, "late").why)
    assert not state(engine, "late").is_up
    late.score = FakeClient.score.__get__(late)
    eventually(lambda: state(engine, "late").is_up)


def test_a_file_says_who_joins_and_who_leaves(fakes, tmp_path, caplog):
    engine, clients = fakes(), {}

    def connect(line):
        if "//" not in line:
            raise ValueError("it is no address")
        return clients.setdefault(line, FakeClient(line))

    file = tmp_path / "rollout_servers"
    roster = Roster(file, engine.fleet, connect)
    roster.look()  # no file: nobody
    file.write_text("# more of them\nhttp://a\n\nhttp://b  # the second\nnonsense\nhttp://a\n")
    for _ in range(3):
        roster.look()
    eventually(lambda: len(engine.fleet.up()) == 3)
    assert [record.getMessage() for record in caplog.records if "nonsense" in record.getMessage()] == [
        f"'nonsense' in {file} is no server that can join: it is no address"
    ]
    file.write_text("http://b\n")
    roster.look()
    assert {member.name for member in engine.fleet.members} == {"fake-0", "http://b"}
    eventually(lambda: clients["http://a"].closed)
    assert numbers(engine) == {7}
    file.chmod(0o666)
    file.write_text("")
    roster.look()
    assert "others than this user may write to it" in caplog.text
    assert len(engine.fleet.members) == 2  # nobody is taken out by a file that is not believed


def test_twenty_servers_come_and_go_and_every_prompt_is_written_once(fakes):
    engine, rng, ended = fakes(2), random.Random(3), threading.Event()

    def change():
        for number in range(20):
            name = f"guest-{number}"
            engine.fleet.join(Member(FakeClient(name)))
            if rng.random() < 0.7:
                ended.wait(0.05)
            engine.fleet.leave(name if rng.random() < 0.8 else f"guest-{rng.randrange(20)}")
        ended.set()

    thread = threading.Thread(target=change)
    thread.start()
    rounds = 0
    while not ended.is_set() or rounds < 3:
        asked = prompts(40, rng)
        written = generate(engine, asked, SamplingParams(8))
        assert len(written) == 40
        assert {token for one in written for token in one.ids} == {7}
        rounds += 1
    thread.join()


@needs_uvicorn
def test_a_server_that_is_stopped_ends_what_it_has_and_comes_back_when_it_is_started(tmp_path):
    """Two that are not ours to restart. The one that is stopped writes its short completions and hands the long one back."""
    slow = ("--engine-args", '{"step_seconds": 0.02}', "--stop-seconds", "1")
    processes = [echo_process(tmp_path, *slow, name=f"echo-{i}", token=TOKEN) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.wait_until_healthy()
    clients = [ServerClient(process.client.name, TOKEN, QUICK) for process in processes]
    asked = [dataclasses.replace(one, max_tokens=20 if one.key else 300) for one in prompts(40, random.Random(4))]
    with ServedVLLM(clients, options=OPTIONS) as engine:
        engine.load_weights(numbered(5), 1)
        sent = [[], []]
        for client, seen in zip(clients, sent):
            client.generate = lambda request, client=client, seen=seen: (
                seen.append(tuple(request.ids)) or ServerClient.generate(client, request)
            )
        threading.Timer(0.2, lambda: os.kill(processes[0].pid, signal.SIGTERM)).start()
        for completion, prompt in zip(generate(engine, asked, SamplingParams(300)), asked):
            assert completion.ids.tolist() == [5] * prompt.max_tokens
        twice = len(sent[0]) + len(sent[1]) - len(asked)
        assert twice <= 3  # the long one, and what was on its way just then: all others ended where they began
        eventually(lambda: not processes[0].is_running)
        assert processes[0]._end() == 0
        processes[0].start()
        eventually(lambda: len(engine.fleet.up()) == 2)
        assert numbers(engine) == {5}
    for process in processes:
        process.close()
