"""Every route of the application: who may call it, how much it takes, what it says to nonsense, and what it answers."""

import asyncio
import json
import logging
import random
import sys

import pytest
from starlette.requests import Request

from posttrain.rollout.engines.native.serving import ServedNative
from posttrain.serve.auth import TokenFileError, read_local_token, token_file_of
from posttrain.serve.engine.protocol import CacheUse
from posttrain.serve.errors import TooSlow
from posttrain.serve.http.app import ENDPOINTS, read_body
from posttrain.serve.launch import StartError, main, read_token
from posttrain.serve.server import ServerOptions
from posttrain.serve.weights.update import UpdateLimits
from posttrain.serve.wire.payload import encode_manifest
from tests import tiny
from tests.serve.echo_engine import numbered_weights
from tests.serve.served_app import TOKEN, asked
from tests.serve.serving import update_of

ALL = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]


# who may call ----------------------------------------------------------------------------------------------------------


def test_the_application_has_the_routes_of_the_table_and_no_others(served):
    routes = served().app.app.routes
    assert sorted((method, route.path) for route in routes for method in route.methods - {"HEAD"}) == sorted(ALL)
    assert len(ALL) == len(set(ALL)) == 18


def native_engine():
    return ServedNative("tiny", tiny.causal_lm(0), None, None)


@pytest.mark.parametrize("engine", [lambda: None, native_engine], ids=["echo", "native"])
@pytest.mark.parametrize(("method", "path"), [*ALL, ("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/nowhere")])
def test_every_route_wants_the_token_bounds_its_body_and_refuses_nonsense(served, method, path, engine):
    one = served(made=engine())
    rng = random.Random(path)

    async def go():
        for wrong in (None, "", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper()):
            reply = await one(method, path, token=wrong)
            assert reply.status == 401, (wrong, reply)
        twice = [(b"authorization", f"Bearer {TOKEN}".encode())]
        assert (await one(method, path, headers=twice)).status == 401
        assert (await one(method, path, token=None, headers=[(b"authorization", TOKEN.encode())])).status == 401
        if (method, path) not in ALL:
            assert (await one(method, path)).status == 404
            return
        assert (await one(method, path, b"x" * (1 << 17))).status == 413
        assert (await one(method, path, chunks=[b"y" * 5000] * 60)).status == 413
        lying = [(b"content-length", b"1" * 30)]
        assert (await one(method, path, chunks=[b""], headers=lying)).status == 400
        other = "GET" if method == "POST" else "POST"
        assert (await one(other, path)).status == 405
        if method == "POST" and path != "/shutdown":
            for body in (
                b"{",
                b"\xff",
                b"[]",
                b"null",
                b'{"a":1}',
                b"[" * 3000,
                b'{"version":NaN}',
                rng.randbytes(300),
            ):
                reply = await one(method, path, body)
                assert 400 <= reply.status < 500, (body[:20], reply)
                assert reply.json()["error"].endswith((".", ").", "exactly."))

    asyncio.run(go())
    assert one.server.versions.serving.version == 0


def test_the_token_is_never_logged(served, caplog):
    one = served()
    with caplog.at_level(logging.DEBUG):
        asyncio.run(one("POST", "/generate", asked()))
        asyncio.run(one("POST", "/generate", asked(), token="wrong-" + TOKEN))
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(one.app)


def test_a_server_without_a_token_draws_one_that_only_its_user_can_read(monkeypatch, tmp_path):
    monkeypatch.delenv("POSTTRAIN_SERVE_TOKEN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token, origin = read_token(None, 8123)
    path = token_file_of(8123)
    assert path.is_relative_to(tmp_path)
    assert str(path) in origin
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_local_token(8123) == token
    assert read_local_token(8124) is None
    assert len({token, read_token(None, 8123)[0], read_token(None, 8123)[0]}) == 3  # each start has another
    path.chmod(0o640)
    with pytest.raises(TokenFileError, match="can be read by other users \\(mode 0640\\)"):
        read_local_token(8123)


def test_a_token_file_is_private_and_long_enough(monkeypatch, tmp_path, capsys):
    path = tmp_path / "token"
    for mode, text, sentence in (
        (0o644, TOKEN, "mode 0644"), (0o604, TOKEN, "mode 0604"), (0o600, "short\n", "16 or more"), (0o600, "", "16 or more"),
        (0o600, "é" * 20, "cannot be read"),
    ):  # fmt: skip
        path.write_text(text)
        path.chmod(mode)
        assert main(["--model", "echo", "--port", "0", "--token-file", str(path)]) == 2
        told = capsys.readouterr().err
        assert sentence in told
        assert str(path) in told
        assert TOKEN not in told
    path.write_text(TOKEN + "\n")
    assert read_token(path, 1) == (TOKEN, f"the token of {path}")
    monkeypatch.setenv("POSTTRAIN_SERVE_TOKEN", "short")
    with pytest.raises(StartError, match="POSTTRAIN_SERVE_TOKEN is not 16 or more"):
        read_token(None, 1)


def test_a_package_that_is_missing_is_named_before_a_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "posttrain.serve.http.app", None)
    assert main(["--model", "echo", "--port", "0"]) == 2
    assert "lacks a package of the server" in capsys.readouterr().err


# what it answers -------------------------------------------------------------------------------------------------------


def test_generate_answers_ids_logps_and_the_version_of_every_token(served):
    one = served()
    body = asked(prompts=[{"ids": [5], "n": 2, "seeds": [1, 2]}, {"ids": [97, 98], "max_tokens": 2}])
    answer = asyncio.run(one("POST", "/generate", body)).json()
    first, second = answer["completions"]
    assert [len(first), len(second)] == [2, 1]
    wanted = {"ids": [0] * 4, "logps": [-0.5] * 4, "finish_reason": "length", "spans": [[0, 4, 0]], "version": 0}
    assert {key: first[0][key] for key in wanted} == wanted
    assert second[0]["ids"] == [0, 0]


def test_the_same_id_runs_once_and_another_body_under_it_is_refused(served):
    one = served(step_seconds=0.01)

    async def go():
        replies = await asyncio.gather(*[one("POST", "/generate", asked(tokens=20)) for _ in range(8)])
        replies.append(await one("POST", "/generate", asked(tokens=20)))
        assert {reply.body for reply in replies} == {replies[0].body}
        assert (await one("POST", "/generate", asked(tokens=21))).status == 409
        assert (await one("POST", "/score", {"request_id": "r1", "sequences": [{"ids": [1, 2]}]})).status == 409

    asyncio.run(go())
    assert one.engine.started == ["r1/0/0"]


def test_a_deadline_ends_the_work_and_the_same_id_may_try_again(served):
    one = served(step_seconds=0.02)

    async def go():
        late = await one("POST", "/generate", asked(tokens=1000, deadline_s=0.1))
        assert late.status == 504
        await asyncio.sleep(0.1)
        assert one.server.thread.in_flight == 0
        assert (await one("POST", "/generate", asked(tokens=2))).status == 200

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"sampling": {"max_tokens": 0}},
            "`max_tokens` of `sampling` of the body is wrong: input should be greater",
        ),
        ({"sampling": {"max_tokens": 4, "temperature": -1}}, "temperature"),
        ({"sampling": {"max_tokens": 4, "temperature": 10**400}}, "`temperature` of `sampling` of the body is wrong: "),
        ({"deadline_s": -(10**400)}, "deadline_s"),
        (
            {"sampling": {"max_tokens": 4, "top_p": 0}},
            "`top_p` of `sampling` of the body is wrong: input should be greater",
        ),
        ({"sampling": {"max_tokens": True}}, "max_tokens"),
        ({"prompts": [{"ids": [100_000]}]}, "Entry 0 of `ids`"),
        ({"prompts": [{"ids": [-1]}]}, "token id"),
        ({"prompts": [{}]}, "`ids` is missing from entry 0 of `prompts`"),
        ({"prompts": []}, "`prompts` of the body is wrong: list should have at least 1 item"),
        ({"prompts": [{"ids": [1] * 4096}]}, "one token at least must fit"),
        ({"prompts": [{"ids": [1], "n": 2, "seeds": [1]}]}, "n = 2 and 1 seeds"),
        ({"prompts": [{"ids": [1], "n": 2, "noise": [{"base": 1}]}]}, "n = 2 and 1 entries of `noise`"),
        ({"prompts": [{"ids": [1], "noise": [{"base": 1}]}]}, "this engine draws by seeds"),
        ({"prompts": [{"ids": [1], "noise": [{"base": 1 << 63}]}]}, "base"),
        ({"request_id": "../x y"}, "request_id"),
        ({"accept": {"min": -1}}, "min"),
        ({"surprise": 1}, "`surprise` is not a field of the body; known are request_id, accept"),
        ({"deadline_s": 1e9}, "deadline_s"),
    ],
)
def test_wrong_fields_are_named(served, change, sentence):
    reply = asyncio.run(served()("POST", "/generate", asked() | change))
    assert reply.status == 400
    assert sentence in reply.json()["error"]


def test_score(served):
    one = served()
    asyncio.run(one.push(2))
    body = {"sequences": [{"ids": [1, 2, 3, 4], "start": 2}], "top_k": 3}
    score = asyncio.run(one("POST", "/score", body)).json()["scores"][0]
    assert score["logps"] == [-2.0, -2.0]
    assert [len(place["ids"]) for place in score["top"]] == [3, 3]
    assert score["version"] == 2


def test_an_update_over_http_flips_and_versions_are_accepted_or_not(served):
    one = served()
    state = asyncio.run(one.push(7))
    assert (state["serving_version"], state["phase"]) == (7, "idle")
    assert asyncio.run(one("POST", "/generate", asked())).json()["completions"][0][0]["ids"] == [7] * 4
    stale = asyncio.run(one("POST", "/generate", asked("r2", accept={"min": 8})))
    assert stale.status == 409
    assert "Version 7 serves; the request accepts 8" in stale.json()["error"]
    info = asyncio.run(one("GET", "/info")).json()
    assert (info["version"], info["fingerprint"]) == (7, state["fingerprint"])
    text = asyncio.run(one("GET", "/metrics")).body.decode()
    assert "posttrain_serving_version 7" in text
    assert 'posttrain_requests_total{route="/generate",status="409"} 1' in text


def test_metrics_have_their_names(served):
    """As dashboards know them."""
    one = served()
    asyncio.run(one("POST", "/generate", asked(tokens=3)))
    asyncio.run(one("GET", "/nowhere"))
    reply = asyncio.run(one("GET", "/metrics"))
    assert reply.headers["content-type"].startswith("text/plain; version=")
    lines = [line.split() for line in reply.body.decode().splitlines() if not line.startswith("#")]
    values = {name.removeprefix("posttrain_"): float(value) for name, value in lines}
    assert {name.partition("{")[0] for name in values} == {
        *("requests_total", "request_seconds_total", "generated_tokens_total", "joined_requests_total"),
        *("updates_committed_total", "updates_failed_total", "in_flight", "serving_version", "ready"),
        *("engine_silent_seconds", "uptime_seconds", "image_bytes"),
    }
    assert values["generated_tokens_total"] == 3
    assert values['requests_total{route="/generate",status="200"}'] == 1
    assert values['requests_total{route="none",status="404"}'] == 1


def test_an_engine_that_tells_of_its_cache_has_two_more_metrics(served):
    one = served()
    one.engine.cache_use = CacheUse(0.25, 7)
    lines = asyncio.run(one("GET", "/metrics")).body.decode().splitlines()
    assert {"posttrain_kv_used_share 0.25", "posttrain_preempted_total 7.0"} <= {*lines}


def test_an_update_can_be_aborted_and_one_that_was_not_begun_is_404(served):
    one = served()
    manifest, payloads = update_of(1, numbered_weights(1))

    async def go():
        assert (await one("POST", "/weights/part", payloads[0])).status == 404
        assert (await one("POST", "/weights/begin", {"manifest": encode_manifest(manifest)})).status == 200
        assert (await one("POST", "/weights/commit", {"version": 1})).status == 409
        assert (await one("POST", "/weights/abort", {"version": 1})).json()["phase"] == "idle"
        assert (await one("POST", "/weights/commit", {"version": 1})).status == 404

    asyncio.run(go())
    assert one.server.versions.serving.version == 0


def test_a_manifest_without_a_checksum_is_refused(served):
    one = served()
    manifest = encode_manifest(update_of(1, numbered_weights(1))[0])
    manifest["tensors"][1]["checksum"] = None
    reply = asyncio.run(one("POST", "/weights/begin", {"manifest": manifest}))
    assert reply.status == 400
    assert "`checksum` of entry 1 of `tensors` of `manifest` of the body is wrong" in reply.json()["error"]


def test_sleeping_refuses_and_level_2_needs_new_weights(served):
    one = served()

    async def go():
        assert (await one("POST", "/sleep", {"level": 1})).json()["sleeping"]
        assert (await one("POST", "/generate", asked())).status == 503
        assert (await one("GET", "/ready")).status == 503
        assert (await one("GET", "/health")).status == 200
        assert not (await one("POST", "/wake")).json()["sleeping"]
        assert (await one("POST", "/generate", asked())).status == 200
        assert (await one("POST", "/sleep", {"level": 2})).json()["sleeping"]
        assert (await one("POST", "/wake", {"tags": ["weights"]})).json()["sleeping"]
        await one.push(1)
        assert (await one("POST", "/generate", asked("r2"))).status == 503
        assert not (await one("POST", "/wake", {"tags": ["kv_cache"]})).json()["sleeping"]
        assert (await one("POST", "/generate", asked("r2"))).json()["completions"][0][0]["ids"] == [1] * 4

    asyncio.run(go())


def test_pushed_adapters_serve_by_version_and_old_ones_are_removed(served, tmp_path):
    one = served(options=ServerOptions(adapter_folder=tmp_path))

    async def go():
        for version in (1, 2, 3):
            manifest, payloads = update_of(version, {"q.lora_A.weight": numbered_weights(version)["a"]})
            body = {"manifest": encode_manifest(manifest), "adapter_config": {"r": 1}}
            assert (await one("POST", "/weights/begin", body)).status == 200
            for payload in payloads:
                await one("POST", "/weights/part", payload)
            assert (await one("POST", "/weights/commit", {"version": version})).status == 200
            reply = (await one("POST", "/generate", asked(f"r{version}"))).json()["completions"][0][0]
            assert reply["spans"] == [[0, 4, version]]
            assert reply["ids"] == [version] * 4
        base = (await one("POST", "/generate", asked("base", base_weights=True))).json()["completions"][0][0]
        assert base["ids"] == [0] * 4

    asyncio.run(go())
    assert len(list(tmp_path.iterdir())) == 1


def test_shutdown_answers_then_lets_running_requests_end(served):
    one, ended = served(step_seconds=0.01), []
    one.server.stop_process = lambda: ended.append(one.server.thread.in_flight)

    async def go():
        running = asyncio.ensure_future(one("POST", "/generate", asked(tokens=20)))
        await asyncio.sleep(0.05)
        assert (await one("POST", "/shutdown", {"deadline_s": 5})).status == 202
        assert (await one("POST", "/generate", asked("r2"))).status == 503
        assert (await one("GET", "/ready")).status == 503
        assert (await running).status == 200
        await one.server.stopper

    asyncio.run(go())
    assert ended == [0]


def test_50_damaged_payloads_against_the_application_never_mix_weights(served):
    one, rng = served(options=ServerOptions(update=UpdateLimits(idle_seconds=60))), random.Random(3)
    manifest, payloads = update_of(1, numbered_weights(1), bucket=8)

    async def go():
        assert (await one("POST", "/weights/begin", {"manifest": encode_manifest(manifest)})).status == 200
        for i in range(50):
            damaged = bytearray(payloads[i % len(payloads)])
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            assert (await one("POST", "/weights/part", bytes(damaged[: rng.choice([len(damaged), -3])]))).status == 400
            reply = await one("POST", "/generate", asked(f"p{i}", tokens=8))
            assert reply.json()["completions"][0][0]["ids"] == [0] * 8
        for payload in payloads:
            assert (await one("POST", "/weights/part", payload)).status == 200
        assert (await one("POST", "/weights/commit", {"version": 1})).status == 200
        reply = await one("POST", "/generate", asked("end", tokens=8))
        assert reply.json()["completions"][0][0]["ids"] == [1] * 8

    asyncio.run(go())


def test_errors_of_ours_are_answered_without_their_text(served, monkeypatch, caplog):
    one = served()
    monkeypatch.setattr(one.server, "info", lambda: 1 / 0)
    reply = asyncio.run(one("GET", "/info"))
    assert reply.status == 500
    assert "ZeroDivision" not in json.dumps(reply.json())
    assert "ZeroDivisionError" in caplog.text


def test_only_so_many_parts_at_once_are_taken(served):
    one = served()
    most = next(one.concurrency for one in ENDPOINTS if one.path == "/weights/part")

    async def go():
        held = asyncio.Event()

        async def slow_receive():
            await held.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            raise AssertionError("nobody is there to be answered")

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/weights/part", "headers": headers}
        slow = [asyncio.ensure_future(one.app(scope, slow_receive, send)) for _ in range(most)]
        await asyncio.sleep(0)
        assert (await one("POST", "/weights/part", b"x")).status == 429
        held.set()
        await asyncio.gather(*slow)
        assert (await one("POST", "/weights/part", b"x")).status == 400

    asyncio.run(go())


def test_a_body_that_never_arrives_is_given_up(served, monkeypatch):
    one = served()
    monkeypatch.setattr("posttrain.serve.http.app.SLOWEST_BYTES_PER_SECOND", 1 << 40)

    async def go():
        async def never():
            await asyncio.sleep(60)

        with pytest.raises(TooSlow, match="did not arrive"):
            await read_body(Request({"type": "http", "headers": []}, never), 100, lambda nbytes: None, seconds=0.05)

    asyncio.run(go())
    assert one.server.unhealthy_reason() is None
