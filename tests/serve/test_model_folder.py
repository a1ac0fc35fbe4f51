"""What is known of a model by its files: in a folder, or in the cache of the Hub (laid out here as huggingface_hub does it)."""

import json

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from posttrain.serve.engine.engine_thread import EngineThread
from posttrain.serve.engine.model_folder import ModelFiles
from posttrain.serve.engine.versions import Serving, Versions
from posttrain.serve.engine.vllm_engine import VLLMEngine, VLLMOptions
from posttrain.serve.errors import EngineFailed, PayloadError
from posttrain.serve.weights.update import Updater
from tests.serve.echo_engine import EchoEngine, numbered_weights
from tests.serve.serving import update_of

NAME, COMMIT = "some-body/some-model", "4" * 40


def cached(cache, files, name=NAME, commit=COMMIT, ref="main"):
    """One snapshot: links to blobs, and the commit that `ref` means."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(commit)
    for number, (file, write) in enumerate(files.items()):
        blob = home / "blobs" / f"{commit}{number}"
        write(blob)
        (snapshot / file).symlink_to(blob)
    return snapshot


def weights(version, names=("a", "b", "c", "d")):
    return lambda path: save_file(numbered_weights(version, names), path)


def as_json(value):
    return lambda path: path.write_text(json.dumps(value))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


class HubEngine(EchoEngine):
    """The scripted engine, with what VLLMEngine says of a model by its name."""

    known_tensors, optional_tensors = VLLMEngine.known_tensors, VLLMEngine.optional_tensors
    initial_weights = VLLMEngine.initial_weights

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._options, self._files = VLLMOptions(NAME), ModelFiles(NAME)


def test_a_model_named_as_on_the_hub_is_checked_and_put_back(cache):
    cached(cache, {"model.safetensors": weights(0), "config.json": as_json({"tie_word_embeddings": True})})
    fails = [True]

    def on_load(name):
        if fails[0] and name == "c":
            fails[0] = False
            raise RuntimeError("CUDA out of memory")

    engine, versions = HubEngine(numbered_weights(0), on_load=on_load), Versions(Serving(0))
    thread = EngineThread(engine, versions)
    thread.start()
    try:
        updater = Updater(engine, versions, thread, None)
        with pytest.raises(PayloadError, match="c is missing from the manifest, with 1 others"):
            updater.begin(update_of(1, numbered_weights(1, ("a", "b")))[0], False, False, None)
        manifest, payloads = update_of(7, numbered_weights(7))
        updater.begin(manifest, False, False, None)
        for payload in payloads:
            updater.part(payload)
        with pytest.raises(EngineFailed, match="Version 0 serves"):
            updater.commit(7, "drain", 5)
        assert {float(tensor[0]) for tensor in engine.weights.values()} == {0.0}
        tied = update_of(8, numbered_weights(8) | {"lm_head.weight": torch.zeros(1)})[0]
        assert updater.begin(tied, False, False, None)["phase"] == "staging"
    finally:
        thread.stop()


def test_the_revision_and_the_cache_that_were_loaded_are_those_that_are_read(cache, tmp_path):
    config = as_json({"tie_word_embeddings": True})
    cached(cache, {"model.safetensors": weights(1), "config.json": config})
    cached(cache, {"model.safetensors": weights(2)}, commit="5" * 40, ref="other")
    cached(tmp_path / "more", {"model.safetensors": weights(3)})
    for files, wanted in (
        (ModelFiles(NAME), 1),
        (ModelFiles(NAME, "other"), 2),
        (ModelFiles(NAME, "5" * 40), 2),
        (ModelFiles(NAME, None, str(tmp_path / "more")), 3),
    ):
        assert files.note is None
        assert {float(tensor[0]) for _, tensor in files.read_tensors()} == {float(wanted)}
        assert sorted(files.known_tensors()) == ["a", "b", "c", "d"]
    assert files.optional_tensors() == {"lm_head.weight"}  # by the config, which is in the other cache


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "the folder of some-body/some-model was not found: LocalEntryNotFoundError"),
        ({"pytorch_model.bin": as_json({})}, "has no safetensors files"),
        ({"model.safetensors.index.json": as_json({"weight_map": {"a": "x.safetensors"}})}, "has no file x.safet"),
    ],
)
def test_weights_that_are_not_at_hand_are_said_so_in_the_notes(cache, files, sentence):
    if files:
        cached(cache, files)
    found = ModelFiles(NAME)
    assert sentence in found.note
    assert "cannot be put back" in found.note
    assert (found.known_tensors(), found.read_tensors(), found.optional_tensors()) == (None, None, frozenset())


def checkpoint(folder, more):
    folder.mkdir(exist_ok=True)
    save_file(numbered_weights(0) | more, folder / "model.safetensors")
    return ModelFiles(str(folder))


class FolderEngine(HubEngine):
    def __init__(self, folder):
        super().__init__(numbered_weights(0))
        self._files = ModelFiles(str(folder))


@pytest.mark.parametrize(
    ("name", "tensor", "optional"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4), True),
        ("gpt_neox.layers.3.attention.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool), True),
        ("gpt_neox.layers.3.attention.masked_bias", torch.tensor(-1e9), True),
        ("h.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8), True),
        ("embeddings.position_ids", torch.arange(8), True),
        ("model.layers.0.attention.bias", torch.ones(8), False),
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(8), False),
        ("model.rotary_emb.weight", torch.ones(4), False),
    ],
)
def test_what_is_no_parameter_may_be_left_out(tmp_path, name, tensor, optional):
    files = checkpoint(tmp_path / "model", {name: tensor})
    assert files.optional_tensors() == ({name} if optional else frozenset())
    updater = Updater(FolderEngine(tmp_path / "model"), Versions(Serving(0)), None, None)
    without = update_of(1, numbered_weights(1))[0]
    if not optional:
        with pytest.raises(PayloadError, match="is missing from the manifest"):
            updater.begin(without, False, False, None)
        return
    assert updater.begin(without, False, False, None)["phase"] == "staging"
    with_it = update_of(2, numbered_weights(2) | {name: tensor})[0]
    assert updater.begin(with_it, True, False, None)["phase"] == "staging"


def test_dtypes_that_cannot_travel_are_not_compared(tmp_path):
    files = checkpoint(tmp_path / "model", {"e": torch.zeros(3, dtype=torch.float64)})
    assert files.known_tensors()["e"].dtype == "F64"
    updater = Updater(FolderEngine(tmp_path / "model"), Versions(Serving(0)), None, None)
    assert updater.begin(update_of(1, numbered_weights(1) | {"e": torch.zeros(3)})[0], False, False, None)
    with pytest.raises(PayloadError, match=r"e is F64 \[3\]; the manifest says float32 \[4\]"):
        updater.begin(update_of(2, numbered_weights(1) | {"e": torch.zeros(4)})[0], True, False, None)
