"""Rollouts go to a dataset on the Hub where asked, and nowhere else; a Hub that fails does not take the run with it."""

from __future__ import annotations

import io

import huggingface_hub.constants
import pyarrow.parquet
import pytest
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.store import read_rollouts
from posttrain.trainer.checkpoints.hub import model_files
from tests import tiny
from tests.trainer.test_hub import TOKEN, running_stand_in


def shortness(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def train(folder, **options):
    defaults = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2,
        "max_completion_length": 4, "report_to": "none", "use_cpu": True, "save_strategy": "no", "reward_workers": 0,
        "dataset_cache_dir": str(folder / "cache"), "disable_tqdm": True, "hub_token": TOKEN, "hub_private_repo": True,
    }  # fmt: skip
    GRPOTrainer(
        tiny.causal_lm(), shortness, GRPOConfig(**{**defaults, **options}),
        Dataset.from_dict({"prompt": [f"Say {i}" for i in range(6)]}), processing_class=tiny.tokenizer(),
    ).train()  # fmt: skip


@pytest.fixture
def hub(monkeypatch):
    with running_stand_in() as made:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", made.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield made


def test_every_file_of_the_store_is_pushed(tmp_path, hub):
    train(tmp_path, log_completions_hub_repo="team/said")
    (made,) = hub.created
    assert (made["type"], made["organization"], made["name"]) == ("dataset", "team", "said")
    assert made["visibility"] == "private"
    files = hub.files["team/said"]
    assert sorted(files) == ["step=000001/process-0.parquet", "step=000002/process-0.parquet"]
    kept = read_rollouts(tmp_path, steps=[2])["completion_ids"].to_pylist()
    assert pyarrow.parquet.read_table(io.BytesIO(files[sorted(files)[1]]))["completion_ids"].to_pylist() == kept


def test_nothing_is_pushed_where_nobody_asked(tmp_path, hub):
    train(tmp_path)
    assert not hub.requests


def test_a_hub_that_fails_at_the_end_costs_only_the_copy(tmp_path, hub, capsys, monkeypatch):
    answer = hub.answer

    def refusing(method, path, body):
        return (403, {"error": "no room"}) if "/commit/" in path else answer(method, path, body)

    monkeypatch.setattr(hub, "answer", refusing)
    train(tmp_path, log_completions_hub_repo="team/said")
    told = capsys.readouterr().out
    assert "were not all pushed to team/said (" in told
    assert len(read_rollouts(tmp_path)) == 8


def test_prompts_in_rollouts_are_no_part_of_a_pushed_model(tmp_path):
    for name in ("config.json", "rollouts/step=000001/process-0.parquet", "rollouts_0.safetensors", "metrics.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [name for name, _ in model_files(tmp_path)] == ["config.json"]


def test_pushing_what_is_not_kept_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="`log_completions_hub_repo` pushes the files of `keep_rollouts`, which is off"
    ):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, keep_rollouts=False, log_completions_hub_repo="team/said")
