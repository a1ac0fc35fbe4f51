"""GRPO and PAPO on rows with images: in every layout and split the gradient of a naive loss of full logits in float64."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import ImageSpan, Sample, Unit
from posttrain.data.vision.masking import PictureMask
from posttrain.rollout.loader import units_of
from posttrain.rollout.rollout import ADVANTAGES
from tests.tiny_vision import TinyVision
from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import chats, trainer_of
from tests.vision_samples import Shown

OPTIONS = {
    "num_generations": 2, "max_completion_length": 5, "per_device_train_batch_size": 10, "reward_workers": 0,
    "vllm_importance_sampling_correction": False,
}  # fmt: skip
OF_PAPO = {"mask_ratio": 0.6, "perception_loss_weight": 0.4, "der_loss_weight1": 0.2, "der_loss_weight2": 0.3}
FAMILIES = ("qwen2_5_vl", "llava_next", "smolvlm", "gemma3", "paligemma")


def made(method: str, family: str, folder: Any, **options: Any) -> Any:
    prompts = [{"prompt": prompt} for prompt, _, _ in chats()]
    given = OPTIONS | (OF_PAPO if method == "papo" else {}) | options
    return trainer_of(method, family, folder, train_dataset=prompts, reward_funcs=checksum, **given)


def window_of(trainer: Any) -> list[Unit]:
    """Completions that the trainer has written, of prompts with one image, two, none, and the first again."""
    window = trainer.get_train_dataloader().source.next_window()
    assert {len(sample.images) for (sample,) in window} == {0, 1, 2}
    assert sum(abs(sample.per_token[ADVANTAGES]).max() > 0 for (sample,) in window) >= 6
    return window


def gradient(trainer: Any, window: list[Unit], layout: str, split: int) -> dict[str, Tensor]:
    """Of the window as one optimizer step, in micro-batches of `split` samples."""
    collator = replace(trainer.data_collator, layout=layout)
    parts = [window[start : start + split] for start in range(0, len(window), split)]
    batches = [collator(units_of(part, collator)) for part in parts]
    for batch in batches:
        batch.per_token = {name: values.double() for name, values in batch.per_token.items()}
    trainer.args.gradient_accumulation_steps = len(batches)
    totals = trainer._get_num_items_in_batch(batches, trainer.args.device)
    trainer.model.zero_grad()
    trainer.is_in_train = True
    for batch in batches:
        trainer.training_step(trainer.model, batch, totals)
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


# ---- the oracle ----------------------------------------------------------------------------------------------------------


def naive_gradient(trainer: Any, window: list[Unit], model: Any) -> dict[str, Tensor]:
    """By transformers' own forward of one completion after the other, with what the processor itself hands over."""
    shown = Shown(TinyVision(model, trainer.vision.processor, ""), trainer.vision.family)
    args, samples = trainer.args, [sample for (sample,) in window]
    values = [token_losses(trainer, shown, sample) for sample in samples]
    if args.loss_type == "dapo":
        loss = torch.cat(values).mean()
    else:
        loss = sum(value.mean() for value in values) / len(values)
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def token_losses(trainer: Any, shown: Shown, sample: Sample) -> Tensor:
    args = trainer.args
    advantage = torch.from_numpy(sample.read_trained(ADVANTAGES)).double()
    rows, logps = asked(shown, sample, [opened(trainer, span) for span in sample.images])
    loss = -(logps - logps.detach()).exp() * advantage
    if trainer.method == "grpo" or not sample.images:
        return loss
    mask = PictureMask(args.mask_type, args.mask_ratio)
    hidden = [mask(opened(trainer, span), span.draw) for span in sample.twin.images]
    masked_rows, masked_logps = asked(shown, sample, hidden)
    ratio = (masked_logps - logps).exp()
    divergence = (ratio - ratio.log() - 1).clamp(0, 0.2)
    entropies = [-(part.exp() * part).sum(-1) for part in (rows, masked_rows)]
    weights = (args.der_loss_weight1, args.der_loss_weight2)
    return loss - args.perception_loss_weight * divergence + sum(w * h for w, h in zip(weights, entropies))


def asked(shown: Shown, sample: Sample, pictures: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """(n, V) log-probs where the tokens of the completion are predicted, and (n,) those of the tokens."""
    trained = np.flatnonzero(sample.trained)
    rows = shown.own_logits(sample, pictures)[trained - 1].log_softmax(-1)
    return rows, rows.gather(-1, torch.tensor(sample.input_ids[trained].astype(np.int64))[:, None]).squeeze(-1)


def opened(trainer: Any, span: ImageSpan) -> Image.Image:
    return trainer.pixels.source(span)[0].rgb()


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    largest = max(grad.abs().max() for grad in wanted.values())
    nothing = torch.zeros(())
    names = found.keys() | wanted.keys()
    return float(max((found.get(n, nothing) - wanted.get(n, nothing)).abs().max() for n in names) / largest)


# ---- the cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["grpo", "papo"])
def test_gradient_equals_the_oracle(method, family, loss_type, tmp_path):
    trainer = made(method, family, tmp_path, loss_type=loss_type)
    window, plain = window_of(trainer), copy.deepcopy(trainer.model)
    wanted = naive_gradient(trainer, window, plain)
    layouts = {SHARED: (PADDED, RAGGED, SHARED), RAGGED: (PADDED, RAGGED), PADDED: (PADDED,)}[trainer.loaded.layout]
    cells = list(itertools.product(layouts, (1, 4, 10)))
    # How a batch is laid out and cut up does not ask for the loss: the other loss takes each layout and each cut once.
    for layout, split in cells if loss_type == "dapo" else cells[::4]:
        found = gradient(trainer, window, layout, split)
        assert apart(found, wanted) < 1e-6, (layout, split)
