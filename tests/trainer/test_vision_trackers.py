"""Pictures of rollouts on the trackers that show such: trackio and tensorboard as they are, wandb by a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.trainer.vision_runs import chats, trainer_of

PROMPTS = [{"prompt": prompt} for prompt, _, _ in chats()[:4]]  # of one image, two, none, and the first again
OPTIONS = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 8, "log_completions": True}


def train(folder, tracker, **options):
    """`report_to` names it when the trainer is there, unless transformers' own callback is needed for it."""
    given = {"train_dataset": PROMPTS, "reward_funcs": lambda completions, **_: [0.5] * len(completions)}
    given |= {"reward_workers": 0, "logging_steps": 1, **OPTIONS, **options}
    trainer = trainer_of("grpo", "llava", folder, torch.float32, **given)
    trainer.args.report_to = [tracker]
    trainer.train()


@pytest.mark.parametrize("log_multimodal", [True, False])
def test_wandbs_table_has_a_column_of_pictures(log_multimodal, tmp_path, monkeypatch):
    logged = []
    table, shown = lambda columns, data: [dict(zip(columns, row)) for row in data], lambda picture: ("shown", picture)
    fake = SimpleNamespace(run=SimpleNamespace(url=""), Table=table, Image=shown, log=logged.append)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(tmp_path, "wandb", log_multimodal=log_multimodal)
    rows = logged[0]["completions"]
    if not log_multimodal:
        assert all("images" not in row for row in rows)
        return
    assert sorted(len(row["images"]) for row in rows) == [0, 0, 1, 1, 1, 1, 2, 2]
    for row in rows:
        assert ("[image]" in row["prompt"]) == bool(row["images"])
        assert all(kind == "shown" and isinstance(one, Image.Image) for kind, one in row["images"])


def test_trackio_keeps_the_pictures(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    places = {"TRACKIO_DIR": tmp_path / "trackio", "MEDIA_DIR": tmp_path / "trackio" / "media"}
    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        for name in places.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, places[name])
    trackio.init(project="pictures", name="run", embed=False)
    try:
        train(tmp_path, "trackio")
    finally:
        trackio.finish()
    assert len(list(places["MEDIA_DIR"].rglob("*.png"))) == 8


def test_tensorboard_shows_the_pictures_beside_their_texts(tmp_path, monkeypatch):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    train(tmp_path, "tensorboard", report_to="tensorboard")
    found = reading.EventAccumulator(str(tmp_path / "board")).Reload().Tags()
    assert len(found["images"]) == 8
    assert len([tag for tag in found["tensors"] if tag.startswith("completions/")]) == 6
