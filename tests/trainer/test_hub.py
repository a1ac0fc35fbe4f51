"""Pushing to the Hub, against a stand-in on 127.0.0.1, in a process that may reach nothing else."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers.integrations import integration_utils

from posttrain import DPOConfig, RewardConfig, SFTConfig, SFTTrainer
from posttrain.trainer.checkpoints.hub import copy_model_files
from tests import tiny
from tests.forked import run_function

TOKEN = "hf_" + "SecretOfTheTest" * 2
ROOT = Path(__file__).parents[2]


# ---- the stand-in --------------------------------------------------------------------------------------------------------


class StandIn:
    """What the Hub remembers: every request, and the files of every repository."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.created: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        for verb, pattern, reply in ROUTES:
            found = re.fullmatch(pattern, path.split("?")[0])
            if verb == method and found:
                return 200, reply(self, found, body)
        return 404, {"error": f"the stand-in knows no {method} {path}"}

    def create(self, found: re.Match, body: bytes) -> dict[str, Any]:
        wanted = json.loads(body)
        self.created.append(wanted)
        repo = f"{wanted['organization'] or 'me'}/{wanted['name']}"
        self.files.setdefault(repo, {})
        return {"url": f"{self.url}/{repo}", "name": repo, "id": "1"}

    def validate(self, found: re.Match, body: bytes) -> dict[str, Any]:
        head = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        yaml.safe_load(head[1])
        return {"errors": [], "warnings": []}

    def preupload(self, found: re.Match, body: bytes) -> dict[str, Any]:
        modes = [
            ("lfs" if f["path"].endswith((".safetensors", ".bin")) else "regular", f["path"])
            for f in json.loads(body)["files"]
        ]
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for mode, path in modes]}

    def batch(self, found: re.Match, body: bytes) -> dict[str, Any]:
        wanted = json.loads(body)["objects"]
        missing = {
            o["oid"]: {"upload": {"href": f"{self.url}/blobs/{o['oid']}"}} for o in wanted if o["oid"] not in self.blobs
        }
        return {
            "transfer": "basic",
            "objects": [o | ({"actions": missing[o["oid"]]} if o["oid"] in missing else {}) for o in wanted],
        }

    def store(self, found: re.Match, body: bytes) -> dict[str, Any]:
        self.blobs[found["oid"]] = body
        return {}

    def commit(self, found: re.Match, body: bytes) -> dict[str, Any]:
        repo = found["repo"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append((repo, value["summary"]))
            elif line["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.blobs[value["oid"]]
        oid = f"{len(self.commits):040x}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"}


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = (
    ("POST", r"/api/repos/create", StandIn.create),
    ("POST", r"/api/validate-yaml", StandIn.validate),
    ("POST", rf"/api/(models|datasets)/{REPO}/preupload/main", StandIn.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", StandIn.batch),
    ("PUT", r"/blobs/(?P<oid>\w+)", StandIn.store),
    ("POST", rf"/api/(models|datasets)/{REPO}/commit/main", StandIn.commit),
)


@contextmanager
def running_stand_in() -> Iterator[StandIn]:
    hub = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self._body()
            with hub.lock:
                hub.requests.append((self.command, self.path, dict(self.headers), body))
                status, reply = hub.answer(self.command, self.path, body)
            payload = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(payload)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *arguments: Any) -> None:
            """Requests are kept in `hub.requests`."""

        do_GET = do_POST = do_PUT = do_HEAD = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# ---- the client ----------------------------------------------------------------------------------------------------------

CLIENT = """
import json, socket, sys

contacted = set()
def guarded(connect):
    def wrapper(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            contacted.add(f"{address[0]}:{address[1]}")
            if address[0] != "127.0.0.1":
                raise OSError(f"{address} is outside")
        return connect(self, address)
    return wrapper
socket.socket.connect = guarded(socket.socket.connect)
socket.socket.connect_ex = guarded(socket.socket.connect_ex)

import torch
torch.set_num_threads(1)
from datasets import Dataset
from peft import LoraConfig
from posttrain import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from tests import tiny

folder, token = sys.argv[1:]
common = dict(max_steps=2, logging_steps=1, per_device_train_batch_size=2, save_steps=1, hub_token=token)
args = SFTConfig(output_dir=f"{folder}/whole", push_to_hub=True, hub_model_id="team/whole", hub_private_repo=True,
                 hub_always_push=True, hub_strategy="checkpoint", on_bad_rows="drop", **common)
rows = tiny.chats(8)
rows[3]["messages"] = []
trainer = SFTTrainer(tiny.causal_lm(), args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer())
trainer.train()
print(trainer.push_to_hub(dataset_name="someone/rows", commit_message="all done").commit_url)

lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
model = tiny.causal_lm()
model.config._name_or_path = model.name_or_path = "someone/base"
args = DPOConfig(output_dir=f"{folder}/adapter", **common)
trainer = DPOTrainer(model, args=args, train_dataset=Dataset.from_list(tiny.pairs(8)), processing_class=tiny.tokenizer(),
                     peft_config=lora)
trainer.train()
trainer.push_to_hub(dataset_name=["someone/pairs", "someone/more"], tags="maths", model_name="A fine adapter")
json.dump(sorted(contacted), open(f"{folder}/contacted.json", "w"))
"""


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> SimpleNamespace:
    """A whole model pushed while and after it trained, and an adapter pushed at the end only."""
    folder = tmp_path_factory.mktemp("client")
    with running_stand_in() as hub:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        }
        environment |= {
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

        def client() -> None:
            sys.argv = ["client", str(folder), TOKEN]
            exec(compile(CLIENT, "client", "exec"), {"__name__": "__main__"})

        done = run_function(client, cwd=folder, environment=environment)
        assert done.returncode == 0, done.stderr[-4000:]
    contacted = json.loads((folder / "contacted.json").read_text())
    return SimpleNamespace(hub=hub, folder=folder, output=done.stdout, contacted=contacted)


def card(text: bytes) -> tuple[dict[str, Any], str]:
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text.decode(), re.DOTALL).groups()
    return yaml.safe_load(head), body


def test_the_repositories_were_made_as_asked(pushed):
    made = {(wanted["organization"], wanted["name"]): wanted.get("visibility") for wanted in pushed.hub.created}
    assert made == {("team", "whole"): "private", (None, "adapter"): None}


def test_the_files_arrived(pushed):
    whole = pushed.hub.files["team/whole"]
    assert {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= whole.keys()
    assert not {"metrics.jsonl", "prepared_data.json", "training_args.json"} & whole.keys()
    assert whole["model.safetensors"] == (pushed.folder / "whole" / "model.safetensors").read_bytes()
    assert not any("checkpoint-" in name for name in whole)
    assert whole.keys() >= {
        f"last-checkpoint/{name}" for name in ("manifest.json", "optimizer.safetensors", "run_state.json")
    }
    adapter = pushed.hub.files["me/adapter"]
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= adapter.keys()
    assert "model.safetensors" not in adapter


def test_pushes_while_training_and_at_the_end(pushed):
    messages = [message for repo, message in pushed.hub.commits if repo == "team/whole"]
    assert messages[0] == "Training in progress, step 1"
    assert messages[-1] == "all done"
    assert f"{pushed.hub.url}/team/whole/commit/" in pushed.output


def test_the_cards_name_the_datasets(pushed):
    head, body = card(pushed.hub.files["team/whole"]["README.md"])
    assert head["datasets"] == ["someone/rows"]
    assert head["model_name"] == "whole"
    assert 'pipeline("text-generation", model="team/whole")' in body
    assert "[someone/rows](https://huggingface.co/datasets/someone/rows)" in body
    head, body = card(pushed.hub.files["me/adapter"]["README.md"])
    assert head["datasets"] == ["someone/pairs", "someone/more"]
    assert head["base_model"] == "someone/base"
    assert head["library_name"] == "peft"
    assert set(head["tags"]) >= {"posttrain", "dpo", "maths"}
    assert body.count("# A fine adapter") == 1
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/adapter")' in body


def test_the_token_went_in_the_header_only(pushed):
    hub = pushed.hub
    api = [
        headers for _, path, headers, _ in hub.requests if path.startswith("/api/models") or path.endswith("/create")
    ]
    assert api
    assert all(headers.get("authorization", headers.get("Authorization")) == f"Bearer {TOKEN}" for headers in api)
    for method, path, headers, body in hub.requests:
        others = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        assert TOKEN not in path, (method, path)
        assert TOKEN not in str(others), (method, path)
        assert TOKEN.encode() not in body, (method, path)
    for repo, files in hub.files.items():
        for name, content in files.items():
            assert TOKEN.encode() not in content, (repo, name)


def test_no_row_of_the_user_and_no_name_of_the_machine_is_pushed(pushed):
    """Rows that failed the check, the lock with host and process, and pickles stay at home."""
    for files in pushed.hub.files.values():
        names = {name for name in files if not name.startswith("last-checkpoint/")}
        assert not {name for name in names if name.startswith(("bad_rows", ".", "training_args"))}
        assert not {name for name in files if name.endswith((".bin", ".pt", ".pkl"))}
    assert (pushed.folder / "whole" / "bad_rows_train.jsonl").exists()


def test_nothing_else_was_contacted(pushed):
    assert pushed.contacted == [pushed.hub.url.removeprefix("http://")]
    known = [(verb, pattern) for verb, pattern, _ in ROUTES]
    others = {
        f"{method} {path}"
        for method, path, _, _ in pushed.hub.requests
        if not any(method == verb and re.fullmatch(pattern, path.split("?")[0]) for verb, pattern in known)
    }
    # PEFT asks for the vocabulary of an adapter's base; the Hub's client asks the Hub for a list it keeps.
    assert others <= {"HEAD /someone/base/resolve/main/config.json", "GET /api/agent-harnesses"}


def test_model_files_of_a_checkpoint_are_copied_and_its_state_is_not(tmp_path):
    checkpoint, folder = tmp_path / "checkpoint-3", tmp_path / "run"
    state = ["optimizer.safetensors", "optimizer.json", "scheduler.json", "rng_state_0.safetensors", "run_state.json",
             "trainer_state.json", "manifest.json", "training_args.json", "bema_state.safetensors"]  # fmt: skip
    model = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    for place in (checkpoint, folder):
        place.mkdir()
    for name in state + model:
        (checkpoint / name).write_text(name)
    copy_model_files(checkpoint, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(model)


# ---- trackers ------------------------------------------------------------------------------------------------------------


class FakeTrackio:
    """What transformers calls of trackio."""

    __version__ = "0.30.0"

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.frozen: dict[str, Any] = {}
        self.config = FakeConfig()
        current = SimpleNamespace(get=lambda: self.given.get("space_id"))
        self.context_vars = SimpleNamespace(current_space_id=current, current_project=current)

    def init(self, **given: Any) -> None:
        self.given = given

    def log(self, entry: dict[str, Any]) -> None:
        self.logged.append(entry)

    def finish(self) -> None:
        """Nothing is open."""

    def freeze(self, **given: Any) -> str:
        self.frozen = given
        return given["new_space_id"]


class FakeConfig(dict):
    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        super().update(values)


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, RewardConfig])
def test_configs_take_the_trackers_options(config, tmp_path):
    args = config(output_dir=str(tmp_path), project="rows", trackio_space_id="team/board", run_name="first")
    assert (args.project, args.trackio_space_id, args.run_name) == ("rows", "team/board", "first")
    assert config(output_dir=str(tmp_path)).trackio_space_id is None


def test_project_and_space_reach_trackio(tmp_path, monkeypatch):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=2, save_strategy="no", hub_token=TOKEN,
        report_to="trackio", project="rows", trackio_space_id="team/board", run_name="first", hub_private_repo=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny.causal_lm(), args, train_dataset=Dataset.from_list(tiny.chats(4)), processing_class=tiny.tokenizer()
    )
    trainer.train()
    assert {name: fake.given[name] for name in ("project", "name", "space_id", "private")} == {
        "project": "rows", "name": "first", "space_id": "team/board", "private": True,
    }  # fmt: skip
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["train/loss"] for entry in fake.logged if "train/loss" in entry] == losses
    assert fake.frozen["project"] == "rows"
    assert TOKEN not in str(fake.config)
    trainer.create_model_card()
    head, _ = card((tmp_path / "README.md").read_bytes())
    assert {"trackio", f"trackio:https://huggingface.co/spaces/{fake.frozen['new_space_id']}"} <= set(head["tags"])
