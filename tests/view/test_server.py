"""Who may ask the server what, and what it answers."""

from __future__ import annotations

import http.client
import json
import socket
import threading

import pytest

from posttrain.view.api import Viewed
from posttrain.view.run_folder import open_runs
from posttrain.view.server import MAX_BODY, TOKEN_HEADER, ViewServer


@pytest.fixture(scope="module")
def server(run_folder):
    with ViewServer(Viewed(open_runs([str(run_folder)]))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def ask(server, path, method="GET", token=True, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    words = {TOKEN_HEADER: server.token} if token is True else {TOKEN_HEADER: token} if token else {}
    try:
        connection.request(
            method, path, body=body, headers=words | {k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    return answer, content


def ask_json(server, path):
    answer, content = ask(server, path)
    assert answer.status == 200, content
    return json.loads(content)


# ---- who -----------------------------------------------------------------------------------------------------------------


def test_only_loopback_is_listened_to(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.url.startswith(f"http://127.0.0.1:{server.port}/#token=")
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", "", "0.0.0.0:{port}"],
)
@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs"])
def test_another_name_is_refused(server, host, path):
    answer, _ = ask(server, path, Host=host.format(port=server.port))
    assert answer.status == 403


def test_localhost_is_a_name_of_ours(server):
    assert ask(server, "/api/runs", Host=f"localhost:{server.port}")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "runs",
        "metrics?run=0",
        "info?run=0",
        "rollouts?run=0",
        "group?run=0&step=1&group=0",
        "prompt?run=0",
        "data?run=0",
    ],
)
@pytest.mark.parametrize("token", [None, "wrong", "é"])
def test_nothing_is_told_without_the_token(server, path, token):
    try:
        answer, content = ask(server, f"/api/{path}", token=token)
    except UnicodeEncodeError:
        pytest.skip("this client cannot send such a header")
    assert answer.status == 401
    assert b"grpo" not in content


def test_nor_exported(server):
    assert ask(server, "/api/export", "POST", token=None, body="{}")[0].status == 401


def test_the_token_is_no_parameter(server):
    assert ask(server, f"/api/runs?token={server.token}", token=None)[0].status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_other_pages_are_refused_even_with_the_token(server, headers):
    assert ask(server, "/api/runs", **headers)[0].status == 403
    assert ask(server, "/api/export", "POST", body="{}", **headers)[0].status == 403


def test_a_link_may_open_the_page(server):
    assert ask(server, "/", token=None, Sec_Fetch_Site="cross-site")[0].status == 200


# ---- how -----------------------------------------------------------------------------------------------------------------


def test_headers_of_every_answer(server):
    for path in ("/", "/app.js", "/api/runs", "/nothing"):
        answer, _ = ask(server, path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD"])
def test_methods_that_change_things_are_not_understood(server, method):
    for path in ("/", "/api/runs", "/api/export"):
        assert ask(server, path, method)[0].status == 405


def test_questions_are_asked_with_get_and_exports_with_post(server):
    assert ask(server, "/api/runs", "POST", body="{}")[0].status == 405
    assert ask(server, "/api/export")[0].status == 405


TRICKS = [
    "/../server.py", "/static/app.js", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/app.js/..", "/app.js%00.png",
    "/api/../../etc/passwd", "/api/runs/../../x", "/build.json", "/index.html", "/api", "/api/", "/api/__class__",
    "/\\..\\server.py",
]  # fmt: skip


@pytest.mark.parametrize("path", TRICKS)
def test_no_path_leads_out(server, path):
    answer, content = ask(server, path)
    assert answer.status == 404
    assert b"root:" not in content


def test_names_in_parameters_lead_nowhere(server):
    for query, status in (
        ("info?run=../..", 400), ("info?run=99", 404), ("info", 400), ("data?run=0&source=../x", 400), ("data?run=0&source=7", 404),
        ("group?run=0&step=1&group=999", 404), ("group?run=0&step=-1&group=0", 400), ("prompt?run=0&prompt=../..", 400),
        ("prompt?run=0&prompt=" + "f" * 40, 400), ("prompt?run=0&prompt=" + "f" * 16, 404),
        ("rollouts?run=0&count=1e9", 200), ("rollouts?run=0&start=nan", 400),
        ("rollouts?" + "&".join(f"a{i}=1" for i in range(100)), 400),
    ):  # fmt: skip
        assert ask(server, f"/api/{query}")[0].status == status, query


def test_bodies_have_bounds(server):
    assert ask(server, "/api/export", "POST", body="{")[0].status == 400
    assert ask(server, "/api/export", "POST", body="[]")[0].status == 400
    assert ask(server, "/api/export", "POST", body="[" * 100_000)[0].status == 400
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
        named = {"Host": f"127.0.0.1:{server.port}", TOKEN_HEADER: server.token, "Content-Length": MAX_BODY + 1}
        head = (
            "POST /api/export HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in named.items()) + "\r\n"
        )
        line.sendall(head.encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413")


def test_nonsense_does_not_end_the_server(server):
    for nonsense in (
        b"\0\0\0\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.port,
        b"GET / HTTP/9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as line:
            line.sendall(nonsense)
            line.shutdown(socket.SHUT_WR)
            line.recv(1000)
    assert ask(server, "/api/runs")[0].status == 200


# ---- what ----------------------------------------------------------------------------------------------------------------


def test_runs_and_metrics(server):
    run = ask_json(server, "/api/runs")["runs"][0]
    assert (run["name"], run["step"], run["lines"], run["rollouts"], run["alerts"]) == ("grpo-tiny", 6, 6, 480, 1)
    answer = ask_json(server, "/api/metrics?run=0")
    assert answer["series"]["reward"][0] == [1, 2, 3, 4, 5, 6]


def test_a_page_of_rollouts(server):
    page = ask_json(server, "/api/rollouts?run=0&sort=-tokens&start=10&count=5")
    assert (page["total"], page["all"], len(page["rows"])) == (480, 480, 5)
    tokens = [row["tokens"] for row in page["rows"]]
    assert tokens == sorted(tokens, reverse=True)
    assert sum(page["histogram"]["counts"]) == sum(
        row["reward"] is not None for row in ask_json(server, "/api/rollouts?run=0&count=500")["rows"]
    )


def test_a_group_side_by_side(server):
    group = ask_json(server, "/api/group?run=0&step=2&group=13")
    assert [rollout["sample"] for rollout in group["rollouts"]] == list(range(8))
    assert group["before"] == {"step": 2, "group": 12}
    assert group["after"] == {"step": 2, "group": 14}
    for rollout in group["rollouts"]:
        if isinstance(rollout["completion_said"], list):
            said = "".join(message["content"] + "<|im_end|>" for message in rollout["completion_said"])
            assert "".join(rollout["pieces"]) == said
        assert len(rollout["pieces"]) == len(rollout["trained"]) == rollout["tokens"]


def test_one_prompt_across_steps(server):
    rows = ask_json(server, "/api/rollouts?run=0&step_min=6&count=1")["rows"]
    history = ask_json(server, f"/api/prompt?run=0&prompt={rows[0]['prompt']}")
    assert [time["step"] for time in history["times"]] == [6]  # 60 prompts of 100 have been asked
    assert history["times"][0]["completions"] == 8
    assert history["prompt_said"][0]["role"] == "user"


def test_exports_are_json_lines(server):
    answer, content = ask(server, "/api/export", "POST", body=json.dumps({"run": 0, "format": "dpo", "filter": {}}))
    made = json.loads(content)
    assert answer.status == 200
    assert made["name"] == "grpo-tiny-dpo.jsonl"
    pairs = [json.loads(line) for line in made["json_lines"].splitlines()]
    assert len(pairs) == made["rows"] > 40
    assert set(pairs[0]) == {"prompt", "chosen", "rejected", "trained_roles"}  # its answers hold results of tools
