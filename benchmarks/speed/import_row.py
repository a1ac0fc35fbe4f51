"""How long imports take, each in a fresh process, best of several rounds; and the way from nothing to the first step."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.speed.runner import TREE, Order, environment

ROUNDS = 3
NEEDED = """
import torch, transformers, datasets, accelerate, peft, safetensors
from transformers import Trainer, TrainingArguments, AutoModelForCausalLM, AutoTokenizer
"""
FIRST_STEP = """
import tempfile
from LIBRARY import SFTConfig, SFTTrainer
from datasets import Dataset
from benchmarks.speed import materials
from benchmarks.speed.rows import ROWS, Steps, tiny
row = tiny(ROWS[0])
with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(output_dir=folder, max_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False,
                     gradient_checkpointing=False, per_device_train_batch_size=8, disable_tqdm=True)
    trainer = SFTTrainer(model=materials.build_model(row, "cpu", __import__("torch").float32), args=args,
                         train_dataset=materials.dataset(row, 1, False), processing_class=materials.tokenizer(row))
    trainer.train()
"""
SCRIPTS = {
    "python": ("posttrain", "pass"),
    "import torch, transformers": ("posttrain", "import torch, transformers"),
    "what both need (torch, Trainer, datasets, peft, ...)": ("posttrain", NEEDED),
    "import posttrain": ("posttrain", "import posttrain"),
    "from posttrain import SFTTrainer, SFTConfig": ("posttrain", "from posttrain import SFTTrainer, SFTConfig"),
    "from trl import SFTTrainer, SFTConfig": ("trl", "from trl import SFTTrainer, SFTConfig"),
    "posttrain: import to first step": ("posttrain", FIRST_STEP.replace("LIBRARY", "posttrain")),
    "TRL: import to first step": ("trl", FIRST_STEP.replace("LIBRARY", "trl")),
}


def run(order: Order) -> list[dict[str, Any]]:
    """Round by round, so that another program on the machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    failed: dict[str, str] = {}
    for _ in range(ROUNDS):
        for name, (library, script) in SCRIPTS.items():
            python = order.trl_python if library == "trl" else sys.executable
            variables = environment(order, library) | {"HF_HUB_OFFLINE": "1"}
            start = time.perf_counter()
            done = subprocess.run([python, "-c", script], env=variables, cwd=TREE, capture_output=True, text=True)
            seconds[name].append(time.perf_counter() - start)
            if done.returncode:
                failed[name] = done.stderr.strip().splitlines()[-1]
    return [
        {"row": "import", "setting": name, "seconds": min(taken), "all_seconds": taken}
        | ({"error": failed[name]} if name in failed else {})
        for name, taken in seconds.items()
    ]


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| what | seconds, process start included |", "|---|---:|"]
    return "\n".join(
        lines + [f"| {one['setting']} | {one.get('error') or format(one['seconds'], '.2f')} |" for one in results]
    )
