"""Export, evaluation and chat with the real pretrained 135M model. Marked slow: CI runs these in its second step."""

from __future__ import annotations

import importlib.util
import io
import json
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain import MergeConfig, merge_models
from posttrain.cli.commands import demo
from posttrain.cli.main import main
from posttrain.exporting.verification import BOUNDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return demo.real_model()


@pytest.fixture(scope="module")
def lora(model, tmp_path_factory):
    """An adapter on every linear that moves what the model says, as training does."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    torch.manual_seed(0)
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.005)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("to", "dtype"),
    [
        ("merged", "bfloat16"),
        ("adapter", "float32"),
        ("gguf", "q8_0"),
    ],  # the others: tests/cli/test_export, tiny models
)
def test_exports_give_the_trained_log_probs_within_the_bound(lora, tmp_path, capsys, to, dtype):
    words = ["export", str(lora), "--to", to, "--dtype", dtype, "--output", str(tmp_path / "out")]
    assert main(words) == 0
    told = capsys.readouterr().out
    print(told)
    assert f"bound {BOUNDS[dtype]:g}" in told
    if to == "gguf" and importlib.util.find_spec("llama_cpp"):
        assert "llama.cpp   differs" in told


def test_a_merge_without_one_of_210_adapters_is_refused(model, lora, tmp_path, monkeypatch, capsys):
    from posttrain.exporting import export as exporting

    original, plain = (
        exporting.exported_weights,
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict(),
    )
    skipped = "model.layers.17.mlp.down_proj.weight"

    def skipping(given, dtype=None):
        for name, tensor in original(given, dtype):
            yield name, plain[name].to(dtype) if name == skipped else tensor

    monkeypatch.setattr(exporting, "exported_weights", skipping)
    words = ["export", str(lora), "--to", "merged", "--dtype", "bfloat16", "--output", str(tmp_path / "out")]
    assert main(words) == 1
    assert "model.layers.17.mlp.down_proj is the first layer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.trust
def test_scores_do_not_depend_on_the_engine(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(2, 14)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "right.py").write_text(
        "def right(completions, answer, **columns):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    )
    found = []
    for engine in ("native", "transformers"):
        words = ["--data", "sums.jsonl", "--reward", "right.py:right", "--samples", "4", "--max-new-tokens", "16"]
        assert main(["eval", model, *words, "--engine", engine, "--json", "s.json", "--save-samples", "s.jsonl"]) == 0
        samples = [json.loads(line)["completion_ids"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
        found.append((json.loads((tmp_path / "s.json").read_text()), samples))
    parted = sum(one != two for one, two in zip(found[0][1], found[1][1]))
    assert parted <= 1  # two tokens that are equally good
    shares = [one["pass@1"]["value"] for one, _ in found]
    assert np.ptp(shares) <= parted / 48 + 1e-9
    assert 0 < shares[0] < 1
    assert found[0][0]["pass@4"]["value"] > found[0][0]["pass@1"]["value"]


def test_chat_knows_the_capital_of_france(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?"))
    assert main(["chat", model, "--temperature", "0", "--max-new-tokens", "12"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_merges_of_the_real_model(model, lora, tmp_path):
    """With itself it is itself, to the bit; t = 0 and 1 are the parents; half way the loss lies between theirs."""
    base, adapted = str(model), str(lora)
    merge_models(MergeConfig("linear", base, base), tmp_path / "itself")
    merge_models(MergeConfig("slerp", adapted, base, t_values=1.0), tmp_path / "end")
    original = load_file(f"{model}/model.safetensors")
    for folder in ("itself", "end"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == original.keys()
        assert all(torch.equal(found[name], tensor.to(found[name].dtype)) for name, tensor in original.items()), folder
    merge_models(MergeConfig("slerp", adapted, base, t_values=0.0), tmp_path / "start")
    merge_models(MergeConfig("linear", adapted, base), tmp_path / "between")
    start, between, end = (loss_of(tmp_path / folder) for folder in ("start", "between", "end"))
    assert end < between < start


def loss_of(folder):
    tokenizer, network = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    ids = tokenizer(
        "The capital of France is Paris, and that of Italy is Rome. Two and two are four.", return_tensors="pt"
    )
    with torch.no_grad():
        return network(**ids, labels=ids["input_ids"]).loss.item()
