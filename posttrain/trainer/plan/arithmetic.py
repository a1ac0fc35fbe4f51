"""What a run will do, counted before it begins: rows, tokens, passes, optimizer steps, generations, evaluations, checkpoints.

Nothing is estimated from averages. The run's own objects are asked (EpochBatches which rows come together, RolloutLoader which
prompts, transformers' Trainer how many steps that makes, its DefaultFlowCallback when it logs, evaluates and saves) in the order in
which Trainer's loop asks them, and no model is there. Only the loop itself is written again, in `walk`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import SaveStrategy

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample, Unit
from posttrain.data.collate import Collator, split_by_tokens
from posttrain.data.loader import EpochBatches, StreamBatches
from posttrain.rollout.loader import RolloutLoader, Window
from posttrain.rollout.rollout import Request
from posttrain.rollout.source import Prompts
from posttrain.trainer.construction import collator_of
from posttrain.trainer.online.task_evals import best_metric, is_due, is_read

if TYPE_CHECKING:
    from posttrain.evaluation.spec import EvalSpec
    from posttrain.trainer.base import BaseTrainer

STREAM_STEPS_LOOKED_AT = 100
"""Rows of a stream must be read and tokenised to be counted; after so many optimizer steps only their number is known."""


@dataclass(frozen=True)
class Range:
    """Of a figure over the optimizer steps of a run."""

    smallest: int
    mean: float
    largest: int
    total: int

    @classmethod
    def of(cls, values: np.ndarray) -> Range:
        """Those that are known."""
        values = values[~np.isnan(values)].astype(np.int64)
        if not len(values):
            return cls(0, 0.0, 0, 0)
        total = int(values.sum())
        return cls(int(values.min()), total / len(values), int(values.max()), total)


@dataclass
class Rollouts:
    """What an online run generates. Exact unless groups are replaced (`is_at_least`)."""

    generations: int = 0
    prompts: int = 0
    completions: int = 0
    prompt_tokens: int | None = 0  # of the prompts as engines get them; None: environments write them
    most_tokens: int | None = 0  # prompts, once for each completion, and the longest completions
    reward_calls: int = 0  # of each reward function
    longest_prompt: int = 0
    prompts_per_generation: int = 0
    completions_per_generation: int = 0
    steps_per_generation: float = 0.0
    is_at_least: bool = False
    most_prompts: int = 0  # with all groups replaced as often as `refill_rounds` allows


@dataclass
class TaskCount:
    """A task of `evals`."""

    name: str
    prompts: int
    answers: int  # each time
    times: int
    most_tokens: int  # written, in the whole run


@dataclass
class RunCounts:
    """All figures of a run. `per_step` holds a Range for rows, samples, tokens, trained tokens, micro-batches and passes."""

    processes: int
    rows_of_dataset: int | None
    optimizer_steps: int
    steps_per_epoch: int
    epochs: float
    warmup_steps: int
    logs: int
    evaluations: int
    checkpoints: int
    checkpoints_kept: int | None
    per_step: dict[str, Range]
    steps_counted: int
    eval_rows: int | None = None
    eval_batches: int | None = None
    eval_completions: int | None = None
    rollouts: Rollouts | None = None
    tasks: list[TaskCount] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def complete(side: BaseTrainer, train: Any, evaluation: Any) -> None:
    """Give a trainer without a model (`BaseTrainer.without_model`) what its loaders, `set_initial_training_values` and the
    questions about its reference read. Batches will lie as is said here if the model agrees: a probe decides when it is loaded.
    """
    args = side.args
    side.train_dataset, side.eval_dataset = train, evaluation
    side._train_batch_size = args.train_batch_size
    side.model, side.accelerator = None, SimpleNamespace(parallelism_config=None)
    side.is_deepspeed_enabled = False  # asked for a tensor-parallel size, of which there is none
    side.optimizer = side.optimizer_cls_and_kwargs = side.custom_loss = None
    side.engine = SimpleNamespace(is_foreign=getattr(args, "use_vllm", False))
    side.replay = True if getattr(args, "replay_buffer_size", 0) else None
    layout = PADDED if args.layout == PADDED else SHARED if getattr(args, "share_prompts", False) else RAGGED
    side.data_collator = collator_of(None, side.roles, side.renderer.tokenizer.pad_token_id or 0, layout, args)


# ---- micro-batches, epoch by epoch -----------------------------------------------------------------------------------------

FIGURES = ("rows", "samples", "tokens", "trained", "passes")
"""What is counted about a micro-batch of all processes; NaN where it is not known. Tokens of online methods: at most so many."""
Batches = Callable[[int], Iterable[list[float]]]
"""Epoch -> the figures of its micro-batches, in order."""


def figures_of(units: Sequence[Unit]) -> list[int]:
    samples = [sample for unit in units for sample in unit]
    return [len(units), len(samples), sum(map(len, samples)), sum(sample.num_trained for sample in samples)]


def stored_batches(side: BaseTrainer, sampler: EpochBatches) -> Batches:
    """Of a dataset whose rows are known: the batch samplers of all processes are asked side by side."""
    dataset, layout, most = side.train_dataset, side.data_collator.layout, side.args.max_tokens_per_pass
    samplers = [replace(sampler, rank=rank) for rank in range(sampler.world_size)]
    known = np.array([figures_of([dataset[row]]) for row in range(len(dataset))])

    def passes(rows: list[int]) -> int:
        return 1 if most is None else len(split_by_tokens([dataset[row] for row in rows], layout, most))

    def batches(epoch: int) -> Iterator[list[float]]:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for shares in zip(*samplers):
            rows = [row for share in shares for row in share]
            yield [*known[rows].sum(0), sum(map(passes, shares))]

    return batches


def streamed_batches(side: BaseTrainer) -> Batches:
    """Of a stream: read, as the run will, for the first optimizer steps; after those the number of rows is all that is known."""
    args = side.args
    rows, processes = args.train_batch_size * args.world_size, args.world_size
    stream = StreamBatches(side.train_dataset, rows, 0, 1, figures_of)
    looked_at = iter(range(STREAM_STEPS_LOOKED_AT * args.gradient_accumulation_steps))

    def batches(epoch: int) -> Iterator[list[float]]:
        stream.set_epoch(epoch)
        for figures in stream:
            if next(looked_at, None) is None:
                break
            yield [*figures, processes]
        else:
            return
        # a stream that ends earlier than its steps is met by the run, not here
        yield from itertools.repeat([rows, math.nan, math.nan, math.nan, processes])

    return batches


class PlannedWindows:
    """A RolloutSource that generates nothing: its samples are the longest that a completion of each prompt may be."""

    def __init__(self, prompts: Prompts, side: Any, found: Rollouts) -> None:
        self.prompts, self.args, self.lengths, self.found = prompts, side.args, prompt_lengths(side), found

    @property
    def num_rows(self) -> int | None:
        return self.prompts.num_rows

    def next_window(self) -> Window:
        requests, found = self.prompts.take_window(), self.found
        prompts = [0 if self.lengths is None else int(self.lengths[request.row]) for request in requests]
        found.completions += len(requests)
        found.reward_calls += REWARD_CALLS[self.args.reward_batching]([request.number for request in requests])
        if self.prompts.rank == 0:
            found.generations += 1
            found.prompts += self.prompts.schedule.prompts
        if self.lengths is None:
            found.prompt_tokens = found.most_tokens = None
        else:
            found.prompt_tokens += sum(prompts)
            found.most_tokens += sum(prompts) + len(requests) * self.args.max_completion_length
            found.longest_prompt = max(found.longest_prompt, *prompts)
        return [self._longest(request, prompt) for request, prompt in zip(requests, prompts)]

    def _longest(self, request: Request, prompt: int) -> Unit:
        length = prompt + self.args.max_completion_length
        return (Sample(np.zeros(length), np.arange(length) >= max(prompt, 1), group=request.number),)


@dataclass
class Counted(Collator):
    """A Collator whose batches are what is counted about them."""

    def __call__(self, units: Sequence[Unit]) -> list[int]:
        return [*figures_of(units), len(split_by_tokens(units, self.layout, self.max_tokens))]


def rollout_batches(side: Any, loader: RolloutLoader, found: Rollouts) -> Batches:
    """The loaders of all processes side by side."""
    prompts, schedule = loader.source, loader.schedule
    collate = Counted(**vars(loader.collate))
    sources = [
        PlannedWindows(Prompts(prompts.order, schedule, rank), side, found) for rank in range(schedule.world_size)
    ]
    loaders = [RolloutLoader(source, schedule, collate) for source in sources]

    def batches(epoch: int) -> Iterator[list[float]]:
        for one in loaders:
            one.set_epoch(epoch)
        for parts in zip(*loaders):
            figures = np.sum(parts, axis=0)
            yield [figures[1], *figures[1:]]  # units are groups, or what a micro-batch has of them

    return batches


REWARD_CALLS = {"group": lambda groups: len(set(groups)), "sample": len, "all": lambda groups: 1}
"""Value of `reward_batching` -> calls of one reward function for the completions of one generation of one process."""


def prompt_lengths(side: Any) -> np.ndarray | None:
    """Tokens of each prompt; None where they are not known before the run."""
    prepared = getattr(side.train_dataset, "prepared", None)
    environments = getattr(getattr(side, "agents", None), "environments", None)
    if environments is not None or not hasattr(prepared, "unit_lengths"):
        return None
    return np.asarray(prepared.unit_lengths)


# ---- the loop --------------------------------------------------------------------------------------------------------------


@dataclass
class Events:
    """What Trainer's default callback asks for, counted as Trainer does it."""

    args: Any
    state: TrainerState
    has_evaluation: bool
    logs: int = 0
    evaluations: int = 0
    saved: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)  # an evaluation was asked for, with or without rows
    last_logged: int = 0
    control: TrainerControl = field(default_factory=TrainerControl)

    def after(self, moment: str) -> None:
        getattr(DefaultFlowCallback(), moment)(self.args, self.state, self.control)
        step = self.state.global_step
        if (self.control.should_log or self.args.logs_at(step, self.state)) and step > self.last_logged:
            self.logs, self.last_logged = self.logs + 1, step
        if self.control.should_evaluate:
            self.evaluations += self.has_evaluation
            self.evaluated.add(step)
        if self.control.should_save:
            self.saved.add(step)
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False


def walk(batches: Batches, events: Events, epochs: int, updates: int, micro_batches: int) -> np.ndarray:
    """(steps, FIGURES and micro-batches) of Trainer's loop over `epochs` of `updates` optimizer steps, without a model.

    `tests/cli/test_explain.py` compares the two.
    """
    args, state, steps = events.args, events.state, []
    accumulation = args.gradient_accumulation_steps
    last = micro_batches % accumulation or accumulation
    for epoch in range(epochs):
        coming, seen = iter(batches(epoch)), 0
        for update in range(updates):
            parts = list(itertools.islice(coming, last if update == updates - 1 else accumulation))
            seen += len(parts)
            if not parts or (seen % accumulation and seen != micro_batches):
                continue  # the data ended inside of a step, which is not taken then
            steps.append([*np.sum(parts, axis=0), len(parts)])
            state.global_step += 1
            state.epoch = epoch + seen / micro_batches
            events.after("on_step_end")
            if events.control.should_training_stop:
                break
        events.control.should_training_stop |= seen == 0
        events.after("on_epoch_end")
        if events.control.should_training_stop:
            break
    return np.array(steps, dtype=np.float64).reshape(-1, len(FIGURES) + 1)


def count_run(side: BaseTrainer, evals: Sequence[EvalSpec] = ()) -> RunCounts:
    """Everything that can be counted about the run of `side`, which `complete` has seen. `evals`: its tasks."""
    args, dataset, rollouts = side.args, side.train_dataset, None
    loader = side.get_train_dataloader()
    _refuse_no_batch(args, dataset, loader)
    epochs, updates, _, _, _, micro_batches, max_steps = side.set_initial_training_values(args, loader)
    state = TrainerState(max_steps=max_steps)
    state.compute_steps(args, max_steps)
    events = Events(args, state, side.eval_dataset is not None)
    if isinstance(loader, RolloutLoader):
        schedule = loader.schedule
        rollouts = Rollouts(
            prompts_per_generation=schedule.prompts,
            completions_per_generation=schedule.samples,
            steps_per_generation=schedule.window / schedule.accumulation,
        )
        batches = rollout_batches(side, loader, rollouts)
    elif isinstance(dataset, IterableDataset):
        batches = streamed_batches(side)
    else:
        batches = stored_batches(side, loader.batch_sampler)
    steps = walk(batches, events, epochs, updates, micro_batches)
    per_step = {name: Range.of(column) for name, column in zip((*FIGURES, "micro_batches"), steps.T)}
    counts = RunCounts(
        processes=args.world_size,
        rows_of_dataset=len(dataset) if hasattr(dataset, "__len__") else None,
        optimizer_steps=state.global_step,
        steps_per_epoch=updates,
        epochs=float(state.epoch or 0),
        warmup_steps=args.get_warmup_steps(max_steps),
        logs=events.logs,
        evaluations=events.evaluations + bool(args.eval_on_start and side.eval_dataset is not None),
        checkpoints=len(events.saved),
        checkpoints_kept=_kept(args, len(events.saved)),
        per_step=per_step,
        steps_counted=int((~np.isnan(steps).any(axis=1)).sum()),
        rollouts=rollouts,
        tasks=[_count_task(side, spec, evals, events) for spec in evals],
    )
    _count_evaluation(side, counts)
    _note_what_is_open(side, counts)
    return counts


def _count_task(side: BaseTrainer, spec: EvalSpec, evals: Sequence[EvalSpec], events: Events) -> TaskCount:
    """When `TaskEvals` runs it: before the first step, after the last, and in between as the spec says."""
    last = events.state.global_step
    asked = events.saved | events.evaluated
    steps = {0, last} | {step for step in range(1, last + 1) if is_due(spec, step, step in asked)}
    if events.has_evaluation and is_read(spec, best_metric(side.args, evals)):
        steps |= events.evaluated
    prompts = len(spec.rows(side.renderer, side.args.chat_template_kwargs))
    answers = prompts * spec.samples
    return TaskCount(spec.name, prompts, answers, len(steps), len(steps) * answers * spec.max_new_tokens)


def _refuse_no_batch(args: Any, dataset: Any, loader: Any) -> None:
    if hasattr(dataset, "__len__") and not len(loader):
        raise ValueError(
            f"`dataloader_drop_last` leaves no batch: {len(dataset)} rows are fewer than the {args.train_batch_size} x "
            f"{args.world_size} of `per_device_train_batch_size` and the processes. Lower it, or keep the last batch."
        )


def _kept(args: Any, written: int) -> int | None:
    if args.save_strategy == SaveStrategy.BEST:
        return None
    return written if not args.save_total_limit else min(written, args.save_total_limit)


def _count_evaluation(side: BaseTrainer, counts: RunCounts) -> None:
    dataset = side.eval_dataset
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    counts.eval_rows, counts.eval_batches = len(dataset), len(side.get_eval_dataloader())
    if counts.rollouts is not None:
        counts.eval_completions = len(dataset) * (side.args.num_generations_eval or side.args.num_generations)


def _note_what_is_open(side: BaseTrainer, counts: RunCounts) -> None:
    args = side.args
    if args.save_strategy == SaveStrategy.BEST:
        counts.notes.append("Checkpoints are written when an evaluation is the best so far: their number is not known.")
    if counts.steps_counted < counts.optimizer_steps:
        counts.notes.append(
            f"Tokens are those of the first {counts.steps_counted} optimizer steps: the data are a stream."
        )
    if args.max_tokens_per_pass is not None:
        counts.notes.append(
            "Passes are for batches that lie as the model is expected to take them; it is asked when it is loaded."
        )
    if counts.rollouts is None:
        return
    counts.rollouts.most_prompts = counts.rollouts.prompts
    if args.drop_zero_variance:
        counts.rollouts.is_at_least = True
        counts.rollouts.most_prompts = counts.rollouts.prompts * (1 + args.refill_rounds)
        counts.notes.append(
            f"`drop_zero_variance`: groups without a difference are generated again, up to {args.refill_rounds} times; prompts, "
            f"completions and calls of rewards are at least those given, and at most {1 + args.refill_rounds} times as many."
        )
    if counts.rollouts.prompt_tokens is None:
        counts.notes.append(
            "Tokens of the prompts are not known before the run: a stream or an environment brings them."
        )
