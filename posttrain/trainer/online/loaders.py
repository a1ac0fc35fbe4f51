"""The loader of a split of an online run: its prompts, and the completions that a collector writes for them."""

from __future__ import annotations

from dataclasses import replace

from posttrain.data.collate import Collator
from posttrain.rollout.collector import RolloutCollector
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.eval_loader import EvalRolloutLoader
from posttrain.rollout.loader import RolloutLoader
from posttrain.rollout.prompt_rows import PromptRows, StreamedPrompts, StreamOrder
from posttrain.rollout.replay_buffer import ReplayBuffer
from posttrain.rollout.source import Prompts, PromptStream, RolloutSource
from posttrain.trainer.options.online import OnlineConfig

EVALUATION_SEED = 0x5EED  # evaluation draws other numbers than training, and the same ones each time


def rollout_loader(
    rows: PromptRows | StreamedPrompts,
    args: OnlineConfig,
    collator: Collator,
    collector: RolloutCollector | None,
    params: SamplingParams | None,
    is_training: bool,
    replay: ReplayBuffer | None = None,
) -> RolloutLoader | EvalRolloutLoader:
    """`collector` and `params` are None where a run is only explained: what such a loader would yield is counted, not generated."""
    rules = args.window_rules()
    if not is_training:
        size = (args.num_generations_eval or args.num_generations, args.eval_batch_size)
        params = params and replace(params, seed=params.seed ^ EVALUATION_SEED)
        return EvalRolloutLoader(rows, *size, params, collector, rules, collator, args.process_index, args.world_size)
    if isinstance(rows, StreamedPrompts):
        rows.rewind()
        order = StreamOrder()
    else:
        order = PromptStream(len(rows), args.seed, args.shuffle_dataset)
    schedule = args.schedule()
    prompts = Prompts(order, schedule, args.process_index)
    source = prompts if collector is None else RolloutSource(prompts, rows, params, collector, rules, replay)
    collator = replace(collator, max_tokens=args.max_tokens_per_pass)
    return RolloutLoader(source, schedule, collator, args.dataloader_pin_memory and args.device.type == "cuda")
