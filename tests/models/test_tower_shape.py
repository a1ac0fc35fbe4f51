"""Work and memory of vision towers: against operations that are counted while they run, and bytes that autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from posttrain.core.batch import RAGGED
from posttrain.core.vision import PROJECTOR, TOWER
from posttrain.models.load.model import innermost_model
from posttrain.models.memory.fit import FULL, NONE, SELECTIVE
from posttrain.models.vision.features import encoded
from posttrain.models.vision.parts import freeze_parts
from posttrain.trainer.step import memory_fit
from tests.tiny_vision import FAMILIES
from tests.trainer.vision_runs import trainer_of


def counted(run):
    with FlopCounterMode(display=False) as flops:
        run()
    return flops.get_total_flops()


def batch_of(trainer):
    trainer.data_collator.layout = RAGGED if trainer.loaded.layout != "padded" else "padded"
    return trainer.data_collator([trainer.train_dataset[row] for row in range(4)])


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_are_counted(family, tmp_path):
    """A formula without attention is 10 % and more off, one that counts the tower by tokens of the text off by a factor."""
    trainer = trainer_of("sft", family, tmp_path, dtype=torch.float32)
    innermost, images = innermost_model(trainer.model), batch_of(trainer).images
    tower = trainer.vision.tower(innermost)
    found = counted(lambda: encoded(innermost, trainer.vision.family, images, True))
    assert sum(tower.forward(images.tiles, images.num_features)) == pytest.approx(found, rel=0.12)


@pytest.mark.parametrize("frozen", [(), (TOWER,), (TOWER, PROJECTOR)], ids=["all", "no tower", "neither"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl"])
def test_operations_of_a_training_pass(family, frozen, tmp_path):
    trainer = trainer_of("sft", family, tmp_path, dtype=torch.float32)
    innermost, images = innermost_model(trainer.model), batch_of(trainer).images
    freeze_parts(innermost, trainer.vision.family, frozen)

    def forward_and_backward():
        made = encoded(innermost, trainer.vision.family, images, len(frozen) < 2).pooler_output
        made = made if isinstance(made, torch.Tensor) else torch.cat(list(made))
        if made.requires_grad:
            made.sum().backward()

    tower = trainer.vision.tower(innermost)
    found = counted(forward_and_backward)
    assert tower.training(images.tiles, images.num_features) == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "internvl"])
def test_a_step_counts_patches_apart_from_tokens(family, tmp_path):
    trainer = trainer_of("sft", family, tmp_path, dtype=torch.float32)
    batch, innermost = batch_of(trainer), innermost_model(trainer.model)
    tower = trainer.vision.tower(innermost)
    language = sum(p.numel() for p in innermost.parameters()) - tower.parameters
    of_images = trainer.floating_point_ops(batch) - 6 * batch.num_tokens * language
    assert of_images == int(tower.training(batch.images.tiles, batch.images.num_features)) > 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "gemma3", "smolvlm", "internvl"])
def test_what_a_patch_keeps(family, tmp_path):
    """Measured from the probe's pictures, it tells what the pictures of the rows keep; the estimate is within a factor of two."""
    trainer = trainer_of("sft", family, tmp_path, dtype=torch.float32)
    innermost = innermost_model(trainer.model)
    tower = trainer.vision.tower(innermost)
    cost = tower.measured(innermost, *trainer.vision.probe_images(trainer.renderer, "cpu"))
    images, kept = batch_of(trainer).images, {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = encoded(innermost, trainer.vision.family, images, True)
    weights = {p.untyped_storage().data_ptr() for p in innermost.parameters()}
    size = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    del made
    assert cost.kept[NONE] * tower.patches(images.tiles) == pytest.approx(size, rel=0.35)
    estimate = tower.activations(4)
    assert 0.5 < estimate.kept[NONE] / cost.kept[NONE] < 2
    assert cost.kept[FULL] < cost.kept[SELECTIVE] <= cost.kept[NONE]


def test_the_memory_plan_counts_patches(tmp_path):
    """A frozen tower keeps nothing; a trained one adds its patches to every token of the densest row."""
    costs = {}
    for name, options in {
        "trained": {},
        "frozen": {"freeze_vision_tower": True, "freeze_multi_modal_projector": True},
    }.items():
        trainer = trainer_of("sft", "smolvlm", tmp_path, dtype=torch.float32, **options)
        costs[name] = memory_fit.image_cost(trainer, innermost_model(trainer.model)).kept[NONE]
        tower = trainer.vision.tower(innermost_model(trainer.model))
        dense = max(
            tower.patches([tower.family.pixel_rows(i.grid) for i in sample.images]) / len(sample)
            for (sample,) in (trainer.train_dataset[row] for row in range(len(trainer.train_dataset)))
        )
        assert memory_fit.patches_per_token(trainer, tower) == pytest.approx(dense)
    assert costs["frozen"] == 0 < costs["trained"]
