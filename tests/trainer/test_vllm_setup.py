"""What a trainer's options make of vLLM before a first token is written."""

from __future__ import annotations

import http.server
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from posttrain import GRPOConfig
from posttrain.rollout.vllm_engine.client import ServerClient
from posttrain.rollout.vllm_engine.params import PROCESSED, RAW
from posttrain.rollout.vllm_engine.transport import Deadlines, ServerRefused, ServerSlow
from posttrain.rollout.vllm_engine.upstream import UpstreamClient
from posttrain.trainer.vllm_setup import client_of, refuse_correction_without_logps, vllm_engine
from tests.rollout.served import echo_process, needs_uvicorn

QUICK = Deadlines(connect=1, health=1, control=2, start=1.5)


@contextmanager
def answering(status):
    """A server that answers everything with one status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"error": "no"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given):
            """Nothing is said."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def found(address, token=None):
    return client_of(address, token, QUICK, None, RAW)


@needs_uvicorn
def test_our_server_is_known_by_its_answer(tmp_path):
    server = echo_process(tmp_path)
    try:
        server.restart()
        address = f"http://127.0.0.1:{server.port}"
        assert isinstance(found(address, server._token), ServerClient)
        with pytest.raises(ServerRefused, match="401"):
            found(address, "another-token-than-its-own")
    finally:
        server.close()


def test_a_server_without_our_routes_is_a_plain_vllm():
    with answering(404) as address:
        assert isinstance(found(address), UpstreamClient)


def test_nobody_is_waited_for_in_vain():
    with answering(404) as address:
        gone = address
    with pytest.raises(ServerSlow, match=r"posttrain vllm-serve.*use_vllm=False"):
        found(gone)


def trainer(**options):
    """As much of a trainer as is asked before an engine is there."""
    args = GRPOConfig(output_dir="/tmp/nowhere", use_cpu=True, use_vllm=True, **options)
    return SimpleNamespace(
        args=args, stop_ids=(1,), corrects_sampler=options.get("vllm_importance_sampling_correction", True)
    )


@pytest.mark.parametrize(
    ("mode", "options", "refused"),
    [
        (PROCESSED, {"temperature": 0.7, "top_p": 0.9}, False),
        (RAW, {}, False),
        (RAW, {"temperature": 0.7}, True),
        (RAW, {"top_k": 5}, True),
        (RAW, {"top_k": 5, "vllm_importance_sampling_correction": False}, False),
    ],
)
def test_a_correction_by_other_log_probs_than_those_that_were_drawn_with_is_refused(mode, options, refused):
    if not refused:
        refuse_correction_without_logps(trainer(**options), mode)
        return
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        refuse_correction_without_logps(trainer(**options), mode)


def test_without_vllm_a_colocated_run_says_what_else_there_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"the native engine.*vllm_mode='server'"):
        vllm_engine(trainer())
