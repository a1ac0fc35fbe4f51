"""Ask whether a run fits its device, and set the options that make it fit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.core.batch import SHARED
from posttrain.data.collate import laid_out_tokens
from posttrain.models.layers.kernels import COMPILED, PLAIN, uncompile_layers
from posttrain.models.load.model import innermost_model
from posttrain.models.memory import fit as memory
from posttrain.models.scoring.fused_head import can_fuse
from posttrain.models.scoring.token_scores import LanguageHead
from posttrain.trainer.options.base import DEEPSPEED

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer

logger = logging.getLogger(__name__)

EPOCHS_LOOKED_AT, UNITS_LOOKED_AT = 10, 256
DEFAULT_OPTIM = TrainingArguments.__dataclass_fields__["optim"].default


def fit_memory(trainer: BaseTrainer) -> None:
    """Decide on checkpointing, offloading, kept logits and 8-bit moments where the user has not, and say so in one sentence.

    Called when everything that is to be on the device but the optimizer and a rollout engine is there.
    """
    _decide(trainer)
    _uncompile_if_selective(trainer)


def _decide(trainer: BaseTrainer) -> None:
    args = trainer.args
    if args.device.type != "cuda":
        args.gradient_checkpointing = bool(args.gradient_checkpointing)
        return
    wishes = wishes_of(trainer)
    if wishes.checkpointing is not None and wishes.offload is not None and wishes.optim is not None:
        return
    innermost = innermost_model(trainer.model)
    body, head = getattr(innermost, innermost.base_model_prefix), innermost.get_output_embeddings()
    if args.sharding is None:
        cost = memory.activation_cost(body, innermost.config)
        state = memory.state_cost(trainer.model.parameters(), head, args.world_size)
    else:
        cost = memory.activation_cost(body, innermost.config, is_sharded=True, dtype=args.compute_dtype)
        layers = [module for module in innermost.modules() if isinstance(module, GradientCheckpointingLayer)]
        shards = (trainer.model, layers, head, args.world_size, args.compute_dtype, args.device.type)
        state = memory.sharded_state_cost(*shards)
    can_recompute = any(isinstance(module, GradientCheckpointingLayer) for module in innermost.modules())
    logit_bytes = logit_bytes_of(trainer, innermost)
    plan = memory.memory_plan(_free(trainer), batch_tokens(trainer), cost, state, wishes, can_recompute, logit_bytes)
    apply(trainer, plan)
    if args.should_log:
        print(plan.sentence, flush=True)


def _uncompile_if_selective(trainer: BaseTrainer) -> None:
    """Selective checkpointing decides operation by operation what is kept; compiled layers show it none."""
    args, loaded = trainer.args, trainer.loaded
    is_selective = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get(memory.SELECTIVE)
    if is_selective and loaded.kernels == COMPILED:
        uncompile_layers(innermost_model(trainer.model))
        loaded.kernels = PLAIN
        loaded.notes.append("Decoder layers run uncompiled: selective checkpointing needs to see their operations.")


def can_keep_logits(trainer: BaseTrainer) -> bool:
    """Whether keeping them takes one copy: autograd keeps several in float32, for which nobody asks without being told."""
    return trainer.recomputes_logits() and not trainer.differentiable_stats()


def logit_bytes_of(trainer: BaseTrainer, causal_lm: Any) -> float:
    """Of one token, as the fused head keeps them; 0 where the loss has no second use for them."""
    if not can_keep_logits(trainer) or trainer.args.sharding is not None:
        return 0.0
    head = LanguageHead.of(causal_lm)
    return head.vocabulary * head.module.weight.element_size() if can_fuse(head) else 0.0


def wishes_of(trainer: BaseTrainer) -> memory.Wishes:
    """What the user has decided. An optimizer other than the default one is a decision; sharded states are their engine's."""
    args = trainer.args
    level = None
    if args.gradient_checkpointing is not None:
        chosen = memory.SELECTIVE if args.gradient_checkpointing_kwargs.get(memory.SELECTIVE) else memory.FULL
        level = chosen if args.gradient_checkpointing else memory.NONE
    optim = getattr(args.optim, "value", args.optim)
    given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    is_open = optim == getattr(DEFAULT_OPTIM, "value", DEFAULT_OPTIM) and not given and args.sharding is None
    return memory.Wishes(
        level, args.activation_offloading, None if is_open else optim, args.max_tokens_per_pass, args.keep_logits
    )


def batch_tokens(trainer: BaseTrainer) -> memory.BatchTokens:
    """Tokens of the micro-batches that this run will make: the rows of every epoch are known before it begins.

    Where the lengths are not known (a stream), the limits on rows and length stand for them.
    """
    args = trainer.args
    can_split = args.sharding != DEEPSPEED
    lengths = getattr(trainer.train_dataset, "unit_lengths", None)
    if lengths is None or len(lengths) == 0:
        return memory.BatchTokens(trainer.largest_batch(), trainer.longest_row(), can_split)
    lengths = np.asarray(lengths) * laid_out_share(trainer)
    batches = trainer.epoch_batches(
        trainer.train_dataset, args.per_device_train_batch_size, args.train_sampling_strategy, args.dataloader_drop_last
    )
    largest = 0
    for epoch in range(min(int(np.ceil(args.num_train_epochs)), EPOCHS_LOOKED_AT)):
        batches.set_epoch(epoch)
        largest = max(largest, *(int(lengths[rows].sum()) for rows in batches))
    return memory.BatchTokens(largest, int(lengths.max()), can_split)


def laid_out_share(trainer: BaseTrainer) -> float:
    """Share of a unit's tokens that are computed: less than 1 where its samples share their beginning. From a sample of units."""
    dataset = trainer.train_dataset
    if trainer.data_collator.layout != SHARED:
        return 1.0
    places = np.linspace(0, len(dataset) - 1, min(len(dataset), UNITS_LOOKED_AT)).astype(int)
    units = [dataset[int(place)] for place in places]
    total = sum(len(sample) for unit in units for sample in unit)
    return laid_out_tokens(units, SHARED) / max(total, 1)


def apply(trainer: BaseTrainer, plan: memory.MemoryPlan) -> None:
    args = trainer.args
    args.gradient_checkpointing = plan.checkpointing != memory.NONE
    if plan.checkpointing == memory.SELECTIVE:
        args.gradient_checkpointing_kwargs = {**args.gradient_checkpointing_kwargs, memory.SELECTIVE: True}
    args.activation_offloading = plan.offload
    args.max_tokens_per_pass = plan.tokens_per_pass
    args.keep_logits = plan.keep_logits
    if plan.eight_bit:
        args.optim = memory.EIGHT_BIT


def _free(trainer: BaseTrainer) -> float:
    """Every process decides by the one that has least."""
    args = trainer.args
    own = memory.free_memory(args.device) - trainer.reserved_bytes()
    free = torch.tensor(own, dtype=torch.float64, device=args.device)
    if args.world_size > 1:
        torch.distributed.all_reduce(free, op=torch.distributed.ReduceOp.MIN)
    return float(free)
