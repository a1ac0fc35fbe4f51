"""What each process of a run does that writes answers beside its training: a win rate, and the scores of a task."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import GenerationConfig

from posttrain import BasePairwiseJudge, EvalSpec, TaskEvals, WinRateCallback
from tests.trainer import fsdp_cells, fsdp_on_cpu

METHODS = ("sft", "dpo", "grpo")


class Longer(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [0.5 if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]


def main(home: Path) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fsdp_on_cpu.allow()
    home.mkdir(exist_ok=True)
    options = {"eval_strategy": "steps", "max_steps": 2, "save_strategy": "no", "load_best_model_at_end": False}
    for method in METHODS:
        made = fsdp_cells.trainer(fsdp_cells.CELLS[method], home / method, **options)
        made.add_callback(WinRateCallback(Longer(), made, GenerationConfig(max_new_tokens=6), num_prompts=3))
        spec = EvalSpec([{"prompt": "Say it"}, {"prompt": "Say"}], fsdp_cells.checksum, "said", max_new_tokens=4)
        TaskEvals(made, [spec])
        made.train()
