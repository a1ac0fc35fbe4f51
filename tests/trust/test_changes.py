"""A resume under other data, another tokenizer or another option is refused, and the difference is shown."""

from __future__ import annotations

import shutil

import pytest

from tests import tiny
from tests.trainer import resumable_run
from tests.trust import runs


def other_template():
    changed = tiny.tokenizer()
    changed.chat_template += "{# another one #}"
    return changed


CHANGES = {
    "data: rows added": ({"rows": 30}, "dataset: "),
    "tokenizer: another template": ({"tokenizer": other_template}, "tokenizer: "),
    "option: learning_rate": ({"learning_rate": 5e-4}, "learning_rate: 0.001 -> 0.0005"),
    "option: batch size": ({"per_device_train_batch_size": 2}, "per_device_train_batch_size: 4 -> 2"),
    "option: seed": ({"seed": 7}, "seed: 42 -> 7"),
    "option: max_length": ({"max_length": 24}, "max_length: 1024 -> 24"),
    "option: weight_decay": ({"weight_decay": 0.1}, "weight_decay: 0.0 -> 0.1"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    runs.finish("sft", folder, max_steps=4)
    return folder


def test_every_change_is_refused_with_the_difference_and_allowed_by_name(finished, tmp_path, figure):
    for name, (change, shown) in CHANGES.items():
        change = {key: value() if callable(value) else value for key, value in change.items()}
        with pytest.raises(ValueError, match="then -> now") as refusal:
            resumable_run.main("sft", finished, resume=True, max_steps=6, **runs.OPTIONS, **change)
        assert shown in str(refusal.value), name
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    resumable_run.main(
        "sft", copy, resume=True, max_steps=6, rows=30, seed=7, resume_allow_changes=["dataset", "seed"], **runs.OPTIONS
    )
    count = len(CHANGES)
    figure(
        "changed data, tokenizer or option",
        count,
        f"{count} of {count} refused with the difference",
        f"{count} of {count}",
    )
