"""The whole step of PPO, of Online DPO and of GKD, generation to update, and of SFT, DPO and GRPO on images, posttrain against TRL.

    python -m benchmarks.speed.whole_step METHOD [--settings ours tuned default matched] [--trl-path FOLDER] [--tiny]

METHOD is one of ppo, online_dpo, gkd, sft_images, dpo_images, grpo_images.

A step is 256 completions of 512 tokens after prompts of 256, from a 0.5B with random weights (PPO: 32 prompts with eight
completions each, for TRL as rows that are there eight times; a reward model and a value model of the same size, four epochs over
each generation; Online DPO: 128 pairs, a reward function). Each setting runs in a process of its own. `ours head` is PPO with its
default critic, a head on the policy.

PPO needs TRL 1.10.0, the last that has it. It keeps the logits of a generation in float32 and copies them once, 159 GB for 256
completions, so that a smaller step is measured; TRL's Online DPO generates micro-batch by micro-batch, of which fewer are measured.
Where a setting runs out of memory, the next smaller one is tried. Seconds are reported for 256 completions. `gkd_step.py` says what
a step of GKD is, `image_step.py` what those on images are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.speed import gkd_step, image_step, judge, materials
from benchmarks.speed.measure import peak_memory, reset_peak_memory
from benchmarks.speed.rows import QWEN_05B, Lengths, Row, tiny

COMPLETIONS = {"ppo": 256, "online_dpo": 256, "gkd": gkd_step.ROWS, **image_step.ROWS}
EPOCHS, GROUP = 4, 8
WARM_UP = {"ppo": 1, "online_dpo": 1, "gkd": 2, **dict.fromkeys(image_step.ROWS, 2)}
"""Steps before those that are timed. (On images only ours compiles; TRL, whose steps take a minute there, warms up for one.)"""
TINY_SCALES = {"ppo": 16, "online_dpo": 16, "gkd": 4, **dict.fromkeys(image_step.ROWS, 1)}
NAMES = {"ppo": "PPO", "online_dpo": "OnlineDPO"}
SETTINGS: dict[str, dict[str, list[dict[str, Any]]]] = {
    "ppo": {
        "ours": [{"samples": 256, "micro": 256}, {"samples": 256, "micro": 64}],
        "ours head": [{"samples": 256, "micro": 256}, {"samples": 256, "micro": 64}],
        "tuned": [{"samples": 128, "micro": 16}, {"samples": 64, "micro": 16}],
        "default": [{"samples": 32, "micro": 8}],
    },
    "online_dpo": {
        "ours": [{"samples": 256, "micro": 256}, {"samples": 256, "micro": 64}],
        "tuned": [{"samples": 128, "micro": 64}, {"samples": 128, "micro": 32}],
        "default": [{"samples": 16, "micro": 16}],
    },
    "gkd": gkd_step.SETTINGS,
    **image_step.SETTINGS,
}
"""Completions of a step and of a micro-batch, to be tried in turn until one fits."""


def row_of(method: str, is_tiny: bool) -> Row:
    if method == "gkd":
        return gkd_step.row_of(is_tiny)
    row = Row(
        method,
        "grpo",
        QWEN_05B,
        COMPLETIONS[method],
        Lengths(0, 0, 512, 512, prompt=256, seed=4),
        1e-6,
        (),
        group=1,
        writes=True,
    )
    return replace(tiny(row), rows=8, group=1) if is_tiny else row


class GenerationMarks(TrainerCallback):
    """When each generation's last update ended (by the clock, and in time of the processor); the device has then finished
    everything before."""

    def __init__(self, updates: int, device: str) -> None:
        self.updates, self.device, self.marks = updates, device, []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        reset_peak_memory(self.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.marks.append((time.perf_counter(), time.process_time()))


def shared_options(row: Row, method: str, setting: str, sizes: dict[str, int], output: str) -> dict[str, Any]:
    """Of every config. TRL's Online DPO counts prompts, two completions each; so do we."""
    each = 2 if method == "online_dpo" else 1
    made = {
        "output_dir": output,
        "learning_rate": row.learning_rate,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "temperature": 1.0,
        "per_device_train_batch_size": sizes["micro"] // each,
        "gradient_accumulation_steps": sizes["samples"] // sizes["micro"],
        "use_cpu": not torch.cuda.is_available(),
    }
    if setting.startswith("tuned"):
        made |= {"bf16": False, "optim": "adamw_torch_fused", "gradient_checkpointing": False}
    return made


def options_of(row: Row, method: str, setting: str, sizes: dict[str, int], steps: int, output: str) -> dict[str, Any]:
    """Of the config of PPO or Online DPO."""
    is_ours, made = setting.startswith("ours"), shared_options(row, method, setting, sizes, output)
    if method == "ppo":
        made |= {"response_length": row.lengths.high, "total_episodes": steps * sizes["samples"]}
        made |= {"num_generations": min(GROUP, sizes["samples"])} if is_ours else {"num_sample_generations": 0}
        made |= {"local_rollout_forward_batch_size": min(sizes["samples"], 128)} if setting == "tuned" else {}
    else:
        made |= {"max_new_tokens": row.lengths.high, "max_length": row.lengths.prompt + row.lengths.high + 16}
        made |= {"max_steps": steps}
        made |= {"use_liger_kernel": True} if setting == "tuned" and torch.cuda.is_available() else {}
    return made


def trainer_of(row: Row, method: str, setting: str, sizes: dict[str, int], steps: int, output: str, device: str) -> Any:
    is_ours = setting.startswith("ours")
    dtype = torch.float32 if setting == "default" or device == "cpu" else torch.bfloat16
    tokenizer = materials.tokenizer(row)
    tokenizer.backend_tokenizer.decoder = (
        None  # words with spaces between them: what a reward model is shown is as long again
    )
    shared = {
        "model": materials.build_model(row, device, dtype),
        "processing_class": tokenizer,
        "callbacks": [GenerationMarks(EPOCHS if is_ours and method == "ppo" else 1, device)],
    }
    if method == "gkd":
        options = shared_options(row, method, setting, sizes, output)
        return gkd_step.trainer_of(row, setting, sizes, options, steps, dtype, **shared)
    title, each = NAMES[method], 2 if method == "online_dpo" else 1
    library = importlib.import_module("posttrain" if is_ours else f"trl.experimental.{method}")
    each = min(GROUP, sizes["samples"]) if method == "ppo" else each
    groups = materials.groups(replace(row, rows=sizes["samples"] // each), steps)
    shared["args"] = getattr(library, f"{title}Config")(**options_of(row, method, setting, sizes, steps, output))
    if method == "online_dpo":
        rows = Dataset.from_list([{"prompt": materials.text_of(prompt)} for prompt, _ in groups])
        return getattr(library, f"{title}Trainer")(reward_funcs=judge.shortness, train_dataset=rows, **shared)
    judged = replace(row, method="reward")
    rows = Dataset.from_list([{"input_ids": prompt} for prompt, _ in groups for _ in range(1 if is_ours else each)])
    critic = None if setting == "ours head" else materials.build_model(judged, device, dtype)
    more = {"reward_processing_classes": tokenizer} if is_ours else {}
    return library.PPOTrainer(
        ref_model=None,
        reward_model=materials.build_model(judged, device, dtype),
        value_model=critic,
        train_dataset=rows,
        **shared,
        **more,
    )


def measured(
    method: str, family: str, setting: str, sizes: dict[str, int], timed: int, is_tiny: bool
) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row = row_of(method, is_tiny)
    warm_up = 1 if method in image_step.ROWS and not setting.startswith("ours") else WARM_UP[method]
    with tempfile.TemporaryDirectory() as output:
        if method in image_step.ROWS:
            options = shared_options(row, method, setting, sizes, output)
            dtype = torch.float32 if setting == "default" or device == "cpu" else torch.bfloat16
            given = (method, family, setting, sizes, options, timed + warm_up, dtype, is_tiny)
            trainer = image_step.trainer_of(*given, [GenerationMarks(1, device)])
        else:
            trainer = trainer_of(row, method, setting, sizes, timed + warm_up, output, device)
        marks = next(one for one in trainer.callback_handler.callbacks if isinstance(one, GenerationMarks))
        written = image_step.watch_writing(trainer, setting) if method == "grpo_images" else []
        before = host_gib()
        trainer.train()
        grown = host_gib() - before
    ends, whole = marks.marks[warm_up - 1 :], COMPLETIONS[method]
    seconds, on_processor = ([after - before for before, after in pairwise(clock)] for clock in zip(*ends))
    return {
        "method": method,
        "setting": setting,
        **({"family": family} if method in image_step.ROWS else {}),
        **sizes,
        "step_seconds": seconds,
        "processor_seconds": on_processor,
        f"seconds_for_{whole}": sum(seconds) / len(seconds) * whole / sizes["samples"],
        **({"update_seconds": updates(seconds, on_processor, written)} if written else {}),
        "peak_gib": peak_memory(device) / 2**30,
        "host_gib_growth": grown,
        **(gkd_step.figures(row, sizes["samples"], trainer.state.log_history) if method == "gkd" else {}),
        **(image_step.figures(trainer.state.log_history) if method in image_step.ROWS else {}),
        "last_logs": trainer.state.log_history[-2:],
    }


def updates(
    clock: list[float], processor: list[float], written: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What is left of each timed step without the writing of its completions."""
    steps = zip(clock, processor, written[-len(clock) :])
    return [(whole - writing[0], used - writing[1]) for whole, used, writing in steps]


def host_gib() -> float:
    """The most that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def sizes_of(method: str, setting: str, is_tiny: bool, out: Path) -> list[dict[str, Any]]:
    """To be tried in turn; `matched` has those of TRL tuned, as last measured."""
    if setting != "matched":
        scale = TINY_SCALES[method] if is_tiny else 1
        return [{name: max(size // scale, 2) for name, size in one.items()} for one in SETTINGS[method][setting]]
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines() if out.exists() else [])
    tuned = [one for one in lines if one["method"] == method and one["setting"] == "tuned"]
    if not tuned:
        raise SystemExit(
            f"`matched` takes its sizes from TRL tuned, and {out} has no such line: measure `tuned` first."
        )
    return [{name: tuned[-1][name] for name in ("samples", "micro")}]


def one_setting(method: str, family: str, setting: str, timed: int, is_tiny: bool, out: Path) -> None:
    """Sizes in turn, each in a fresh process (what an out-of-memory error leaves behind is gone with it)."""
    for place, sizes in enumerate(sizes_of(method, setting, is_tiny, out)):
        command = [sys.executable, "-m", "benchmarks.speed.whole_step", method, "--child", setting, json.dumps(sizes)]
        command += ["--timed", str(timed), "--out", str(out), "--family", family, *(["--tiny"] if is_tiny else [])]
        log = out.with_suffix(f".{method}-{family}-{setting.replace(' ', '-')}-{place}.log")
        with log.open("w", encoding="utf-8") as written:
            code = subprocess.run(command, stdout=written, stderr=written, check=False).returncode
        if code == 0:
            return
        text = log.read_text(encoding="utf-8")
        why = "out of memory" if "OutOfMemoryError" in text else text.strip().splitlines()[-1][:300]
        print(json.dumps({"method": method, "setting": setting, **sizes, "error": why}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=SETTINGS)
    parser.add_argument("--settings", nargs="+", default=["ours", "tuned", "default"])
    parser.add_argument(
        "--family", choices=image_step.SHAPES, default=image_step.FAMILY, help="whose shape, of rows with images"
    )
    parser.add_argument("--trl-path", type=Path)
    parser.add_argument("--timed", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/speed/whole_step.jsonl"))
    parser.add_argument("--child", nargs=2, metavar=("SETTING", "SIZES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    if asked.child:
        setting, sizes = asked.child
        found = measured(asked.method, asked.family, setting, json.loads(sizes), asked.timed, asked.tiny)
        with asked.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
        return
    if asked.trl_path:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(asked.trl_path.resolve()), os.environ.get("PYTHONPATH", "")])
    for setting in asked.settings:
        timed = asked.timed if setting.startswith(("ours", "matched")) else 1
        one_setting(asked.method, asked.family, setting, timed, asked.tiny, asked.out)
    if asked.out.exists():
        print(asked.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
