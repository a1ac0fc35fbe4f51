"""The client against sockets that misbehave, and the fleet with clients that are told what to do. No server process."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import threading
import time

import httpcore
import pytest
import torch

from posttrain.core.transport import (
    Address,
    ServerAnswer,
    ServerError,
    ServerGone,
    ServerRefused,
    ServerSlow,
    Transport,
)
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm import fleet
from posttrain.rollout.engines.vllm.client import GenerateRequest, ServerClient, ServerCompletion, ServerInfo
from posttrain.rollout.engines.vllm.fleet import Target
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights, common_checksum
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines, in_parallel, parallel_calls
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from posttrain.serve.weights.staging import Staging
from posttrain.serve.wire import payload
from posttrain.serve.wire.host_memory import HostMemory
from posttrain.serve.wire.payload import Manifest
from tests.rollout.served import SOON, FakeClient, SocketServer, http, numbered, prompts, read_request
from tests.serve.serving import joined, parsed
from tests.waiting import eventually

TOKEN = "a-token-nobody-may-see-5"
REQUEST = GenerateRequest("r-0-0", [1, 2], 7, 4, SamplingParams(8), 5)
RIGHT = {
    "request_id": "r-0-0",
    "logprobs_mode": "processed_logprobs",
    "completions": [
        [
            {
                "ids": [3, 4],
                "logps": [-1.0, -2],
                "finish_reason": "stop",
                "stop_reason": None,
                "spans": [[0, 2, 5]],
                "version": 5,
                "error": None,
            }
        ]
    ],
}


@pytest.fixture
def serve():
    """Starts socket servers, and closes them."""
    made = []

    def make(behave):
        made.append(SocketServer(behave))
        return made[-1]

    yield make
    for server in made:
        server.close()


def answers(*bodies):
    """A behaviour: one answer for each request of a connection, the last one for ever."""

    def behave(connection, number):
        count = 0
        while True:
            read_request(connection)
            connection.sendall(bodies[min(count, len(bodies) - 1)])
            count += 1

    return behave


def changed(**fields):
    """RIGHT with other fields of its completion."""
    completion = RIGHT["completions"][0][0] | fields
    return http(json.dumps(RIGHT | {"completions": [[completion]]}).encode())


# ---- answers ---------------------------------------------------------------------------------------------------------------


def test_a_right_answer_is_taken_as_it_is(serve):
    client = ServerClient(serve(answers(http(json.dumps(RIGHT).encode()))).url, TOKEN, SOON)
    assert client.generate(REQUEST) == ServerCompletion(
        [3, 4], [-1.0, -2.0], "stop", 5, "processed_logprobs", spans=((2, 5),)
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\x00\xff\x13garbage\r\n\r\n" * 9, "the reply is not HTTP"),
        (b"HTTP/1.1 abc OK\r\n\r\n", "the reply is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200_000 + b"\r\n", "the reply is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n{}", "before the answer did|within"),
        (http(b"<html>"), "not JSON"),
        (http(b""), "not JSON"),
        (http(b"[" * 100_000), "not JSON"),
        (http(b"[]"), "not what this client understands"),
        (http(b"{}"), "not what this client understands.*request_id"),
        (http(json.dumps(RIGHT | {"request_id": "other"}).encode()), "that of request other"),
        (http(json.dumps(RIGHT | {"completions": []}).encode()), "not what this client"),
        (changed(ids=[3]), "1 tokens and 2 log-probs"),
        (changed(ids=[3, "4"]), "not token ids"),
        (changed(ids=[3, -4]), "not token ids"),
        (changed(ids=[1] * 6, logps=[0.0] * 6, spans=[[0, 6, 5]]), "more than the 4 allowed"),
        (changed(spans=[[0, 2, 4]]), "of version 4, and 5 was asked for"),
        (changed(spans=[[0, 1, 5]]), "wrote 1 of 2 tokens"),
        (changed(finish_reason="tired"), "ends with 'tired'"),
        (changed(ids=[], logps=[], spans=[]), "after 0 tokens"),
        (changed(logps=[None, -1.0]), "log-probs"),
    ],
)
def test_an_answer_that_is_none_is_a_typed_error_within_the_deadline(serve, answer, said):
    def behave(connection, number):
        read_request(connection)
        connection.sendall(answer)
        connection.close()

    client = ServerClient(serve(behave).url, TOKEN, SOON)
    began = time.monotonic()
    with pytest.raises((ServerAnswer, ServerGone, ServerSlow), match=said) as caught:
        client.generate(REQUEST)
    assert time.monotonic() - began < 20
    assert TOKEN not in str(caught.value)


def test_5000_mutations_of_an_answer_raise_typed_errors_or_are_right():
    """At the reader itself: bytes of a right answer changed, cut and doubled."""
    from posttrain.core.transport import _read, checked
    from posttrain.rollout.engines.vllm.client import _written

    rng, right, taken = random.Random(0), json.dumps(RIGHT).encode(), 0
    for _ in range(5000):
        text = right
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            new = bytes([rng.choice(b'0123456789[]{}",.-eE\xff')]) * rng.randint(0, 1)
            text = text[:place] + new + text[place + rng.randint(0, 9) :]
        try:
            written = checked("it", lambda value: _written(value, REQUEST), _read("it", 200, "", text))
        except ServerError:
            continue
        taken += 1
        assert len(written.ids) == len(written.logps) <= 4
        assert all(type(token) is int for token in written.ids)
    assert taken < 2500


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        ("409 Conflict", b'{"error": "Version 3 serves.", "kind": "Conflict"}', "status 409: Version 3 serves"),
        ("502 Bad Gateway", b"<html>proxy</html>", "status 502: '<html>proxy"),
        ("404 Not Found", b'{"error": {"message": "No such model"}}', "status 404: No such model"),
        ("301 Moved", b"", "status 301: an empty body"),
    ],
)
def test_refusals_carry_their_status_and_sentence(serve, status, body, said):
    client = ServerClient(serve(answers(http(body, status))).url, TOKEN, SOON)
    with pytest.raises(ServerRefused, match=said) as caught:
        client.generate(REQUEST)
    assert caught.value.status == int(status[:3])


# ---- time ------------------------------------------------------------------------------------------------------------------


def test_a_byte_now_and_then_does_not_stretch_the_deadline(serve):
    def drip(connection, number):
        read_request(connection)
        for byte in http(json.dumps(RIGHT).encode()):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    transport = Transport(serve(drip).url, None)
    began = time.monotonic()
    with pytest.raises(ServerSlow, match=r"bytes of an answer came within 0\.6 s"):
        transport.ask("POST", "/generate", {}, 0.6)
    assert 0.5 < time.monotonic() - began < 10  # all of them would take longer


def test_silence_is_slow_and_a_closed_port_is_gone(serve):
    silent = serve(lambda connection, number: time.sleep(30))
    began = time.monotonic()
    with pytest.raises(ServerSlow, match=r"no answer came within 0\.5 s"):
        Transport(silent.url, None).ask("GET", "/health", None, 0.5)
    assert time.monotonic() - began < 20
    silent.close()
    with pytest.raises(ServerGone, match="no connection"):
        Transport(silent.url, None).ask("GET", "/health", None, 0.5)


def test_a_server_that_reads_nothing_does_not_block_a_large_body(serve):
    deaf = serve(lambda connection, number: time.sleep(30))
    began = time.monotonic()
    with pytest.raises(ServerSlow):
        Transport(deaf.url, None).ask("POST", "/weights/part", bytes(64 << 20), 0.7)
    assert time.monotonic() - began < 20


def test_breaking_off_ends_every_call_at_once(serve):
    transport = Transport(serve(lambda connection, number: time.sleep(30)).url, None)
    threading.Timer(0.4, lambda: transport.cancel_calls("it was stopped.")).start()
    began = time.monotonic()
    found = in_parallel(lambda _: transport.ask("POST", "/generate", {}, 30), range(8))
    assert time.monotonic() - began < 20
    assert all(isinstance(error, ServerGone) and "cancelled: it was stopped." in str(error) for error in found)


def test_breaking_off_ends_a_call_that_is_still_connecting(serve, monkeypatch):
    """Otherwise it would go to a server that is down for sure, and be waited for until its deadline."""
    transport = Transport(serve(lambda connection, number: time.sleep(30)).url, None)
    connect = httpcore.SyncBackend.connect_tcp

    def broken_off_meanwhile(*words, **more):
        transport.cancel_calls("it was stopped.")
        return connect(*words, **more)

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", broken_off_meanwhile)
    with pytest.raises(ServerGone, match=r"cancelled: it was stopped\."):
        transport.ask("POST", "/generate", {}, 600)


def test_a_token_that_cannot_be_read_is_a_sentence(serve):
    def unreadable():
        raise ValueError("The token file x can be read by other users.")

    with pytest.raises(ServerAnswer, match=r"there is no token for it \(The token file x can be read by other users"):
        Transport(serve(answers(http(b"{}"))).url, unreadable).ask("GET", "/health", None, 5)


def test_a_connection_that_was_closed_while_idle_is_replaced_without_a_word(serve):
    def once(connection, number):
        read_request(connection)
        connection.sendall(http(b'{"n": %d}' % number))
        connection.close()

    server = serve(once)
    transport = Transport(server.url, None)
    for n in range(1, 6):
        assert transport.ask("GET", "/health", None, 2) == {"n": n}
        time.sleep(0.02)
    assert server.connections == 5


def test_connections_are_used_again(serve):
    server = serve(answers(http(b"{}")))
    transport = Transport(server.url, None)
    for _ in range(20):
        transport.ask("GET", "/health", None, 2)
    assert server.connections == 1


# ---- secrets and addresses -------------------------------------------------------------------------------------------------


def test_the_token_is_sent_and_shown_nowhere(serve, caplog):
    caplog.set_level(logging.DEBUG)
    heads = []

    def behave(connection, number):
        heads.append(read_request(connection)[0])
        connection.sendall(http(b"{}", "401 Unauthorized"))

    client = ServerClient(serve(behave).url, TOKEN, SOON)
    with pytest.raises(ServerRefused) as caught:
        client.health()
    assert f"Authorization: Bearer {TOKEN}".encode() in heads[0]
    shown = [repr(client), repr(client._transport), str(caught.value), repr(caught.value), caplog.text]
    assert not any(TOKEN in text for text in shown)
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        ServerClient("http://127.0.0.1:1", f"{TOKEN}\r\nX: y")
    assert TOKEN not in str(caught.value)


def test_addresses():
    assert str(Address.of("127.0.0.1:8000")) == "http://127.0.0.1:8000"
    assert str(Address.of("https://gpu.example/base/")) == "https://gpu.example:443/base"
    for wrong in ("ftp://x", "http://", "http://user:secret@host"):
        with pytest.raises(ValueError, match="not the address of a server"):
            Address.of(wrong)
    with pytest.raises(ValueError, match="`part` is 0"):
        Deadlines(part=0)


# ---- weights ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [7, 64, 1 << 20])
def test_kept_weights_arrive_bit_for_bit_in_any_buckets(bucket):
    torch.manual_seed(0)
    weights = {
        "w": torch.randn(5, 3).t(),  # not contiguous
        "h": torch.randn(4).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
    }
    kept = KeptWeights.of(weights.items(), "xxh3")
    wanted = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in weights.values():
        tensor.zero_()  # the trainer's own memory moves on
    plan = kept.plan(bucket)
    staging = Staging(Manifest(3, len(plan), kept.specs), HostMemory())
    for number in range(len(plan)):
        staging.add(parsed(joined(kept.split_payload(3, plan, number))), str(number))
    staging.verify()
    for name, tensor in staging.tensors():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name


def test_heads_are_made_without_hashing_again_where_tensors_are_cut_between_blocks(monkeypatch):
    block, counted = payload.HASH_BLOCK, []
    weights = {"large": torch.randint(0, 256, (2 * block + 77,), dtype=torch.uint8), "small": torch.randn(9)}
    kept = KeptWeights.of(weights.items(), "xxh3")
    raw = {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in weights.items()}
    assert [spec.checksum for spec in kept.specs] == [payload.checksum(data, "xxh3") for data in raw.values()]

    def counting(data, real=payload.CHECKSUMS["xxh3"]):
        counted.append(len(data))
        return real(data)

    monkeypatch.setitem(payload.CHECKSUMS, "xxh3", counting)
    plan = kept.plan(block + 5)
    bodies = [joined(kept.split_payload(3, plan, number)) for number in range(len(plan))]
    assert sum(counted) < 200  # digests of blocks at most
    staging = Staging(Manifest(3, len(plan), kept.specs), HostMemory())
    for number, body in enumerate(bodies):
        staging.add(parsed(body), str(number))
    staging.verify()
    assert {name: tensor.numpy().tobytes() for name, tensor in staging.tensors()} == raw


def test_a_kept_version_has_its_memory_for_itself_as_long_as_it_lives():
    memory, size = HostMemory(), 1 << 19
    kept = [KeptWeights.of([("a", torch.full((size,), float(number)))], "xxh3", memory=memory) for number in range(3)]
    assert [float(torch.frombuffer(one.data["a"], dtype=torch.float32)[-1]) for one in kept] == [0, 1, 2]
    addresses = {torch.frombuffer(one.data["a"], dtype=torch.uint8).data_ptr() for one in kept}
    kept = kept[2:]
    for number in range(3, 9):
        kept = [kept[-1], KeptWeights.of([("a", torch.full((size,), float(number)))], "xxh3", memory=memory)]
        assert float(torch.frombuffer(kept[0].data["a"], dtype=torch.float32)[0]) == number - 1
        addresses.add(torch.frombuffer(kept[1].data["a"], dtype=torch.uint8).data_ptr())
    assert len(addresses) <= 5  # of nine versions; a thread that has just copied may hold a block a moment longer


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="c is complex64"):
        KeptWeights.of([("c", torch.zeros(2, dtype=torch.complex64))], "blake2b")
    with pytest.raises(ValueError, match="has no tensors"):
        KeptWeights.of([], "blake2b")
    assert common_checksum([("blake2b", "xxh3"), ("blake2b",)]) == "blake2b"


# ---- a plain vllm serve ----------------------------------------------------------------------------------------------------

MARK = "0123456789abcdef" * 2


def models(*adapters):
    entries = [{"id": "base", "max_model_len": 128, "parent": None}]
    return {"data": entries + [{"id": name, "parent": "base", "max_model_len": None} for name in adapters]}


def completion_of(ids, reason="length"):
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}, "finish_reason": reason}
    return {"choices": [choice]}


def upstream(serve, listed, completion, asked):
    """A client of a socket server that answers /v1/models and /v1/completions, and notes the bodies."""

    def behave(connection, number):
        while True:
            head, body = read_request(connection)
            path = head.split()[1].decode()
            asked.append((path, json.loads(body) if body else None))
            answer = {"/v1/models": listed, "/v1/completions": completion}.get(path)
            connection.sendall(http(json.dumps(answer).encode()) if answer is not None else http(b"", "404 Not Found"))

    return UpstreamClient(serve(behave).url, TOKEN, SOON)


def test_upstream_requests_name_the_adapter_of_their_version(serve):
    asked = []
    client = upstream(serve, models(f"posttrain-3-{MARK}", f"posttrain-5-{MARK}", "mine"), completion_of([3, 4]), asked)
    info = client.info()
    assert (info.model, info.context_length, info.version, info.fingerprint) == ("base", 128, 5, MARK)
    assert client.generate(REQUEST) == ServerCompletion([3, 4], [-1.0, -1.0], "length", 5, "raw_logprobs")
    body = asked[-1][1]
    assert (body["model"], body["prompt"], body["seed"]) == (f"posttrain-5-{MARK}", [1, 2], 7)
    assert (body["ignore_eos"], body["max_tokens"], body["temperature"]) == (True, 4, 1.0)
    with pytest.raises(ServerRefused, match="has no adapter of version 4") as caught:
        client.generate(dataclasses.replace(REQUEST, version=4))
    assert caught.value.status == 409  # its watcher then loads it again


def test_upstream_says_what_it_cannot_do(serve):
    client = upstream(serve, models(), completion_of([3, 9], "stop"), [])
    base = dataclasses.replace(REQUEST, version=0)
    with pytest.raises(ServerRefused, match=r"ended a completion at token 9.*--generation-config vllm"):
        client.generate(base)
    stopping = SamplingParams(8, stop_ids=(9,))
    assert client.generate(dataclasses.replace(base, params=stopping)).finish_reason == "stop"
    with pytest.raises(ServerRefused, match="token 2 is larger than 100"):
        client.generate(dataclasses.replace(base, params=SamplingParams(8, logit_bias={2: -1e4})))
    with pytest.raises(ServerRefused, match="takes no weights from a trainer"):
        client.stage(KeptWeights.of(numbered(1), "blake2b"), 1)
    assert "not put to sleep" in client.sleep(1)


@pytest.mark.parametrize("listed", [{}, {"data": []}, {"data": [{"id": "base"}]}, {"data": [{"parent": None}]}])
def test_upstream_lists_that_are_none(serve, listed):
    with pytest.raises(ServerAnswer, match="not what this client understands"):
        upstream(serve, listed, None, []).info()


# ---- the fleet, with clients that are told what to do ----------------------------------------------------------------------


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(fleet, "RETRY_SECONDS", 0.02)
    made = []

    def make(count=2, **options):
        clients = [FakeClient(f"fake-{i}") for i in range(count)]
        deadlines = Deadlines(back=options.pop("back", 10))
        made.append(ServedVLLM(clients, options=ServedOptions(deadlines, watch_seconds=0.05, **options)))
        return made[-1], clients

    yield make
    for engine in made:
        engine.close()


def written(engine, count=6):
    return {tuple(one.ids) for one in generate(engine, [Prompt([1])] * count, SamplingParams(8))}


def test_a_commit_refused_by_one_server_takes_all_back_to_the_version_before(fakes):
    engine, clients = fakes()
    engine.load_weights(numbered(1), 1)
    before = engine.target
    clients[1].fail["commit"] = [ServerRefused("The engine refused it.", 500)]
    with pytest.raises(ServerRefused, match="The engine refused it"):
        engine.load_weights(numbered(2), 2)
    assert (engine.version, engine.target) == (1, before)
    eventually(lambda: len(engine.fleet.up()) == 2)
    assert [client.served for client in clients] == [(before.version, before.fingerprint)] * 2
    assert written(engine) == {(1, 1)}
    assert clients[0].staged == clients[1].staged == {}


@pytest.mark.parametrize("where", ["stage", "commit"])
@pytest.mark.parametrize("error", [ServerGone("gone"), ServerSlow("slow"), ServerRefused("no update was begun", 404)])
def test_a_server_that_is_lost_in_an_update_gets_it_when_it_is_back(fakes, where, error):
    engine, clients = fakes()
    engine.load_weights(numbered(1), 1)
    clients[1].fail = {where: [error], "health": [ServerGone("still gone")] * 2}
    engine.load_weights(numbered(2), 2)
    assert written(engine) == {(2, 2)}
    eventually(lambda: len(engine.fleet.up()) == 2)
    assert clients[1].number == 2
    assert engine.fleet.recoveries == 1


@pytest.mark.parametrize(
    ("error", "recovers"),
    [
        (ServerGone("gone"), True),
        (ServerAnswer("garbage"), True),
        (ServerRefused("The engine failed.", 500), True),
        (ServerRefused("The server is stopping.", 503), True),
        (ServerRefused("Busy.", 429), False),
    ],
)
def test_prompts_of_a_failing_server_are_written_once_by_whoever_is_up(fakes, error, recovers):
    engine, clients = fakes()
    engine.load_weights(numbered(3), 3)
    clients[0].fail["generate"] = [error] * 3
    asked = prompts(30, random.Random(0))
    seen = []
    completions = generate(engine, asked, SamplingParams(8), lambda index, completion: seen.append(index))
    assert sorted(seen) == list(range(30))
    assert all(one.ids.tolist() == [3, 3] for one in completions)
    assert clients[0].written + clients[1].written == 30
    eventually(lambda: len(engine.fleet.up()) == 2)
    assert (engine.fleet.recoveries > 0) == recovers


def test_one_bad_request_fails_alone(fakes):
    engine, clients = fakes(count=1)
    clients[0].fail["generate"] = [ServerRefused("The engine refused the request.", 400)]
    first, second = generate(engine, [Prompt([1]), Prompt([2])], SamplingParams(8))
    assert sorted([first.finish_reason, second.finish_reason]) == ["error", "length"]


def test_a_prompt_that_ends_every_server_ends_the_run_with_a_sentence(fakes):
    engine, clients = fakes(count=1, per_server=1)
    clients[0].fail["generate"] = [ServerGone("it died")] * 100
    with pytest.raises(ServerSlow, match="Prompt 4 was sent 20 times and never completed; the last time it died"):
        generate(engine, [Prompt([1], key=4)], SamplingParams(8))


def test_the_time_without_a_server_counts_from_when_one_was_wanted(fakes):
    """A trainer may prepare its data for an hour before the first weights are sent."""
    engine, _ = fakes(count=1, back=0.3)
    engine.fleet.target = Target(None, None)
    engine.fleet.report(engine.fleet.members[0], "as if started without weights")
    time.sleep(0.5)
    engine.load_weights(numbered(1), 1)
    assert written(engine) == {(1, 1)}


def test_no_server_up_is_a_sentence_after_the_deadline(fakes):
    engine, clients = fakes(back=0.5)
    for client in clients:
        client.fail["health"] = [ServerGone("no connection")] * 1000
    eventually(lambda: not engine.fleet.up())
    with pytest.raises(ServerGone, match=r"No server has been up for 0\.5 s\. fake-0: no connection"):
        generate(engine, [Prompt([1])], SamplingParams(8))


def test_weights_of_somebody_else_are_noticed_and_replaced(fakes):
    engine, clients = fakes()
    engine.load_weights(numbered(1), 1)
    clients[0].served, clients[0].number = (77, "other"), 77
    assert written(engine, 20) == {(1, 1)}
    eventually(lambda: clients[0].number == 1)


def test_prompts_left_behind_are_ended_by_the_next_update(fakes):
    engine, clients = fakes(count=1)
    release = threading.Event()
    clients[0].generate = lambda request: (release.wait(5), ServerCompletion([0], [0.0], "length", 0, "raw_logprobs"))[
        1
    ]
    with engine.session(SamplingParams(8)) as session:
        session.add(Prompt([1]))
    engine.load_weights(numbered(1), 1)
    engine.load_weights(numbered(2), 2)
    release.set()
    assert [how for _, how in clients[0].commits] == ["abort", "drain"]


def test_logits_that_are_no_numbers_fail_their_prompt(fakes):
    engine, clients = fakes(count=1)
    clients[0].generate = lambda request: ServerCompletion([1], [float("nan")], "length", 0, "processed_logprobs")
    (completion,) = generate(engine, [Prompt([1], key=9)], SamplingParams(8))
    assert "after prompt 9 are not numbers" in completion.error


def test_servers_that_differ_are_refused():
    clients = [FakeClient("one"), FakeClient("two")]
    clients[1].info = lambda: ServerInfo("x", "fake", 50, 1000, "processed_logprobs", 0, None)
    with pytest.raises(ValueError, match=r"different values of context_length: \[100, 50\]"):
        ServedVLLM(clients)
    with pytest.raises(ValueError, match="not all different"):
        ServedVLLM([FakeClient("one"), FakeClient("one")])


# ---- threads ---------------------------------------------------------------------------------------------------------------


def test_all_numbers_are_done_once_and_no_more_than_allowed_at_once():
    done, under_way, most = [], [0], []
    lock = threading.Lock()

    def act(number):
        with lock:
            under_way[0] += 1
            most.append(under_way[0])
        time.sleep(0.002)
        with lock:
            under_way[0] -= 1
            done.append(number)

    parallel_calls(40, act, 4)
    assert sorted(done) == list(range(40))
    assert max(most) == 4
    parallel_calls(3, lambda number: done.append(threading.current_thread()), 1)
    assert done[-3:] == [threading.current_thread()] * 3
    parallel_calls(0, act, 4)


@pytest.mark.parametrize("error", [ServerGone("gone"), KeyboardInterrupt()])
def test_after_an_error_nothing_is_begun_and_nothing_runs_on(error):
    begun, ended = [], []

    def act(number):
        begun.append(number)
        if number == 5:
            raise error
        time.sleep(0.02)
        ended.append(number)

    with pytest.raises(type(error)):
        parallel_calls(100, act, 3)
    assert sorted(ended) == sorted(set(begun) - {5})
    assert len(begun) < 12
    time.sleep(0.05)
    assert len(begun) == len(ended) + 1
