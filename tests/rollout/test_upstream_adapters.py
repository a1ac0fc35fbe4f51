"""Adapters for several plain `vllm serve` that look at one folder."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rollout.engines.vllm.kept_weights import KeptWeights
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from tests.rollout.served import QUICK


class PlainServer(ThreadingHTTPServer):
    """Lists, loads and unloads adapters; what it loads it reads."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.adapters: dict[str, float] = {}  # name -> the number that is in all of it
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *given) -> None:
        """Nothing is said."""

    def _answer(self, value) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        adapters = [{"id": name, "parent": "base"} for name in list(self.server.adapters)]
        self._answer({"data": [{"id": "base", "parent": None, "max_model_len": 64}, *adapters]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/unload_lora_adapter":
            del self.server.adapters[body["lora_name"]]
        else:
            folder = Path(body["lora_path"])
            tensors = load_file(folder / "adapter_model.safetensors").values()
            numbers = set(torch.cat(list(tensors)).unique().tolist())
            assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
            (self.server.adapters[body["lora_name"]],) = numbers
        self._answer({})


@pytest.fixture
def servers():
    made = [PlainServer() for _ in range(3)]
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


def adapter(number: int) -> tuple[dict, list[tuple[str, torch.Tensor]]]:
    names = [f"layers.{layer}.q_proj.lora_{side}.weight" for layer in range(4) for side in "AB"]
    return {"peft_type": "LORA", "r": 8}, [(name, torch.full((4096,), float(number))) for name in names]


def test_three_servers_take_every_version_from_one_folder(servers, tmp_path):
    sent = []
    clients = [UpstreamClient(server.url, None, QUICK, tmp_path) for server in servers]
    engine = ServedVLLM(
        clients,
        adapter_export=lambda: adapter(sent[-1]),
        vocabulary=100,
        options=ServedOptions(QUICK, watch_seconds=0.3),
    )
    with engine:
        for version in range(1, 11):
            sent.append(version)
            engine.load_weights(None, version)
            newest = f"posttrain-{engine.target.version}-{engine.target.fingerprint}"
            assert [server.adapters[newest] for server in servers] == [float(version)] * 3
        assert engine.fleet.recoveries == 0
    folders = list(tmp_path.iterdir())
    assert len(folders) == 3
    assert all(len(list(folder.iterdir())) == 2 for folder in folders)  # the newest and the one before


def test_an_adapter_that_was_staged_and_given_up_leaves_no_files(servers, tmp_path):
    client = UpstreamClient(servers[0].url, None, QUICK, tmp_path)
    config, tensors = adapter(1)
    kept = KeptWeights.of(tensors, "blake2b", adapter_config=config)
    client.stage(kept, 5)
    assert [path.name for path in tmp_path.glob("*/*")] == [f"posttrain-5-{kept.fingerprint}"]
    client.abort(5)
    assert list(tmp_path.glob("*/*")) == []


def test_an_adapter_that_could_not_be_written_is_not_there_at_all(servers, tmp_path, monkeypatch):
    client = UpstreamClient(servers[0].url, None, QUICK, tmp_path)
    config, tensors = adapter(1)
    kept = KeptWeights.of(tensors, "blake2b", adapter_config=config | {"unwritable": {1, 2}})
    with pytest.raises(TypeError, match="set"):
        client.stage(kept, 5)
    assert list(tmp_path.glob("*/*")) == []
