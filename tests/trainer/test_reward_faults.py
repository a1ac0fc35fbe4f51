"""One run in which rewards raise, hang, return NaN and kill their process, and a prompt is longer than the context."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.store import read_rollouts
from tests import tiny

pytestmark = pytest.mark.slow  # whole runs of several processes, or with every fault

ACTS = {"raise": 50, "hang": 20, "nan": 10, "exit": 5, "segfault": 5}
"""What a reward does -> how many completions of 1,000 it does it to, as often as their checksum says."""
KINDS = {"raise": "error", "hang": "timeout", "nan": "invalid", "exit": "crash", "segfault": "crash"}
GROUP, PROMPTS, STEPS = 8, 32, 3


def act_of(ids: list[int]) -> str | None:
    place = sum((index + 1) * 7919 * token for index, token in enumerate(ids)) % 1000
    for act, share in ACTS.items():
        if place < share:
            return act
        place -= share
    return None


def score_of(ids: list[int]) -> float:
    return float(sum(ids) % 17)


def unreliable(completion_ids, **kwargs):
    import ctypes
    import os
    import time

    def raised():
        raise RuntimeError("as it happens")

    acts = {
        "raise": raised, "hang": lambda: time.sleep(60), "nan": lambda: float("nan"), "exit": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
    }  # fmt: skip
    return [acts[act]() if (act := act_of(ids)) else score_of(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    prompts = [f"Say {i}" for i in range(PROMPTS * STEPS)]
    prompts[5] = "x" * 600  # the context has 512 tokens
    made = GRPOTrainer(
        tiny.causal_lm(),
        unreliable,
        GRPOConfig(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
            max_completion_length=6, report_to="none", logging_steps=1, use_cpu=True, save_strategy="no", disable_tqdm=True,
            dataset_cache_dir=str(folder / "cache"), shuffle_dataset=False, reward_workers=4, reward_timeout=1.0,
        ),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    made.train()
    made.rewards.close()
    return made, read_rollouts(folder).to_pylist()


def test_the_run_completes_and_faults_are_as_frequent_as_meant(run):
    made, kept = run
    assert made.state.global_step == STEPS
    assert len(kept) == STEPS * PROMPTS * GROUP
    happened = Counter(act_of(row["completion_ids"]) for row in kept if not row["error"])
    written = sum(happened.values())
    for act in ("raise", "hang", "nan"):
        assert happened[act] / written == pytest.approx(ACTS[act] / 1000, rel=0.7), act
    assert happened["exit"]
    assert happened["segfault"]


def test_only_the_guilty_samples_are_masked(run):
    _, kept = run
    for row in kept:
        act = None if row["error"] else act_of(row["completion_ids"])
        assert [failure["kind"] for failure in row["failures"]] == ([KINDS[act]] if act else [])
        assert row["masked"] == (act is not None or row["error"] is not None)
        if not row["masked"]:
            assert row["reward"] == score_of(row["completion_ids"])


def test_advantages_are_those_of_the_valid_subset(run):
    _, kept = run
    compared = 0
    for group in {row["group"] for row in kept}:
        valid = [row for row in kept if row["group"] == group and not row["masked"]]
        rewards = [score_of(row["completion_ids"]) for row in valid]
        for row, reward in zip(valid, rewards):
            expected = 0.0
            if len(set(rewards)) > 1:
                expected = (reward - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            assert row["advantage"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        compared += 0 < len(valid) < GROUP
    assert compared > 10  # groups that lost a sample
    assert {row["advantage"] for row in kept if row["masked"]} == {0.0}


def test_a_prompt_longer_than_the_context_is_rejected_for_its_row_alone(run):
    _, kept = run
    rejected = [row for row in kept if row["error"]]
    assert [row["row"] for row in rejected] == [5] * GROUP
    assert "leaves no room in a context of 512" in rejected[0]["error"]


def test_counts_are_reported(run):
    made, kept = run
    happened = Counter(failure["kind"] for row in kept for failure in row["failures"])
    last = [entry for entry in made.state.log_history if "loss" in entry][-1]
    assert {name: last[f"reward_failures/{name}"] for name in happened} == happened
    masked = [sum(row["masked"] for row in kept if row["step"] == step) for step in range(1, STEPS + 1)]
    shares = [entry["rollouts/masked"] for entry in made.state.log_history if "loss" in entry]
    assert shares == pytest.approx([number / (PROMPTS * GROUP) for number in masked])
