"""What GRPO needs besides rows: completions that both libraries are given, a reward, a reference, and clocks of the phases."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed import judge, materials
from benchmarks.speed.rows import Row

GENERATORS = ("generate", "generate_batch")
"""Methods of a transformers model that write completions."""
LEAST_WRITTEN = 0.9
OUR_PHASES = {"generation": "rollouts/generate_s", "rewards": "rollouts/reward_wait_s", "scoring": "rollouts/score_s"}


def made_up_logps(ids: list[int], row: Row) -> list[float]:
    """As if the model had drawn them: a model that knows nothing thinks 1/V of each."""
    return [-float(np.log(row.shape.vocabulary))] * len(ids)


def rollout_function(row: Row, steps: int) -> Callable[[list[str], Any], dict[str, list[Any]]]:
    """For `rollout_func` of either library: stored completions, a prompt's first ones the first time it is asked for."""
    stored = {}
    for prompt, completions in materials.groups(row, steps):
        stored[materials.text_of(prompt)] = (prompt, completions, [made_up_logps(ids, row) for ids in completions])

    def written(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        seen: Counter[str] = Counter()
        answer: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for text in prompts:
            prompt, completions, logps = stored[text]
            answer["prompt_ids"].append(prompt)
            answer["completion_ids"].append(completions[seen[text]])
            answer["logprobs"].append(logps[seen[text]])
            seen[text] += 1
        return answer

    return written


def trainer_arguments(row: Row, steps: int, output: str) -> dict[str, Any]:
    """Arguments of GRPOTrainer in both libraries."""
    os.environ[judge.LOG_VARIABLE] = str(reward_log(output))
    written = {} if row.writes else {"rollout_func": rollout_function(row, steps)}
    return {"reward_funcs": judge.shortness, **written}


def lend_a_path(model: Any, output: str) -> None:
    """TRL loads the reference of GRPO from the policy's path; weights made here have none until they are saved."""
    folder = str(Path(output) / "reference")
    model.save_pretrained(folder)
    model.config._name_or_path = folder


# ---- what the phases took -----------------------------------------------------------------------------------------------


def reward_log(output: str) -> Path:
    return Path(output) / "rewards.log"


class GenerationClock:
    """Wraps the methods of a model that write completions; the device is waited for on both sides of a call."""

    def __init__(self, model: Any, device: str) -> None:
        self.seconds: list[float] = []
        self.device = device
        for name in GENERATORS:
            setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self._wait()
            start = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                self._wait()
                self.seconds.append(time.perf_counter() - start)

        return call

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def phases(
    logs: list[dict[str, float]], clock: GenerationClock | None, output: str, steps: int, timed: slice, step: float
) -> dict[str, float]:
    """Seconds of each phase of a timed step. posttrain logs them; for TRL they are taken from outside."""
    if clock is None:
        found = {name: mean([entry[key] for entry in logs[timed]]) for name, key in OUR_PHASES.items()}
    elif len(clock.seconds) == steps:
        judged = [float(line.split()[1]) for line in reward_log(output).read_text(encoding="utf-8").splitlines()]
        found = {"generation": mean(clock.seconds[timed]), "rewards": sum(judged) / steps}
    else:
        return {}
    return {**found, "update": step - sum(found.values())}


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def tokens_written(logs: list[dict[str, float]], row: Row) -> list[int]:
    """Of each step. A random model says the end of text once in V tokens: some completions are shorter than they may be."""
    written = [round(entry["completions/mean_length"] * row.rows) for entry in logs]
    wanted = row.rows * row.lengths.high
    if min(written) < LEAST_WRITTEN * wanted:
        raise RuntimeError(f"{min(written)} of {wanted} tokens were written in a step: that is another workload")
    return written


def rewards_given(output: str, steps: int) -> float:
    """Of a step."""
    lines = reward_log(output).read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[0]) for line in lines) / steps
