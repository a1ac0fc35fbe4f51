"""Does a model learn to see? Two proofs that need no pretrained vision-language model, each with its controls.

    python -m benchmarks.real_runs.images MODEL [grafted] [scenes] [--steps N] [--seed S] [--output FOLDER]

Each run prints a line of JSON with its figures, those of its controls, and whether all hold. bfloat16 on a GPU, float32 elsewhere.
Answers are those of transformers' `generate`, greedy, and right if they are the wanted word and nothing else.

grafted: MODEL (SmolLM2-135M-Instruct) is the language model of a LLaVA with a random tower, 64 wide, of 16 image tokens; a special
token that it never uses is the placeholder. It names handwritten digits in words. Stage 1: the language model is frozen, tower
and projector learn at 1e-3. Stage 2, half as many steps: adapters on language model, projector and tower. Held-out accuracy is at
least 0.97 after both; with the images of other rows, and with black ones, at most 0.15. The loss on plain text (pages of docs/)
changes by less than 0.01 in stage 1.

scenes: a LLaVA from scratch (6 layers of 256, a tower of 128, 9 image tokens; MODEL is not read) answers questions of four kinds
about drawn scenes; descriptions are trained beside them, and teach the words. SFT: at least 0.9 on scenes with combinations of
colour and shape that it was never shown; with the images of other rows of the same kind, and with white ones, at most 0.5, where
chance is a third. GRPO on counting starts where the SFT counted right in half of the held-out scenes, and is paid 1 for the right
number and 0.5 for one beside it. Counting becomes right more often by at least 0.1. Control: images shuffled in the dataset.
Whoever does not look earns most, 0.5, by saying two or three; the mean of the control's last steps is at most 0.05 above that.
(With one and four twice as frequent, which makes all blind answers equal, whoever can tell few from many says one or four, and
stays there: reward 0.85, right in 0.45, where it began at 0.67. A learning rate of 1e-3 unlearnt counting on the H200.)
From scratch, because a text model this narrow has nothing to unlearn, answers in one token and runs thousands of steps in the
time in which the grafted one runs hundreds; and each image token shows one cell of the grid: what is left to learn is to look.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

from benchmarks.real_runs import handwritten_digits, scenes
from benchmarks.real_runs.small_llava import Row, are_right, from_scratch, grafted, loss_on_text, share, tower
from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

DOCS = Path(__file__).parents[2] / "docs"
TEXT_PAGES = ("grpo.md", "sft.md", "vision.md")
TEXT_LETTERS = 24_000
TOWER = tower(width=64, layers=2, size=handwritten_digits.SIDE, patch=7)
BATCH = 64

TEXT_WIDTH, TEXT_LAYERS, TOWER_WIDTH = 256, 6, 128
SCENES, HELD_OUT_SCENES, COUNTED = 30_000, 1_200, 8_000
SCENE_BATCH, GROUPS, GROUP = 128, 32, 8
GRPO_SHARE, CONTROL_SHARE = 1 / 10, 1 / 40  # of the steps of the SFT
LOOKS, LOOKED_AT = 600, 150  # how often the SFT is asked to count, and in how many scenes: it learns that at once
BLIND = 1 / 2
GRPO_RATE = 1e-4
WINDOW = 10  # steps at the end of a run whose rewards are averaged


# ---- training --------------------------------------------------------------------------------------------------------------


def shared(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    options = {"output_dir": str(folder), "dataset_cache_dir": str(folder / "cache"), "max_steps": steps, "seed": seed}
    options |= {"save_strategy": "no", "report_to": "none", "verbosity": "quiet"}
    return options | {"lr_scheduler_type": "cosine", "warmup_steps": max(min(steps // 10, 100), 1)}


def tuned(model: str, rows: Sequence[Row], folder: Path, options: dict[str, Any], **named: Any) -> SFTTrainer:
    data = [{name: one[name] for name in ("images", "prompt", "completion")} for one in rows]
    workers = 8 if torch.cuda.is_available() else 0
    args = SFTConfig(dataloader_num_workers=workers, **options)
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, **named)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer


def shuffled(rows: Sequence[Row], seed: int = 1) -> list[Row]:
    """Every row has the images of another of its kind, or by chance its own."""
    draw, made = random.Random(seed), list(rows)
    for kind in dict.fromkeys(one.get("kind") for one in rows):
        places = [index for index, one in enumerate(rows) if one.get("kind") == kind]
        for place, other in zip(places, draw.sample(places, len(places))):
            made[place] = rows[place] | {"images": rows[other]["images"]}
    return made


def blank(rows: Sequence[Row], colour: str) -> list[Row]:
    return [one | {"images": [Image.new("RGB", picture.size, colour) for picture in one["images"]]} for one in rows]


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- a language model that is given eyes -----------------------------------------------------------------------------------


def plain_text() -> str:
    return "\n".join((DOCS / page).read_text()[:TEXT_LETTERS] for page in TEXT_PAGES)


def digits(model: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    trained, held_out = handwritten_digits.rows(seed)
    start = grafted(model, TOWER, folder / "start", seed)
    before = AutoModelForImageTextToText.from_pretrained(start)
    words = {name: value.detach().clone() for name, value in before.model.language_model.named_parameters()}
    found: dict[str, Any] = {}

    def figures(trainer: SFTTrainer) -> dict[str, float]:
        reader = trainer.processing_class
        asked = {"held_out": held_out, "shuffled": shuffled(held_out), "black": blank(held_out, "black")}
        measured = {name: share(are_right(trainer.model, reader, rows)) for name, rows in asked.items()}
        return measured | {"text_loss": loss_on_text(trainer.model, reader.tokenizer, plain_text())}

    options = {
        "per_device_train_batch_size": BATCH,
        "image_augmentation": handwritten_digits.moved,
        "logging_steps": 10,
    }
    first = options | shared(folder / "first", steps, seed) | {"learning_rate": 1e-3, "freeze_language_model": True}
    trainer = tuned(start, trained, folder / "seeing", first)
    found["stage_1"] = figures(trainer)
    kept = dict(trainer.model.model.language_model.named_parameters())
    moves = max(
        float((kept[name].cpu().float() - value.to(kept[name].dtype).float()).abs().max())
        for name, value in words.items()
    )
    text_loss = loss_on_text(
        before.to(trainer.model.device, trainer.model.dtype), trainer.processing_class.tokenizer, plain_text()
    )
    del before, trainer, kept

    second = (
        options | shared(folder / "second", max(steps // 2, 1), seed) | {"learning_rate": 5e-4, "lora_vision": True}
    )
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    trainer = tuned(str(folder / "seeing"), trained, folder / "both", second, peft_config=adapters)
    found["stage_2"] = both = figures(trainer)
    change = abs(found["stage_1"]["text_loss"] - text_loss)
    sees = both["held_out"] >= 0.97 and max(both["shuffled"], both["black"]) <= 0.15
    text = {
        "text_loss_before": text_loss,
        "text_loss_change_in_stage_1": change,
        "largest_move_of_text_in_stage_1": moves,
    }
    return found | text | {"loss": logged(trainer, "loss")[-3:], "holds": sees and change < 0.01}


# ---- scenes ----------------------------------------------------------------------------------------------------------------


class HalfRight(TrainerCallback):
    """Keeps the model of the first look at which it counts right in half of some held-out scenes."""

    def __init__(self, rows: Sequence[Row], folder: Path, every: int) -> None:
        self.rows, self.folder, self.every = rows, folder, every
        self.reader: Any = None
        self.seen: list[float] = []
        self.step: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.step is not None or state.global_step % self.every:
            return
        self.seen.append(share(are_right(model, self.reader, self.rows)))
        if self.seen[-1] >= 0.5:
            self.step = state.global_step
            model.save_pretrained(self.folder)
            self.reader.save_pretrained(self.folder)


def near_number(
    completions: list[Any], number: list[int], images: list[list[Image.Image]], **columns: Any
) -> list[float]:
    """1 for the right number, 0.5 for one beside it, 0 for others and for what is no number."""
    assert all(picture.size == (scenes.SIDE, scenes.SIDE) for (picture,) in images)
    said = [
        scenes.NUMBERS.index(text) + 1 if (text := one[0]["content"].strip()) in scenes.NUMBERS else 9
        for one in completions
    ]
    return [{0: 1.0, 1: 0.5}.get(abs(a - b), 0.0) for a, b in zip(said, number)]


def rewarded(model: str, rows: Sequence[Row], folder: Path, steps: int, seed: int) -> GRPOTrainer:
    options = {"per_device_train_batch_size": GROUPS * GROUP, "num_generations": GROUP, "max_completion_length": 3}
    options |= {"learning_rate": GRPO_RATE, "beta": 0.0, "temperature": 1.0, "reward_workers": 0, "logging_steps": 1}
    options |= {"mask_truncated_completions": False}
    data = [{name: one[name] for name in ("images", "prompt", "number")} for one in rows]
    args = GRPOConfig(**shared(folder, steps, seed) | options)
    trainer = GRPOTrainer(model=model, reward_funcs=near_number, args=args, train_dataset=data)
    trainer.train()
    return trainer


def by_kind(model: Any, reader: Any, rows: Sequence[Row]) -> dict[str, float]:
    right = are_right(model, reader, rows)
    kinds = {
        kind: [a for a, one in zip(right, rows) if one["kind"] == kind]
        for kind in dict.fromkeys(one["kind"] for one in rows)
    }
    return {"all": share(right)} | {kind: share(some) for kind, some in kinds.items()}


def counting(start: str, folder: Path, steps: int, seed: int, asked: Sequence[Row]) -> dict[str, Any]:
    """GRPO with the images of the rows, and with shuffled ones."""
    draw = random.Random(seed + 2)
    rows = [scenes.count(draw, scenes.TRAINING) for _ in range(COUNTED)]
    found: dict[str, Any] = {}
    for kind, data, length in (("own", rows, GRPO_SHARE), ("shuffled", shuffled(rows), CONTROL_SHARE)):
        trainer = rewarded(start, data, folder / kind, max(round(steps * length), 1), seed)
        curve, reader = np.asarray(logged(trainer, "reward")), trainer.processing_class
        found[kind] = {"first_reward": float(curve[:WINDOW].mean()), "last_reward": float(curve[-WINDOW:].mean())}
        found[kind] |= {"steps": len(curve), "right": share(are_right(trainer.model, reader, asked))}
        del trainer
    return found


def drawn_scenes(model: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    held_out = scenes.rows(HELD_OUT_SCENES, scenes.HELD_OUT_SCENES, seed + 1)
    to_count = [one for one in held_out if one["kind"] == "count"]
    vision = tower(TOWER_WIDTH, layers=2, size=scenes.SIDE, patch=scenes.CELL)
    start = from_scratch(scenes.texts(), TEXT_WIDTH, TEXT_LAYERS, vision, scenes.GROUND, folder / "start", seed)
    options = {"per_device_train_batch_size": SCENE_BATCH, "learning_rate": 1e-3, "logging_steps": max(steps // 20, 1)}
    options |= shared(folder / "sft", steps, seed)
    half = HalfRight(to_count[:LOOKED_AT], folder / "half", max(steps // LOOKS, 1))
    half.reader = AutoProcessor.from_pretrained(start)
    rows = scenes.rows(SCENES, scenes.TRAINING, seed, scenes.LESSONS)
    trainer = tuned(start, rows, folder / "answers", options, callbacks=[half])
    asked = {"held_out": held_out, "shuffled": shuffled(held_out), "white": blank(held_out, "white")}
    found: dict[str, Any] = {name: by_kind(trainer.model, half.reader, some) for name, some in asked.items()}
    found["loss"] = logged(trainer, "loss")
    del trainer
    begin = str(folder / ("half" if half.step else "answers"))
    begun = AutoModelForImageTextToText.from_pretrained(begin).to("cuda" if torch.cuda.is_available() else "cpu")
    before = share(are_right(begun, half.reader, to_count))
    del begun
    found["grpo"] = grpo = counting(begin, folder, steps, seed, to_count)
    grpo |= {"started_at_step": half.step, "right_before": before}
    sees = found["held_out"]["all"] >= 0.9 and max(found[name]["all"] for name in ("shuffled", "white")) <= 0.5
    counts = grpo["own"]["right"] >= before + 0.1 and grpo["shuffled"]["last_reward"] <= BLIND + 0.05
    return found | {"holds": sees and counts}


# ---- command line ----------------------------------------------------------------------------------------------------------

Proof = Callable[[str, Path, int, int], dict[str, Any]]
RUNS: dict[str, tuple[Proof, int]] = {"grafted": (digits, 800), "scenes": (drawn_scenes, 3000)}
"""Name -> what runs it, its steps."""


def results(names: Sequence[str], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in names:
        began, (proof, steps) = time.perf_counter(), RUNS[name]
        steps = asked.steps or steps
        found = proof(asked.model, asked.output / name, steps, asked.seed)
        said = {
            "run": name,
            "steps": steps,
            "seed": asked.seed,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
        }
        yield said | {"seconds": round(time.perf_counter() - began, 1)} | found
        gc.collect()
        torch.cuda.empty_cache()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument(
        "--steps", type=int, help="of the first stage or the SFT; the others follow. Default: those of each run"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/images"))
    return parser


def main() -> None:
    asked = parser().parse_args()
    for found in results(asked.runs or list(RUNS), asked):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
