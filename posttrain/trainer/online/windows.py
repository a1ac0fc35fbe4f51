"""From a trainer's options to its loaders of rollouts, and what is written on new samples before they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers.trainer
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.processes import of_every_process
from posttrain.core.sample import Sample
from posttrain.data.collate import Collator, as_units, split_by_tokens
from posttrain.models.attention.sequence_parallel import neighbours
from posttrain.models.load.reference import ModelReference, Precomputed
from posttrain.models.memory.fit import tokens_without_gradient
from posttrain.rollout.collector import RolloutCollector
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.episodes.writing import AnyRows
from posttrain.rollout.eval_loader import EvalRolloutLoader
from posttrain.rollout.group_filter import GroupFilter
from posttrain.rollout.loader import RolloutLoader, Window, whole_window
from posttrain.rollout.prompt_rows import PromptRows, StreamedPrompts, StreamOrder
from posttrain.rollout.replay_buffer import ReplayBuffer
from posttrain.rollout.schedule import Schedule
from posttrain.rollout.source import FedSource, Prompts, PromptStream, RolloutSource, WindowsOfGroups
from posttrain.trainer.options.online import OnlineConfig

EVALUATION_SEED = 0x5EED  # evaluation draws other numbers than training, and the same ones each time


class ScoredWithRollouts(Precomputed):
    """A live reference that was asked when the rollouts were collected; its answers travel with the samples."""

    def __init__(self, live: ModelReference) -> None:
        super().__init__()
        self.live = live

    def __str__(self) -> str:
        return f"{self.live}, asked once for each rollout"


@contextmanager
def skipping_by_position() -> Iterator[None]:
    """Trainer skips the batches of a resumed epoch by rebuilding torch's DataLoader; ours knows where it stands."""
    original = transformers.trainer.skip_first_batches

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        return loader.skip_first(num_batches) if isinstance(loader, RolloutLoader) else original(loader, num_batches)

    transformers.trainer.skip_first_batches = skip_first_batches
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = original


def rollout_loader(
    rows: PromptRows | StreamedPrompts,
    args: OnlineConfig,
    collator: Collator,
    collector: RolloutCollector | None,
    params: SamplingParams | None,
    is_training: bool,
    replay: ReplayBuffer | None = None,
    group_filter: GroupFilter | None = None,
    ahead: Callable[[AnyRows, SamplingParams, Callable[[int], int]], WindowsOfGroups] | None = None,
) -> RolloutLoader | EvalRolloutLoader:
    """`collector` and `params` are None where a run is only explained: what such a loader would yield is counted, not generated.
    `ahead` makes what writes groups ahead of training, where that is asked for."""
    rules = args.window_rules()
    if not is_training:
        size = (args.num_generations_eval or args.num_generations, args.samples_of(args.eval_batch_size))
        params = params and replace(params, seed=params.seed ^ EVALUATION_SEED)
        return EvalRolloutLoader(rows, *size, params, collector, rules, collator, args.process_index, args.world_size)
    if isinstance(rows, StreamedPrompts):
        rows.rewind()
        order = StreamOrder()
    else:
        order = PromptStream(len(rows), args.seed, args.shuffle_dataset)
    schedule, written = args.schedule(), args.writing_schedule()
    prompts = Prompts(order, written, args.process_index)
    how = (collector, rules, replay, group_filter)
    source: Any = prompts
    if collector is not None and ahead is None:
        source = RolloutSource(prompts, rows, params, *how)
    elif collector is not None:
        source = FedSource(prompts, rows, params, *how, groups=ahead(rows, params, order.row))
    collator = replace(collator, max_tokens=args.max_tokens_per_pass, part=args.row_part)
    pins = args.dataloader_pin_memory and args.device.type == "cuda"
    seed = args.seed if args.permutes_windows else None
    return RolloutLoader(source, schedule, collator, pins, seed, _made_whole(args.sequence_parallel_size, written))


def _made_whole(size: int, written: Schedule) -> Callable[[Window], Window] | None:
    """How processes that share their rows get each other's samples."""
    if size == 1:
        return None
    return lambda mine: whole_window(mine, written.micro_batches, partial(_of_neighbours, size=size))


def _of_neighbours(mine: Any, size: int) -> list[Any]:
    return of_every_process(mine, size, neighbours(size))


@torch.no_grad()
def write_columns(
    samples: list[Sample],
    columns_of: Callable[[TokenBatch], dict[str, Tensor]],
    collator: Collator,
    device: torch.device,
    passes: Callable[[int], int] = lambda needed: needed,
) -> None:
    """Write `columns_of` each trained token, (n,) or (n, k), into `per_token` of its sample; 0 where nothing is trained.

    Passes have a bounded number of tokens: many rollouts need no more memory than an update. `passes` says how many are run where
    this process needs so many: a sharded model is asked equally often by all.
    """
    budget = min(collator.max_tokens or 2**62, tokens_without_gradient(device))
    collator = replace(collator, max_tokens=budget)
    units = as_units(samples, collator)
    parts = split_by_tokens(units, collator.layout, budget)
    for part in [*parts, *[[]] * (passes(len(parts)) - len(parts))]:
        batch = collator.one_pass(part)
        found = {
            name: values.to(torch.promote_types(values.dtype, torch.float32)).cpu().numpy()
            for name, values in columns_of(batch.to(device)).items()
        }
        ends = np.cumsum(batch.counts.numpy())
        for sample, end, size in zip((s for unit in part for s in unit), ends, batch.counts.tolist()):
            for name, values in found.items():
                sample.write_trained(name, values[end - size : end])
