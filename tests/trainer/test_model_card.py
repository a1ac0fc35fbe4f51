"""The card says what is true, its code runs, and nothing local or secret is in it."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig

import posttrain
from posttrain import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from posttrain.trainer.report.model_card import Paper, is_hub_id, license_of, publishable
from posttrain.trainer.report.progress import number
from tests import tiny

TOKEN = "hf_secretsecretsecret"
KINDS = {
    "sft": (SFTTrainer, SFTConfig, tiny.chats),
    "dpo": (DPOTrainer, DPOConfig, tiny.pairs),
    "reward": (RewardTrainer, RewardConfig, tiny.pairs),
}


@pytest.fixture(scope="module")
def base_folders(tmp_path_factory):
    """A language model and a reward model on disk, with tokenizers and, for the first, a card."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("lm", tiny.causal_lm()), ("rm", tiny.reward_model())):
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    (folder / "lm" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n")
    return folder


def trained(tmp_path, kind, model, **changes):
    trainer_class, config, rows = KINDS[kind]
    peft_config = changes.pop("peft_config", None)
    options = {
        "output_dir": str(tmp_path / "my-model"), "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4,
        "save_strategy": "no", "learning_rate": 1e-3, "hub_token": TOKEN, "dataset_cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    trainer = trainer_class(
        model, args=config(**(options | changes)), train_dataset=Dataset.from_list(rows(10)),
        processing_class=tiny.tokenizer(), peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    return trainer


def card(trainer) -> tuple[dict, str]:
    text = (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    return yaml.safe_load(head), body


def code_of(body: str) -> str:
    return re.search(r"```python\n(.*?)\n```", body, re.DOTALL)[1]


def run_code(body: str, name: str, folder, capsys) -> str:
    """Run the card's own lines on the saved folder, with short answers."""
    lines = code_of(body).replace(f'"{name}"', f'"{folder}"').replace("max_new_tokens=128", "max_new_tokens=4")
    capsys.readouterr()
    exec(compile(lines, "the card", "exec"), {})
    return capsys.readouterr().out


def test_card_of_a_whole_model(tmp_path, base_folders, capsys):
    trainer = trained(tmp_path, "sft", str(base_folders / "lm"), max_length=30, num_train_epochs=2, max_steps=-1)
    trainer.save_model()
    trainer.create_model_card(model_name="my-model", dataset_name="someone/rows", tags=["maths"])
    head, body = card(trainer)
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "model_name": "my-model",
        "license": "apache-2.0",
        "datasets": ["someone/rows"],
        "tags": ["posttrain", "sft", "generated_from_trainer", "maths"],
    }
    assert "Made from lm, trained by supervised fine-tuning on [someone/rows]" in body
    report = trainer.train_dataset.report
    assert f"| rows used | {report.kept} |" in body
    assert f"| samples cut to `max_length` | {report.truncated} |" in body
    assert report.truncated > 0
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    assert f"| loss | {number(loss)} |" in body
    assert f"| torch | {metadata.version('torch')} |" in body
    assert f"| posttrain | {posttrain.__version__} |" in body
    assert "## Citation" not in body
    assert run_code(body, "my-model", tmp_path / "my-model", capsys).strip()


def test_options_that_differ_and_no_others(tmp_path):
    body = card(trained(tmp_path, "sft", tiny.causal_lm(), max_length=64, seed=7, optim="sgd", weight_decay=0.1))[1]
    table = re.search(r"### Options that differ from the defaults\n\n(.*?)\n\n", body, re.DOTALL)[1]
    rows = dict(re.findall(r"\| `(\w+)` \| (.*?) \|", table))
    assert rows == {
        "learning_rate": "0.001", "max_steps": "2", "max_length": "64", "seed": "7", "optim": "sgd", "weight_decay": "0.1",
        "per_device_train_batch_size": "4",
    }  # fmt: skip


def test_nothing_local_or_secret_is_published(tmp_path, base_folders, monkeypatch):
    kwargs = {"token": TOKEN, "revision": "main"}
    trainer = trained(tmp_path, "sft", str(base_folders / "lm"), model_init_kwargs=kwargs, run_name=str(tmp_path))
    trainer.create_model_card(model_name="my-model")
    text = (tmp_path / "my-model" / "README.md").read_text()
    assert "model_init_kwargs" in text
    for secret in (TOKEN, str(tmp_path), str(base_folders), "/tmp", "/root", "/home"):
        assert secret not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [("/home/me/data", "data"), ({"api_key": "x", "a": 1}, "{a: 1}"), (["sigmoid", "sft"], "sigmoid, sft"), (1e-6, "1.0e-6"),
     ({"path": "/root/x", "deep": {"hf_token": "y"}}, "{path: x, deep: {}}"), ("~/secrets", "secrets"), (True, "True")],
)  # fmt: skip
def test_publishable(value, text):
    assert publishable(value) == text


def test_card_of_an_adapter(tmp_path, base_folders, capsys):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = trained(tmp_path, "sft", str(base_folders / "lm"), peft_config=lora)
    trainer.save_model()
    trainer.create_model_card(model_name="my-model")
    head, body = card(trainer)
    assert head["library_name"] == "peft"
    assert "An adapter for lm, trained by supervised fine-tuning" in body
    assert run_code(body, "my-model", tmp_path / "my-model", capsys).strip()
    trainer.model.active_peft_config.base_model_name_or_path = "someone/base-7b"
    trainer.create_model_card()
    head, body = card(trainer)
    assert head["base_model"] == "someone/base-7b"
    assert "An adapter for [someone/base-7b](https://huggingface.co/someone/base-7b)" in body


def test_card_of_dpo_cites_its_paper(tmp_path):
    model = tiny.causal_lm()
    model.config._name_or_path = "someone/chat-1b"
    head, body = card(trained(tmp_path, "dpo", model, beta=0.3, loss_type=["sigmoid", "sft"]))
    assert head["base_model"] == "someone/chat-1b"
    assert head["tags"] == ["posttrain", "dpo", "generated_from_trainer"]
    assert "https://arxiv.org/abs/2305.18290" in body
    assert "@inproceedings{rafailov2023direct," in body
    assert "| `beta` | 0.3 |" in body
    assert "| `loss_type` | sigmoid, sft |" in body
    assert "| rewards/margins | " in body


def test_card_of_a_reward_model(tmp_path, base_folders, capsys):
    trainer = trained(tmp_path, "reward", str(base_folders / "rm"), center_rewards_coefficient=0.01)
    trainer.save_model()
    trainer.create_model_card(model_name="my-model")
    head, body = card(trainer)
    assert head["pipeline_tag"] == "text-classification"
    assert "A reward model from rm, trained by reward modelling" in body
    shown = float(run_code(body, "my-model", tmp_path / "my-model", capsys))
    text = "a question and its answer, as the training data writes them"
    with torch.no_grad():
        score = trainer.model.eval()(**trainer.processing_class(text, return_tensors="pt")).logits.item()
    assert shown == pytest.approx(score, abs=1e-5)


def test_card_of_a_reward_adapter_runs(tmp_path, base_folders, capsys):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    trainer = trained(tmp_path, "reward", str(base_folders / "rm"), peft_config=lora)
    trainer.save_model()
    trainer.create_model_card(model_name="my-model")
    assert float(run_code(card(trainer)[1], "my-model", tmp_path / "my-model", capsys)) != 0


def test_a_trainers_own_paper_comes_first(tmp_path):
    class Mine(SFTTrainer):
        paper = Paper("rows", "On Rows", "Row, Rosa", 2099, "9999.00001")

    KINDS["mine"] = (Mine, SFTConfig, tiny.chats)
    try:
        body = card(trained(tmp_path, "mine", tiny.causal_lm()))[1]
    finally:
        del KINDS["mine"]
    assert "[On Rows](https://arxiv.org/abs/9999.00001)" in body
    entries = ("title   = {On Rows}", "author  = {Row, Rosa}", "journal = {arXiv:9999.00001}", "year    = {2099}")
    assert "@article{rows,\n  " + ",\n  ".join(entries) + "\n}" in body


def test_a_card_that_a_person_wrote_stays_until_it_is_asked_for(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "README.md").write_text("# My own words\n")
    trainer = trained(tmp_path, "sft", tiny.causal_lm())
    assert (tmp_path / "my-model" / "README.md").read_text() == "# My own words\n"
    trainer.create_model_card()
    assert card(trainer)[0]["tags"][0] == "posttrain"


def test_card_links_the_run_on_wandb(tmp_path, monkeypatch):
    trainer = trained(tmp_path, "sft", tiny.causal_lm())
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(url="https://wandb.ai/a/b/runs/c")))
    trainer.create_model_card()
    assert "wandb" not in card(trainer)[1]  # it was not asked to report there
    trainer.args.report_to = ["wandb"]
    trainer.create_model_card()
    assert "(https://wandb.ai/a/b/runs/c)" in card(trainer)[1]


def test_what_is_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").mkdir()
    assert [is_hub_id(name) for name in ("a/b", "gpt2", "models/mine", "/abs/path", "a/b/c", "./x/y")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip


def test_license_is_read_from_the_base_models_card(base_folders):
    assert license_of(str(base_folders / "lm")) == "apache-2.0"
    assert license_of(str(base_folders / "rm")) is None
    assert license_of("nobody/never-downloaded") is None
