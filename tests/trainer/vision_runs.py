"""Trainers of offline methods on rows with images, and the gradient of one optimizer step of theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.methods.table import METHODS
from posttrain.models.load.image_models import WithHead
from posttrain.models.load.model import innermost_model
from tests.tiny_vision import images, vision_model

METHODS_WITH_IMAGES = ("sft", "dpo", "cpo", "orpo", "tpo", "kto", "bco", "reward", "prm")
LABELS = {"reward": 1, "prm": 2}
"""Methods of models with a head of their own -> its outputs."""
NOT_OPTIONS = (
    "peft_config", "train_dataset", "eval_dataset", "model", "processing_class", "optimizers", "callbacks", "reward_funcs",
    "teacher_model", "teacher_processing_class", "tools", "environment_factory", "engine",
)  # fmt: skip
"""Arguments of trainers."""
PICTURES = images((60, 40), (30, 90), (50, 50), (40, 64), seed=5)


def question(text: str, *pictures: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": text}, *({"type": "image", "image": p} for p in pictures)],
    }


def answer(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": "assistant", "content": content}


def chats() -> list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """(prompt, better answer, worse answer): one image, two, none, the same again, and one inside of an answer."""
    a, b, c, d = PICTURES
    return [
        ([question("What is it?", a)], answer("A cat."), answer("A dog, I think.")),
        ([question("And these?", b, c)], answer("Two birds."), answer("Trees.")),
        ([question("Hello.")], answer("Hi."), answer("Yes.")),
        ([question("Again?", a)], answer("Still a cat."), answer("No.")),
        ([question("Draw one.")], answer("Here: ", d, " done."), answer("I cannot.")),
    ]


def rows_of(method: str) -> list[dict[str, Any]]:
    if method == "sft":
        return [{"prompt": prompt, "completion": [good]} for prompt, good, _ in chats()]
    if method in ("kto", "bco"):
        return [
            {"prompt": prompt, "completion": [one], "label": one is good}
            for prompt, good, bad in chats()
            for one in (good, bad)
        ]
    if method == "prm":
        steps = (["One.", "And two."], ["Only one."], ["One.", "Two.", "Three."])
        labels = ([True, False], [False], [True, True, False])
        prompts = [prompt for prompt, _, _ in chats()]
        return [
            {"prompt": prompt, "completions": steps[n % 3], "labels": labels[n % 3]} for n, prompt in enumerate(prompts)
        ]
    pairs = [{"prompt": prompt, "chosen": [good], "rejected": [bad]} for prompt, good, bad in chats()]
    return [row | {"reference": row["chosen"]} for row in pairs] if method == "tpo" else pairs


def trainer_of(method: str, family: str, folder: Path, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    tiny, about = vision_model(family, dtype=dtype), METHODS[method]
    named = {name: options.pop(name) for name in NOT_OPTIONS if name in options}
    shared = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none", "save_strategy": "no"}
    shared |= {"use_cpu": True, "bf16": False, "dataset_cache_dir": str(folder / "cache"), "verbosity": "quiet"}
    config = about.config_class(**{"output_dir": str(folder / "run")} | shared | options)
    model = with_head(tiny.model, folder, LABELS[method]) if method in LABELS else tiny.model
    given = {"model": model, "processing_class": tiny.processor}
    given |= {} if "train_dataset" in named else {"train_dataset": rows_of(method)}
    return about.trainer_class(args=config, **given | named)


def with_head(model: Any, folder: Path, labels: int = 1) -> Any:
    """The reward model of a model that sees, as it is loaded from a folder; its head is large enough for images to matter."""
    model.save_pretrained(folder / "without_head")
    made = WithHead.from_pretrained(str(folder / "without_head"), labels, dtype=model.dtype)
    torch.nn.init.normal_(made.score.weight, generator=torch.Generator().manual_seed(1))
    return made


def gradient(trainer: Any, layout: str, split: int) -> dict[str, Tensor]:
    """Of all rows as one optimizer step, as the trainer's own loader deals them out in micro-batches of `split` units."""
    rows, args = len(trainer.train_dataset), trainer.args
    args.per_device_train_batch_size, args.gradient_accumulation_steps = split, -(-rows // split)
    trainer._train_batch_size = split
    trainer.data_collator.layout = layout
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == args.gradient_accumulation_steps
    totals = trainer._get_num_items_in_batch(batches, args.device)
    trainer.model.zero_grad()
    trainer.is_in_train = True
    for batch in batches:
        trainer.training_step(trainer.model, batch, totals)
    named = innermost_model(trainer.model).named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


LAYOUTS = (PADDED, RAGGED, SHARED)
