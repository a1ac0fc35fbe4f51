"""Exports: what is written, what is left out, and that the trainers read it."""

from __future__ import annotations

import json
import threading

import pytest

from posttrain.rollout.store import RolloutStore
from posttrain.view import api
from posttrain.view.api import Viewed
from posttrain.view.errors import NotFound, ViewError
from posttrain.view.rollout_index import RolloutIndex
from posttrain.view.run_folder import open_runs


def rollout(group, sample, completion, reward, prompt="2 + 2 =", **others):
    return {
        "group": group, "sample": sample, "prompt": prompt, "completion": completion, "reward": reward,
        "completion_ids": [1], "trained": [True], **others,
    }  # fmt: skip


@pytest.fixture
def viewed(tmp_path):
    talk = json.dumps([{"role": "user", "content": "Hi"}])
    answers = [json.dumps([{"role": "assistant", "content": word}]) for word in ("Hello!", "Go away.")]
    with RolloutStore(tmp_path) as store:
        store.write(1, [rollout(0, 0, " 5", 0.0), rollout(0, 1, " 4", 1.0), rollout(0, 2, " four", 0.5)])
        store.write(1, [rollout(1, 0, " 9", 1.0, "3 + 6 ="), rollout(1, 1, " 9", 1.0, "3 + 6 =")])
        store.write(2, [rollout(2, 0, answers[0], 1.0, talk), rollout(2, 1, answers[1], -1.0, talk)])
        store.write(3, [rollout(3, 0, "", float("nan"), error="lost"), rollout(3, 1, " x", 0.1)])
    return Viewed(open_runs([str(tmp_path)]))


def rows(made):
    return [json.loads(line) for line in made["json_lines"].splitlines()]


def test_pairs_set_the_best_against_the_worst(viewed):
    made = api.exported(viewed, {"run": 0, "format": "dpo", "filter": {"step_max": "1"}})
    assert rows(made) == [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
    assert made["skipped"] == {"all rewards of the group are equal": 1}


def test_pairs_of_conversations_stay_conversations(viewed):
    made = api.exported(viewed, {"run": 0, "format": "dpo", "ids": ["2/process-0/0"]})  # one stands for its group
    assert rows(made) == [
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "chosen": [{"role": "assistant", "content": "Hello!"}],
            "rejected": [{"role": "assistant", "content": "Go away."}],
        }
    ]


def test_two_chosen_ones_are_compared_with_each_other(viewed):
    made = api.exported(viewed, {"run": 0, "format": "dpo", "ids": ["1/process-0/1", "1/process-0/2"]})
    assert rows(made) == [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " four"}]


def test_a_group_without_two_rewards_makes_no_pair(viewed):
    made = api.exported(viewed, {"run": 0, "format": "dpo", "filter": {"step_min": "3"}})
    assert made["rows"] == 0
    assert made["skipped"] == {"fewer than two completions with a reward": 1}


def test_sft_is_messages_where_there_are_messages(viewed):
    made = api.exported(
        viewed, {"run": 0, "format": "sft", "filter": {"step_min": "2", "step_max": "2", "sort": "-reward"}}
    )
    assert rows(made)[0] == {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    }
    made = api.exported(viewed, {"run": 0, "format": "sft", "ids": ["1/process-0/1"]})
    assert rows(made) == [{"prompt": "2 + 2 =", "completion": " 4"}]
    made = api.exported(viewed, {"run": 0, "format": "prompt-completion", "filter": {"step_min": "3"}})
    assert made["skipped"] == {"could not be written": 1}


def test_what_is_wrong_is_told(viewed):
    for body, kind, sentence in (
        ({"run": 0, "format": "csv", "ids": []}, ViewError, "no format 'csv'"),
        ({"run": 4, "format": "dpo"}, NotFound, "no run 4"),
        ({"format": "dpo"}, ViewError, "run is missing"),
        ({"run": 0, "format": "dpo", "ids": "all"}, ViewError, "not a list"),
        ({"run": 0, "format": "dpo", "ids": ["9/process-0/0"]}, NotFound, "no rollout"),
    ):
        with pytest.raises(kind, match=sentence):
            api.exported(viewed, body)


@pytest.mark.parametrize("kind", ["sft", "prompt-completion", "dpo"])
def test_rollouts_about_images_are_left_out_and_counted(kind, tmp_path):
    """Their rows would name images that no trainer could find."""
    image = {"key": "0f" * 16, "column": "prompt", "place": 0, "height": 4, "width": 4, "tokens": 1, "start": 0}
    with RolloutStore(tmp_path) as store:
        store.write(1, [rollout(0, 0, " 5", 0.0), rollout(0, 1, " 4", 1.0)])
        store.write(1, [rollout(1, n, f" {n}", float(n), "What?", images=[image]) for n in range(2)])
    made = api.exported(Viewed(open_runs([str(tmp_path)])), {"run": 0, "format": kind, "filter": {}})
    assert list(made["skipped"].values()) == [1 if kind == "dpo" else 2]
    assert "about images" in next(iter(made["skipped"]))
    assert made["rows"] == (1 if kind == "dpo" else 2)


@pytest.mark.parametrize("slow", ["_index", "_compare"])
def test_what_is_not_read_yet_is_waited_for_and_never_left_out(viewed, monkeypatch, slow):
    go_on, work = threading.Event(), getattr(RolloutIndex, slow)
    monkeypatch.setattr(RolloutIndex, slow, lambda self, *given: go_on.wait(60) and work(self, *given))
    monkeypatch.setattr(api, "EXPORT_SECONDS", 0.3)
    asked = {"run": 0, "format": "sft", "filter": {"mismatch_max": "9"} if slow == "_compare" else {}}
    read = 4 if slow == "_compare" and viewed.runs[0].rollouts.refresh(60.0) else 0
    with pytest.raises(ViewError, match=rf"Of 4 files of rollouts {read} were read and 0 compared within 0\.3 s"):
        api.exported(viewed, asked)
    with pytest.raises(ViewError, match="an export would lack the others"):
        api.exported(viewed, {"run": 0, "format": "dpo", "ids": ["1/process-0/1"]} if slow == "_index" else asked)
    go_on.set()
    monkeypatch.setattr(api, "EXPORT_SECONDS", 60.0)
    assert api.exported(viewed, asked)["rows"] == (0 if slow == "_compare" else 8)  # of 9, one could not be written


def test_a_file_that_cannot_be_read_is_named_and_chosen_rollouts_are_exported_without_it(viewed):
    (file,) = (viewed.runs[0].path / "rollouts/step=000002").glob("*.parquet")
    file.write_bytes(b"torn")
    for body in ({"format": "sft"}, {"format": "dpo", "ids": ["1/process-0/1"]}):
        with pytest.raises(ViewError, match=r"1 of 4 files cannot .* The first is step=000002/process-0\.parquet: "):
            api.exported(viewed, {"run": 0, **body})
    made = api.exported(viewed, {"run": 0, "format": "sft", "ids": ["1/process-0/1"]})
    assert rows(made) == [{"prompt": "2 + 2 =", "completion": " 4"}]
