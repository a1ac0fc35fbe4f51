"""How long a checkpoint stops training. JSON lines, one per save and one per run:

    python -m benchmarks.speed.stall                 # 0.5B in bfloat16 on CUDA: weights, masters and two moments, 7 GB
    python -m benchmarks.speed.stall --device cpu    # a small model, to see that it runs

A save waits for the one before it to be written; that is shown apart, as saves of a real run are minutes apart.
`host_s` is the time inside `_save_checkpoint`, `stall_s` the same until the device has nothing left to copy (both are measured from
an idle device, so that the step before is not counted). `step_s` are the undisturbed steps, `after_save_s` those during which the
checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.utils.data
from transformers import AutoModelForCausalLM, Qwen2Config, TrainerCallback

from posttrain import Sample, SFTConfig, SFTTrainer
from tests import tiny

SHAPES = {
    "cuda": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "cpu": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
ROWS = {"cuda": 32, "cpu": 2}


class RandomRows(torch.utils.data.Dataset):
    """Rows of random tokens with log-normal lengths, prepared already."""

    report = None
    fingerprint = "random rows"

    def __init__(self, count: int, vocabulary: int, mean: int) -> None:
        self.vocabulary = vocabulary
        lengths = np.exp(np.random.default_rng(1).normal(np.log(mean), 0.8, count))
        self.unit_lengths = np.clip(lengths, 16, 2048).astype(int)

    def __len__(self) -> int:
        return len(self.unit_lengths)

    def __getitem__(self, index: int) -> tuple[Sample]:
        length = self.unit_lengths[index]
        ids = np.random.default_rng(index).integers(0, self.vocabulary, length)
        return (Sample(ids, np.ones(length, bool), row=index),)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Wall time of each step, measured at its end, before its save."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}

    def on_step_end(self, args, state, control, **kwargs) -> None:
        synchronise()
        self.ends[state.global_step] = time.perf_counter()


class TimedSFT(SFTTrainer):
    """Takes the time of every save."""

    def _save_checkpoint(self, model, trial) -> None:
        began = time.perf_counter()
        self.checkpoints.writer.wait()  # the save before: here they follow each other within seconds
        self.waited[self.state.global_step] = time.perf_counter() - began
        synchronise()
        began = time.perf_counter()
        super()._save_checkpoint(model, trial)
        returned = time.perf_counter()
        synchronise()
        self.saves.append((self.state.global_step, returned - began, time.perf_counter() - began))
        self.tell_of_the_last_save()

    def tell_of_the_last_save(self) -> None:
        """At once: what a time limit cuts off later is known then."""
        step, host, stall = self.saves[-1]
        line = {"background": self.args.save_in_background, "saved_at": step, "host_s": round(host, 4)}
        line |= {"stall_s": round(stall, 4), "waited_for_the_one_before_s": round(self.waited[step], 4)}
        print(json.dumps(line), flush=True)


def run(device: str, background: bool, folder: Path, steps: int, every: int) -> None:
    torch.manual_seed(0)
    shape = SHAPES[device]
    config = Qwen2Config(
        **shape, tie_word_embeddings=True, max_position_embeddings=4096, eos_token_id=256, pad_token_id=257
    )
    model = AutoModelForCausalLM.from_config(config)
    args = SFTConfig(
        output_dir=str(folder), max_steps=steps, save_steps=every, save_total_limit=1, logging_steps=1000, report_to="none",
        per_device_train_batch_size=ROWS[device], bf16=device == "cuda", use_cpu=device == "cpu", save_in_background=background,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = RandomRows(ROWS[device] * steps, min(8000, shape["vocab_size"] - 300), 400 if device == "cuda" else 64)
    clock = Clock()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trainer = TimedSFT(model.to(dtype), args, train_dataset=rows, processing_class=tiny.tokenizer(), callbacks=[clock])
    trainer.saves, trainer.waited = [], {}
    began = time.perf_counter()
    trainer.train()
    total = time.perf_counter() - began
    newest = max(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    report(trainer, clock, background, size, total)


def report(trainer: TimedSFT, clock: Clock, background: bool, size: int, total: float) -> None:
    stalls = {step: stall for step, _, stall in trainer.saves}
    durations = {step: clock.ends[step] - clock.ends[step - 1] for step in clock.ends if step - 1 in clock.ends}
    quiet = [seconds for step, seconds in durations.items() if step > 2 and step - 1 not in stalls]
    after = [durations[step + 1] - stalls[step] - trainer.waited[step] for step in stalls if step + 1 in durations]
    statistics = trainer.checkpoints.writer.statistics
    summary = {
        "background": background,
        "checkpoint_bytes": size,
        "worst_stall_s": round(max(stalls.values()), 4),
        "step_s": round(median(quiet), 4),
        "after_save_s": [round(seconds, 4) for seconds in after],
        "run_s": round(total, 2),
        "waits": statistics.waits,
        "seconds_waited": round(statistics.seconds_waited, 3),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    print(json.dumps(summary), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="where checkpoints go; default: a folder under /tmp")
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=options.output or "/tmp"))
    for background in (True, False):
        folder = root / ("behind" if background else "at-once")
        run(options.device, background, folder, options.steps, options.every)
        shutil.rmtree(folder)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
