"""GRPO and RLOO on a stream: the run of the same rows in a dataset, exact after a resume, each prompt once over processes."""

from __future__ import annotations

import itertools

import pytest
import torch
from datasets import Dataset, IterableDataset

from posttrain import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from posttrain.rollout.store import read_rollouts
from tests.trainer.test_online import logged, numbered, trainer, weights

METHODS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
ROWS = [{"prompt": f"Say {i}", "answer": i} for i in range(12)]


def stream(rows=ROWS):
    return IterableDataset.from_generator(lambda: iter(rows))  # one shard: `datasets` changes the order of several


def run(folder, data, resume=None, method="grpo", **options):
    cls, config = METHODS[method]
    made = trainer(folder, numbered, cls, config, data=data, **options)
    made.train(resume_from_checkpoint=resume)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_gives_the_run_of_the_same_rows_in_order(tmp_path, method):
    options = {
        "max_steps": 8,
        "shuffle_dataset": False,
        "method": method,
    }  # 16 prompts: one epoch and a part of the next
    whole = run(tmp_path / "rows", Dataset.from_list(ROWS), **options)
    streamed = run(tmp_path / "stream", stream(), **options)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(streamed).values()))
    kept = read_rollouts(tmp_path / "stream")
    assert kept["row"].to_pylist() == [number % 12 for number in range(16) for _ in range(4)]
    assert kept["group"].to_pylist() == [number for number in range(16) for _ in range(4)]
    assert kept["prompt"].to_pylist() == read_rollouts(tmp_path / "rows")["prompt"].to_pylist()


REFILLED = {"drop_zero_variance": True}


@pytest.mark.parametrize(
    ("options", "shuffled"),
    [({}, False), ({"steps_per_generation": 2, "num_iterations": 2}, False), (REFILLED, False), (REFILLED, True)],
    ids=["on policy", "inside a window", "refilled", "refilled, shuffled"],
)
def test_a_resumed_run_on_a_stream_is_the_run(tmp_path, options, shuffled):
    def data():
        return stream().shuffle(seed=3, buffer_size=5) if shuffled else stream()

    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 10, **options}
    quiet = run(tmp_path, data(), **options)
    expected, kept = logged(tmp_path), read_rollouts(tmp_path)["prompt"].to_pylist()
    first_epoch = kept[:48]
    assert len(set(first_epoch)) == len(first_epoch) / 4
    for step in (1, 6):
        again = options | {"save_strategy": "no"}
        resumed = run(tmp_path, data(), resume=str(tmp_path / f"checkpoint-{step}"), **again)
        assert logged(tmp_path) == expected
        assert read_rollouts(tmp_path)["prompt"].to_pylist() == kept
        assert all(torch.equal(a, b) for a, b in zip(weights(quiet).values(), weights(resumed).values()))


def test_an_endless_stream_is_read_as_far_as_it_is_needed(tmp_path):
    read = []

    def endless():
        for number in itertools.count():
            read.append(number)
            yield {"prompt": f"Say {number}", "answer": number}

    run(tmp_path, IterableDataset.from_generator(endless), max_steps=2)
    assert read_rollouts(tmp_path)["row"].to_pylist() == [number for number in range(4) for _ in range(4)]
    assert len(read) <= 1000 + 100  # the head that is checked before, and one batch of rows


def test_rewards_see_the_columns_of_streamed_rows(tmp_path):
    seen = []

    def looks(completions, prompts, answer, **kwargs):
        seen.extend(zip(prompts, answer))
        return [0.0] * len(prompts)

    cls, config = METHODS["grpo"]
    trainer(tmp_path, looks, cls, config, data=stream(), max_steps=1).train()
    assert set(seen) == {("Say 0", 0), ("Say 1", 1)}


def test_a_second_training_begins_at_the_first_prompt(tmp_path):
    made = run(tmp_path, stream(), max_steps=2)
    made.train()
    assert read_rollouts(tmp_path)["row"].to_pylist() == [number for number in range(4) for _ in range(4)]


def test_rows_that_are_dropped_have_no_number(tmp_path):
    rows = [*ROWS[:1], {"prompt": "", "answer": 0}, *ROWS[1:]]
    run(tmp_path, stream(rows), max_steps=1, on_bad_rows="drop")
    assert read_rollouts(tmp_path)["row"].to_pylist() == [0] * 4 + [2] * 4


# ---- refusals ------------------------------------------------------------------------------------------------------------


def test_a_stream_without_max_steps_is_refused_before_it_is_read(tmp_path):
    def never():
        raise AssertionError("it was read")
        yield

    with pytest.raises(ValueError, match="`train_dataset` is a stream, whose length is not known: set `max_steps`"):
        run(tmp_path, IterableDataset.from_generator(never), max_steps=-1)


def test_an_evaluation_set_that_is_a_stream_is_refused(tmp_path):
    with pytest.raises(ValueError, match="The dataset eval is a stream"):
        run(tmp_path, stream(), eval_dataset=stream())
