"""Runs with judges: GRPO on a judge that fails for some prompts, and win rates on the engines of online and offline trainers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from datasets import Dataset
from transformers import GenerationConfig

from posttrain import (
    BaseBinaryJudge,
    BasePairwiseJudge,
    ChatJudge,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardModelJudge,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    WinRateCallback,
)
from posttrain.rewards.judging import Verdict
from posttrain.rollout.schedule import Schedule
from posttrain.trainer.online.win_rate import sampling_of, win_rates
from tests import tiny
from tests.rewards.chat_server import DROP, HANG, ChatServer, longer, said

QUICK = {
    "max_steps": 2, "per_device_train_batch_size": 16, "report_to": "none", "logging_steps": 1, "use_cpu": True,
    "save_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
}  # fmt: skip


def rows(count=16):
    return Dataset.from_dict({"prompt": [f"Say {i}." for i in range(count)]})


def grpo(folder, judge, **options):
    given = {"num_generations": 2, "max_completion_length": 6, "rollout_engine": "transformers", **QUICK, **options}
    named = {name: given.pop(name) for name in ("eval_dataset", "ref_model") if name in given}
    args = GRPOConfig(str(folder), dataset_cache_dir=str(Path(folder) / "cache"), **given)
    return GRPOTrainer(tiny.causal_lm(), judge, args, rows(), processing_class=tiny.tokenizer(), **named)


def logged(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


class More(BasePairwiseJudge):
    """Prefers the text with more letters e; keeps what it was shown."""

    def __init__(self):
        self.seen = []

    def judge(self, prompts, completions, shuffle_order=True):
        self.seen.append((prompts, completions))
        counts = [[text.count("e") for text in pair] for pair in completions]
        return [0.5 if a == b else int(b > a) for a, b in counts]


# ---- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [(500, {"error": "tired"}), DROP, HANG, said("hm"), "<html>"], ids=["500", "drop", "hang", "lie", "html"]
)
def test_a_judge_that_fails_for_some_prompts_masks_them_and_the_run_continues(tmp_path, fault):
    def behave(asked):
        return fault if asked.prompt in ("Say 3.", "Say 7.") else longer(asked)

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m", timeout=1.0 if fault is HANG else 60.0, retries=0, max_requests=100)
        made = grpo(tmp_path, judge, max_steps=2, per_device_train_batch_size=32)  # every prompt in each generation
        made.train()
    steps = [entry for entry in logged(tmp_path) if "rollouts/masked" in entry]
    assert len(steps) == 2
    kind = {DROP: "error", HANG: "timeout"}.get(fault if fault in (DROP, HANG) else None) or (
        "error" if isinstance(fault, tuple) else "invalid"
    )
    asked_about = {asked.prompt for asked in server.asked}
    faulty = 2 * len(asked_about & {"Say 3.", "Say 7."})
    assert [entry["rollouts/masked"] for entry in steps] == pytest.approx([faulty / 32] * 2)
    assert [entry["rewards/ChatJudge/failed"] for entry in steps] == pytest.approx([faulty / 32] * 2)
    assert [entry[f"reward_failures/{kind}"] for entry in steps] == [faulty, 2 * faulty]
    assert all(entry["reward"] == pytest.approx(0.5) for entry in steps)  # winners and losers, or ties
    assert all(math.isfinite(entry["loss"]) for entry in steps)
