"""The server as a process: how it ends, and what cannot keep it from answering."""

import importlib
import importlib.util
import signal
import socket
import sys
import threading

import pytest
import torch

from tests.forked import run_function
from tests.serve.echo_server import launch_of_the_folder
from tests.serve.live_server import LiveServer
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("uvicorn"), reason="uvicorn is not installed")


@pytest.fixture
def start(tmp_path):
    started = []

    def make(*more, python=sys.executable):
        started.append(LiveServer(str(python), tmp_path / f"server{len(started)}.log", "--model", "echo", *more))
        started[-1].wait_until_ready(60)
        return started[-1]

    yield make
    for server in started:
        server.close()


def test_sigterm_is_a_clean_stop(start, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    server = start("--adapter-folder", str(folder), "--engine-args", '{"step_seconds": 0.05}')
    server.push(1, {"m.q_proj.lora_A.weight": torch.ones(4)}, adapter_config={"r": 1})
    assert len(list(folder.iterdir())) == 1
    answers = []
    body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": 20}}
    asking = threading.Thread(target=lambda: answers.append(server.ask("POST", "/generate", body)))
    asking.start()
    eventually(lambda: server.get("/info")[1]["in_flight"])
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    asking.join(60)
    assert [status for status, _ in answers] == [200]  # what ran has ended first
    assert list(folder.iterdir()) == []  # and the server was closed


def test_after_sigterm_it_answers_takes_nothing_new_and_hands_back_what_it_cannot_end(start):
    server = start("--stop-seconds", "1.5", "--engine-args", '{"step_seconds": 0.05}')
    answers = {}

    def ask(name, tokens):
        body = {"prompts": [{"ids": [1]}], "sampling": {"max_tokens": tokens}}
        answers[name] = server.ask("POST", "/generate", body)

    asking = [threading.Thread(target=ask, args=one) for one in (("short", 12), ("long", 4000))]
    for one in asking:
        one.start()
    eventually(lambda: server.get("/info")[1]["in_flight"] == 2)
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.get("/ready")[0] == 503)
    assert server.get("/health")[0] == 200
    ask("late", 4)
    assert (answers["late"][0], answers["late"][1]["kind"]) == (503, "Stopping")
    assert server.process.wait(60) == 0
    for one in asking:
        one.join(60)
    (short,), (long,) = (answers[name][1]["completions"][0] for name in ("short", "long"))
    assert (short["finish_reason"], len(short["ids"])) == ("length", 12)
    assert (long["finish_reason"], long["error"]) == ("aborted", "the server is stopping.")


def test_half_sent_requests_do_not_use_up_the_descriptors(start, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n 256\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    server = start(python=python)
    half = []
    try:
        for _ in range(300):
            half.append(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            half[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for _ in range(5):
            assert server.get("/health")[0] == 200
    finally:
        for one in half:
            one.close()
    assert "Too many open files" not in server.log.read_text()


def test_worker_processes_find_the_folder_under_the_name_that_the_server_made_up(tmp_path):
    """vLLM's workers (`--tensor-parallel` above 1) are new processes and import the extension by its name."""
    tmp_path.chmod(0o700)

    def server():
        launch_of_the_folder()
        weights = importlib.import_module("posttrain_serve.engine.worker_weights")
        weights.WorkerWeights(tmp_path)
        print(sys.path[-1], weights.EXTENSION)

    place, extension = output_of(server, tmp_path).split()
    assert extension == "posttrain_serve.engine.worker_extension.WeightLoading"

    def worker():
        sys.path.append(place)
        print(importlib.import_module("posttrain_serve.engine.protocol").__file__)

    assert output_of(worker, tmp_path).strip().endswith("posttrain_serve/engine/protocol.py")


def output_of(function, folder):
    done = run_function(function, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
