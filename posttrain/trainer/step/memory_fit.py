"""Ask whether a run fits its device, and set the options that make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import TrainingArguments

from posttrain.core.batch import SHARED
from posttrain.core.console import say
from posttrain.core.sample import Unit
from posttrain.data.collate import Collator, laid_out_tokens
from posttrain.data.render.renderer import Renderer
from posttrain.models.layers.kernels import COMPILED, PLAIN, uncompile_layers
from posttrain.models.load.model import LoadedModel, innermost_model
from posttrain.models.memory import fit as memory
from posttrain.models.memory.shape import Shape, recomputable_layers
from posttrain.models.memory.tower import TowerShape
from posttrain.models.scoring.fused_head import can_fuse
from posttrain.models.scoring.token_scores import LanguageHead
from posttrain.trainer.construction import epoch_batches
from posttrain.trainer.options.base import DEEPSPEED, BaseConfig
from posttrain.trainer.step.gathering import over_processes
from posttrain.trainer.vision import Vision

EPOCHS_LOOKED_AT, UNITS_LOOKED_AT = 10, 256
DEFAULT_OPTIM = TrainingArguments.__dataclass_fields__["optim"].default


class FittedRun(Protocol):
    """What decides how much memory a run needs; a trainer has all of it."""

    args: BaseConfig
    model: nn.Module
    loaded: LoadedModel
    data_collator: Collator
    graphs: int
    train_dataset: Any
    optimizer: torch.optim.Optimizer | None
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    reserved_bytes: Callable[[], float]
    batch_limits: Callable[[], tuple[int, int]]
    vision: Vision | None
    renderer: Renderer
    recomputes_logits: Callable[[], bool]
    differentiable_stats: Callable[[], tuple[str, ...]]


def fit_memory(run: FittedRun) -> None:
    """Decide on checkpointing, offloading, kept logits and 8-bit moments where the user has not, and say so in one sentence.

    Called when everything that is to be on the device but the optimizer and a rollout engine is there.
    """
    _decide(run)
    _uncompile_if_selective(run)


def _decide(run: FittedRun) -> None:
    args = run.args
    on_cpu = args.device.type != "cuda"
    if on_cpu and args.memory_bytes is not None:
        raise ValueError(
            f"`memory` is {args.memory!r}, and this run is on a CPU, whose memory is not planned. Leave it out, or ask for "
            f"{memory.LEAST!r}."
        )
    if on_cpu and args.memory is None:
        args.gradient_checkpointing = bool(args.gradient_checkpointing)
        return
    if is_decided(memory_overrides(run)) and args.memory is None:
        return
    innermost = innermost_model(run.model)
    head = innermost.get_output_embeddings()
    if args.sharding is None:
        cost = memory.activation_cost(innermost) + image_cost(run, innermost)
        state = memory.state_cost(run.model.parameters(), head, args.world_size)
    else:  # shards cannot be run by themselves: what plain layers keep is the most that any do
        cost = Shape(run.model, args.compute_dtype).activations(PLAIN) + image_cost(run, innermost, args.compute_dtype)
        shards = (head, args.world_size, args.compute_dtype, args.device.type)
        state = memory.sharded_state_cost(run.model, recomputable_layers(innermost), *shards)
    if on_cpu:
        args.activation_offloading = bool(args.activation_offloading)  # they are in host memory already
    plan = plan_memory(run, math.inf if on_cpu else _free(run), cost, state)
    apply(run, plan)
    if args.should_log:
        say(plan.sentence)


def image_cost(run: FittedRun, innermost: nn.Module, dtype: torch.dtype | None = None) -> memory.ActivationCost:
    """What the tower keeps for a token of the densest row: passes are cut by tokens, and patches come with them. With `dtype`, an
    estimate, for a tower that cannot be run."""
    is_shown = run.vision is not None and run.vision.shows_images
    tower = run.vision.tower(innermost) if is_shown else None
    if tower is None:
        return memory.NOTHING
    if dtype is not None:
        cost = tower.activations(dtype.itemsize)
    else:
        cost = tower.measured(innermost, *run.vision.probe_images(run.renderer, run.args.device))
    return cost.times(patches_per_token(run, tower))


def patches_per_token(run: FittedRun, tower: TowerShape) -> float:
    """In the unit of most patches for its tokens, of some that are looked at; of a stream, in a picture without text."""
    rows, family = getattr(run.train_dataset, "prepared", run.train_dataset), tower.family
    if not hasattr(rows, "__len__"):
        images = run.vision.probe_images(run.renderer, "cpu")[0]
        return tower.patches(images.tiles) / images.num_features
    found = [0.0]
    for unit in looked_at(rows):
        distinct = {image.key: family.pixel_rows(image.grid) for sample in unit for image in sample.images}
        found.append(tower.patches([*distinct.values()]) / laid_out_tokens([unit], run.data_collator.layout))
    return max(found)


def looked_at(rows: Any) -> list[Unit]:
    """Some units from all over a dataset."""
    return [rows[int(place)] for place in np.linspace(0, len(rows) - 1, min(len(rows), UNITS_LOOKED_AT))]


def is_decided(overrides: memory.MemoryOverrides) -> bool:
    """Whether the user has left nothing open: then nothing is planned."""
    return None not in (overrides.checkpointing, overrides.offload, overrides.optim)


def plan_memory(
    run: FittedRun, free: float, activations: memory.ActivationCost, state: memory.StateCost
) -> memory.MemoryPlan:
    """What a run does about `free` bytes, the weights and whatever else stays on the device being there."""
    innermost = innermost_model(run.model)
    can_recompute, logit_bytes = bool(recomputable_layers(innermost)), logit_bytes_of(run, innermost)
    least = run.args.memory == memory.LEAST
    rest = (memory_overrides(run), can_recompute, logit_bytes, least)
    return memory.memory_plan(free, batch_tokens(run), activations, state, *rest)


def _uncompile_if_selective(run: FittedRun) -> None:
    """Selective checkpointing decides operation by operation what is kept; compiled layers show it none."""
    args, loaded = run.args, run.loaded
    is_selective = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get(memory.SELECTIVE)
    if is_selective and loaded.kernels == COMPILED:
        uncompile_layers(innermost_model(run.model))
        loaded.kernels = PLAIN
        loaded.notes.append("Decoder layers run uncompiled: selective checkpointing needs to see their operations.")


def logit_bytes_of(run: FittedRun, causal_lm: Any) -> float:
    """Of one token, as the fused head keeps them; 0 where the loss has no second use for them.

    0 as well where autograd would keep several copies in float32, which only an explicit option may ask for.
    """
    if not run.recomputes_logits() or run.differentiable_stats() or run.args.sharding is not None:
        return 0.0
    head = LanguageHead.of(causal_lm)
    return head.vocabulary * head.module.weight.element_size() if can_fuse(head) else 0.0


def memory_overrides(run: FittedRun) -> memory.MemoryOverrides:
    """What the user has decided. An optimizer other than the default one is a decision; sharded states are their engine's."""
    args = run.args
    level = None
    if args.gradient_checkpointing is not None:
        chosen = memory.SELECTIVE if args.gradient_checkpointing_kwargs.get(memory.SELECTIVE) else memory.FULL
        level = chosen if args.gradient_checkpointing else memory.NONE
    optim = getattr(args.optim, "value", args.optim)
    given = run.optimizer is not None or run.optimizer_cls_and_kwargs is not None
    is_open = optim == getattr(DEFAULT_OPTIM, "value", DEFAULT_OPTIM) and not given and args.sharding is None
    return memory.MemoryOverrides(
        level, args.activation_offloading, None if is_open else optim, args.max_tokens_per_pass, args.keep_logits
    )


def batch_tokens(run: FittedRun) -> memory.BatchTokens:
    """Tokens of the micro-batches that this run will make: the rows of every epoch are known before it begins.

    Where the lengths are not known (a stream), the limits on rows and length stand for them.
    """
    args = run.args
    can_split = args.sharding != DEEPSPEED
    enough = memory.ENOUGH_TOKENS if args.sharding is None else memory.ENOUGH_TO_GATHER
    lengths = getattr(run.train_dataset, "unit_lengths", None)
    if lengths is None or len(lengths) == 0:
        limits = (-(-tokens * run.graphs // args.sequence_parallel_size) for tokens in run.batch_limits())
        return memory.BatchTokens(*limits, can_split, enough)
    # Of a row that processes share, each computes a part.
    lengths = np.asarray(lengths) * laid_out_share(run) / args.sequence_parallel_size
    order = (args.train_sampling_strategy, args.dataloader_drop_last)
    batches = epoch_batches(run.train_dataset, args, args.per_device_train_batch_size, *order)
    largest = 0
    for epoch in range(min(int(np.ceil(args.num_train_epochs)), EPOCHS_LOOKED_AT)):
        batches.set_epoch(epoch)
        largest = max(largest, *(int(lengths[rows].sum()) for rows in batches))
    return memory.BatchTokens(largest, int(np.ceil(lengths.max())), can_split, enough)


def laid_out_share(run: FittedRun) -> float:
    """Share of a unit's tokens that are computed: less than 1 where its samples share their beginning. From a sample of units."""
    dataset = run.train_dataset
    if run.data_collator.layout != SHARED:
        return 1.0
    units = looked_at(dataset)
    total = sum(len(sample) for unit in units for sample in unit)
    return laid_out_tokens(units, SHARED) / max(total, 1)


def apply(run: FittedRun, plan: memory.MemoryPlan) -> None:
    args = run.args
    args.gradient_checkpointing = plan.checkpointing != memory.NONE
    if plan.checkpointing == memory.SELECTIVE:
        args.gradient_checkpointing_kwargs = {**args.gradient_checkpointing_kwargs, memory.SELECTIVE: True}
    args.activation_offloading = plan.offload
    args.max_tokens_per_pass = plan.tokens_per_pass
    args.keep_logits = plan.keep_logits
    if plan.eight_bit:
        args.optim = memory.EIGHT_BIT


def _free(run: FittedRun) -> float:
    """Every process decides by the one that has least."""
    free, bound = memory.free_memory(run.args.device), run.args.memory_bytes
    if bound is not None:
        free = min(free, bound - torch.cuda.memory_allocated(run.args.device))
    own = free - run.reserved_bytes()
    return float(over_processes(own, run.args, torch.distributed.ReduceOp.MIN))
