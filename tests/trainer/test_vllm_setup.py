"""What a trainer's options make of vLLM before a first token is written."""

from __future__ import annotations

import http.server
import json
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model

from posttrain import GRPOConfig, GRPOTrainer, OnlineDPOTrainer, RLOOTrainer
from posttrain.core.transport import ServerRefused, ServerSlow
from posttrain.data.vision.families import FAMILIES
from posttrain.rollout.engines.vllm.client import ServerClient, ServerInfo
from posttrain.rollout.engines.vllm.params import PROCESSED, RAW
from posttrain.rollout.engines.vllm.server_engine import ServedVLLM
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.upstream import UpstreamClient
from posttrain.rollout.engines.weight_sync import WeightSync
from posttrain.trainer.online.vllm_setup import (
    PromptImages,
    _sends_adapter,
    client_of,
    refuse_correction_without_logps,
    refuse_given_engine,
    refuse_images_in_vllm,
    refuse_servers_without_images,
    shared_gpu_notes,
    show_images,
    vllm_engine,
)
from tests import tiny
from tests.methods import vllm_runs
from tests.rollout.served import FakeClient, echo_process, needs_uvicorn

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
    return SimpleNamespace(args=args, stop_ids=(1,))


def with_engine(engine, cls=GRPOTrainer, **options):
    """A trainer just after it has got its engine, with nothing else that a trainer has."""
    made = object.__new__(type("Made", (cls,), {"stop_ids": (1,)}))
    made.args = trainer(**options).args
    made.engine = engine
    return made


def refuse_correction(made):
    """As a trainer's construction does."""
    if made.corrects_sampler:
        refuse_correction_without_logps(made.engine, made.args.sampling(made.stop_ids))


@pytest.mark.parametrize(
    ("mode", "options", "refused"),
    [
        (PROCESSED, {"temperature": 0.7, "top_p": 0.9}, False),
        (RAW, {}, False),
        (RAW, {"temperature": 0.7}, True),
        (RAW, {"top_k": 5}, True),
        (RAW, {"top_k": 5, "vllm_importance_sampling_correction": True}, True),
        (RAW, {"top_k": 5, "vllm_importance_sampling_correction": False}, False),
    ],
)
def test_a_correction_by_other_log_probs_than_those_that_were_drawn_with_is_refused(mode, options, refused):
    made = with_engine(SimpleNamespace(is_foreign=True, logprobs_mode=mode), **options)
    if not refused:
        refuse_correction(made)
        return
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        refuse_correction(made)


def test_engines_that_know_their_log_probs_and_methods_without_a_correction_are_not_refused():
    refuse_correction(with_engine(SimpleNamespace(), temperature=0.7))
    raw = SimpleNamespace(is_foreign=True, logprobs_mode=RAW)
    refuse_correction(with_engine(raw, RLOOTrainer, temperature=0.7))


def test_a_correction_that_cannot_be_asked_for_is_an_error_and_not_a_no():
    made = with_engine(SimpleNamespace(logprobs_mode=RAW), temperature=0.7)
    del made.args  # `corrects_sampler` cannot say anything
    with pytest.raises(AttributeError, match="args"):
        refuse_correction(made)


@pytest.mark.parametrize(
    ("gpus", "world_size", "shared"),
    [
        (["GPU-1"], 1, True),
        (["GPU-0", "GPU-1"], 2, True),
        (["GPU-0", "GPU-1"], 1, False),  # it sees the trainer's and works on the other
        (["GPU-2"], 1, False),
        ([], 1, False),
    ],
)
def test_a_server_on_the_trainers_gpu_is_noticed(gpus, world_size, shared):
    ways = {"cuda_ipc": {"gpus": gpus} if gpus else None, "http": {}}
    about = ServerInfo("m", "vllm", 64, 9, RAW, None, None, transports=ways, world_size=world_size)
    notes = shared_gpu_notes({"http://here:8000": about}, ["GPU-1"])
    assert len(notes) == shared
    assert not shared or "http://here:8000 works on this trainer's GPU" in notes[0]
    assert shared_gpu_notes({"http://here:8000": about}, []) == []  # a trainer without a GPU


# ---- what is sent ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("init", "said"), [(True, None), ("pissa", "has changed the base weights")])
def test_a_server_is_sent_merged_weights_where_the_adapter_needs_another_base(init, said):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=init)
    model, notes = get_peft_model(tiny.causal_lm(), config), []
    assert _sends_adapter("auto", model, notes, can=True, base_from_memory=False) == (said is None)
    assert len(notes) == bool(said)
    assert said is None or said in notes[0]
    assert _sends_adapter("auto", model, notes, can=True, base_from_memory=True)
    if said is not None:
        with pytest.raises(ValueError, match="`vllm_sync='adapter'` cannot be done"):
            _sends_adapter("adapter", model, [], can=True, base_from_memory=False)


@needs_uvicorn
def test_servers_that_were_found_in_vain_are_not_watched_any_more(tmp_path):
    server = echo_process(tmp_path)
    try:
        server.restart()
        (tmp_path / "token").write_text(server._token)
        (tmp_path / "token").chmod(0o600)
        args = trainer(
            vllm_mode="server",
            vllm_sync="adapter",
            vllm_server_base_url=server.client.name,
            vllm_server_token_file=str(tmp_path / "token"),
        ).args
        with pytest.raises(ValueError, match="the model has no adapter"):
            vllm_engine(args, tiny.causal_lm(), None, str, is_fully_sharded=False, notes=[])
        assert not [thread for thread in threading.enumerate() if thread.name == f"watch {server.client.name}"]
    finally:
        server.close()


# ---- options ---------------------------------------------------------------------------------------------------------------


def test_a_tolerance_belongs_to_every_engine_with_weights_of_its_own():
    tolerance = GRPOConfig(output_dir="/tmp/nowhere", use_cpu=True, vllm_sync_tolerance=0.2).vllm_sync_tolerance
    assert WeightSync(SimpleNamespace(is_foreign=True), None, tolerance=tolerance).tolerance == 0.2
    with pytest.raises(ValueError, match="`vllm_sync_tolerance` is set, and the completions are written"):
        WeightSync(SimpleNamespace(), None, tolerance=tolerance)
    with pytest.raises(ValueError, match="`vllm_sync` is set, but `use_vllm` is not"):
        GRPOConfig(output_dir="/tmp/nowhere", use_cpu=True, vllm_sync="adapter", vllm_sync_tolerance=0.2)


def test_without_vllm_a_colocated_run_says_what_else_there_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"the native engine.*vllm_mode='server'"):
        vllm_engine(trainer().args, None, None, str, is_fully_sharded=False, notes=[])


@pytest.mark.parametrize(
    ("cls", "use_vllm", "said"),
    [
        (GRPOTrainer, True, "in pieces are sent to servers"),
        (GRPOTrainer, False, "Use a server .`use_vllm=True, vllm_mode='server'`"),
        (OnlineDPOTrainer, True, "has not been tried under DeepSpeed"),
    ],
)
def test_under_deepspeed_servers_alone_write(cls, use_vllm, said, monkeypatch):
    made = with_engine(None, cls)
    made.args.use_vllm = use_vllm
    made.model = made.shown_images = None
    made.renderer = made.loaded = SimpleNamespace(tokenizer=SimpleNamespace(decode=str), notes=[])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=said):
        made._make_engine()


def test_engines_that_were_given_are_refused_where_all_processes_gather_the_weights(monkeypatch, tmp_path):
    """Process 0 would wait for the others in the first gather, and they for its outcome."""
    with ServedVLLM([FakeClient("fake")], export=list) as engine:
        made = lambda: vllm_runs.trainer("grpo", tmp_path, engine=engine)  # noqa: E731
        assert made().engine is engine
        monkeypatch.setattr(GRPOConfig, "sharding", "deepspeed")
        with pytest.raises(ValueError, match=r"given .ServedVLLM. sends .* set `use_vllm=True, vllm_mode='server'`"):
            made()
        with pytest.raises(ValueError, match="from one process"):
            refuse_given_engine(engine, SimpleNamespace(sharding="fsdp"))
        own = SimpleNamespace(is_foreign=True)  # an engine of each process
        refuse_given_engine(own, SimpleNamespace(sharding="fsdp"))
        native = SimpleNamespace(model=tiny.causal_lm())
        with pytest.raises(ValueError, match=r"reads the model's weights in place, .* Leave `engine` out"):
            refuse_given_engine(native, SimpleNamespace(sharding="fsdp"))
        refuse_given_engine(native, SimpleNamespace(sharding=None))


# ---- images ------------------------------------------------------------------------------------------------------------


def shown(most=2, trains=True, longest=900, context=4096):
    vision = SimpleNamespace(most_images=most, context=context)
    return PromptImages(vision, longest, trains, SimpleNamespace(tokens=600))


def member(client, images, **can):
    info = SimpleNamespace(
        images=images, capabilities={"images": images > 0, "new_towers": True} | can, notes=("Note.",)
    )
    return SimpleNamespace(client=client, info=info, name=client.name)


@pytest.mark.parametrize(
    ("client", "images", "can", "sentence"),
    [
        (ServerClient, 2, {}, None),
        (ServerClient, 5, {}, None),
        (ServerClient, 0, {}, r"was started without --images\. Start it with `posttrain vllm-serve --images 2`"),
        (ServerClient, 1, {}, r"was started with --images 1\. Start it with `posttrain vllm-serve --images 2`"),
        (ServerClient, 2, {"new_towers": False}, r"trains the vision tower .* Note\. Start it with a newer vLLM"),
        (UpstreamClient, 0, {}, r"is a plain `vllm serve`, whose completions .* `posttrain vllm-serve --images 2`"),
    ],
)
def test_servers_that_cannot_be_shown_the_images_of_a_run_are_refused(client, images, can, sentence):
    asked = member(client("http://127.0.0.1:1"), images, **can)
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        refuse_servers_without_images([asked], shown())
    if can:  # where the tower is frozen, what is encoded stays valid
        refuse_servers_without_images([asked], shown(trains=False))


@pytest.mark.parametrize(
    ("images", "most", "context"),
    [
        (shown(), 2, 900),
        (shown(longest=100), 2, 600),  # of the probe
        (shown(longest=None), 2, None),
        (shown(longest=5000), 2, 4096),
        (shown(most=None), 999, 900),
        (shown(most=0), 1, 900),
    ],
)
def test_what_vllm_is_started_for_follows_from_the_data(images, most, context):
    assert (images.most, images.context_length()) == (most, context)


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("llava", {}, None),
        ("gemma3", {}, "looks in both directions"),
        ("paligemma", {}, "looks in both directions"),
        ("llava", {"vllm_model_impl": "transformers"}, "leave `vllm_model_impl` out"),
    ],
)
def test_what_vllm_is_not_shown_is_refused_before_a_model_is_loaded(family, options, sentence, tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, **options)
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        refuse_images_in_vllm(replace(FAMILIES[family], written_id=7), args, "train")
    with pytest.raises(ValueError, match="which token stands for one"):
        refuse_images_in_vllm(FAMILIES["llava"], args, "train")


def test_an_engine_that_was_given_is_shown_the_images_or_refused():
    client = ServerClient("http://127.0.0.1:1")
    handed = SimpleNamespace(
        fleet=SimpleNamespace(members=[member(client, 2)]), show=lambda pictures: handed.seen.append(pictures)
    )
    handed.seen, images = [], shown()
    images.vision.pixels = SimpleNamespace(family=FAMILIES["llava"])
    images.vision.layouts = SimpleNamespace(options={"a": 1})
    show_images(handed, images)
    assert handed.seen[0].options == {"a": 1}
    show_images(SimpleNamespace(reads_images=True), images)
    with pytest.raises(ValueError, match=r"the engine that it was given \(object\) is shown none"):
        show_images(object(), images)
