"""The work and the memory of a vision tower. Its unit is the patch: tokens of the text never pass it, and an image of few tokens
may have many patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.core.batch import BatchImages
from posttrain.core.vision import VisionFamily
from posttrain.models.memory.fit import FULL, NONE, NOTHING, SELECTIVE, ActivationCost, layers_cost
from posttrain.models.vision.features import encoded, vision_parameters

KEPT_WIDTHS, SELECTIVE_WIDTHS = (8, 4), (7, 1)
"""Of the tower, and inside of its MLP, that a patch keeps in one layer: norms, queries, keys, values, GELU and its input."""


@dataclass(frozen=True)
class TowerShape:
    """Of a model that may be on the meta device."""

    family: VisionFamily
    width: int
    inner: int  # width inside of the MLPs
    layers: int
    windowed: int  # of them, those in which a patch sees its window only
    window: int  # patches of a window
    tile: int  # patches of a row of pixels: 1 where the rows are patches
    pixels: int  # numbers of a patch
    weights: int  # of the tower, with which every patch is multiplied
    projector: int  # and those with which every feature is
    parameters: int  # of both, with those that multiply nothing
    trains: tuple[bool, bool]  # tower, projector

    @classmethod
    def of(cls, innermost: nn.Module, family: VisionFamily) -> TowerShape:
        config, tower = innermost.config.vision_config, attrgetter(family.tower)(innermost)
        parts = [attrgetter(path)(innermost) for path in family.projectors]
        joining = [p for part in parts for p in ((part,) if isinstance(part, nn.Parameter) else part.parameters())]
        kept = {id(parameter) for parameter in joining}
        patches = next(module for module in tower.modules() if isinstance(module, nn.Conv2d | nn.Conv3d))
        blocks = [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]
        linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
        layers = len(blocks)
        whole = getattr(config, "fullatt_block_indexes", None)  # layers without windows, where the others have them
        own = [p for p in tower.parameters() if id(p) not in kept]
        return cls(
            family=family,
            width=patches.out_channels,
            inner=getattr(config, "intermediate_size", None) or int(config.mlp_ratio * patches.out_channels),
            layers=layers,
            windowed=0 if whole is None else layers - len(whole),
            window=0 if whole is None else (config.window_size // config.patch_size) ** 2,
            tile=1 if family.tower_has_bounds else _tiled(config.image_size, patches.kernel_size),
            pixels=patches.weight[0].numel(),
            weights=sum(module.weight.numel() for module in (patches, *linears)),
            projector=sum(p.numel() for p in joining if p.dim() > 1),
            parameters=sum(p.numel() for p in vision_parameters(innermost, family)),
            trains=(any(p.requires_grad for p in own), any(p.requires_grad for p in joining)),
        )

    def patches(self, tiles: Sequence[int]) -> int:
        """Of images with so many rows of pixels (`VisionFamily.pixel_rows`)."""
        return self.tile * sum(tiles)

    def forward(self, tiles: Sequence[int], features: float) -> tuple[float, float]:
        """Multiplications and additions in the tower and in the projector.

        2 for each weight and patch (or feature); in attention 4 for each width, layer and pair of patches that see each other.
        """
        patches = self.patches(tiles)
        pairs = sum(tile * tile for tile in tiles) if self.family.tower_has_bounds else patches * self.tile
        near = sum(tile * min(tile, self.window) for tile in tiles)
        attention = 4 * self.width * ((self.layers - self.windowed) * pairs + self.windowed * near)
        return 2.0 * self.weights * patches + attention, 2.0 * self.projector * features

    def training(self, tiles: Sequence[int], features: float) -> float:
        """The same with the backward of what is trained: by activations (but for the pixels) and by weights, each as much as the
        forward."""
        (tower, projector), (learns, joins) = self.forward(tiles, features), self.trains
        of_pixels = 2.0 * self.pixels * self.width * self.patches(tiles)
        return tower + learns * (2 * tower - of_pixels) + projector * (1 + learns + joins)

    def activations(self, item: int) -> ActivationCost:
        """Estimated bytes a patch, in the tower's own layers, for numbers of `item` bytes."""
        if not self.trains[0]:
            return NOTHING
        widths = (self.width, self.inner)
        everything, selective = (
            item * self.layers * sum(count * width for count, width in zip(counts, widths))
            for counts in (KEPT_WIDTHS, SELECTIVE_WIDTHS)
        )
        inputs = self.width * item
        kept = {NONE: everything, SELECTIVE: selective, FULL: self.layers * inputs}
        kept = {level: size + self.pixels * item for level, size in kept.items()}
        return ActivationCost(kept, inputs, everything / self.layers, is_measured=False)

    def measured(self, innermost: nn.Module, few: BatchImages, many: BatchImages) -> ActivationCost:
        """Bytes a patch, from what autograd keeps of the images of two batches; of a tower that is not trained, nothing."""
        if not any(self.trains):
            return NOTHING
        runs = [(self.patches(one.tiles), partial(encoded, innermost, self.family, one, True)) for one in (few, many)]
        return layers_cost(innermost, self.layers, self.width, runs)


def _tiled(size: Any, kernel: tuple[int, ...]) -> int:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return math.prod(side // step for side, step in zip(sides, kernel))
