"""What a run will do, counted before it begins: rows, tokens, passes, optimizer steps, generations, evaluations, checkpoints.

Nothing is estimated from averages. The run's own objects are asked (EpochBatches which rows come together, RolloutLoader which
prompts, transformers' Trainer how many steps that makes, its DefaultFlowCallback when it logs, evaluates and saves) in the order in
which Trainer's loop asks them, and no model is there. Only the loop itself is written again, in `walk`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import SaveStrategy

from posttrain.core.batch import PADDED, RAGGED, SHARED, passes_of
from posttrain.data.collate import Collator, split_by_tokens
from posttrain.data.loader import EpochBatches, StreamBatches
from posttrain.rollout.loader import RolloutLoader
from posttrain.trainer.online.task_evals import best_metric, is_due, is_read
from posttrain.trainer.options.base import SharedPromptsConfig

if TYPE_CHECKING:
    from posttrain.evaluation.spec import EvalSpec
    from posttrain.trainer.base import BaseTrainer

STREAM_STEPS_LOOKED_AT = 100
"""Rows of a stream must be read and tokenised to be counted; after so many optimizer steps only their number is known."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward of every process sees together. `tokens` of online methods: at most so many."""

    rows: int
    samples: int
    tokens: int
    trained: int
    passes: int
    is_known: bool = True  # tokens, not only rows


@dataclass(frozen=True)
class Step(MicroBatch):
    """One optimizer step: the sums of its micro-batches."""

    micro_batches: int = 0

    @classmethod
    def of(cls, parts: Sequence[MicroBatch]) -> Step:
        names = ("rows", "samples", "tokens", "trained", "passes")
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        return cls(**sums, is_known=all(part.is_known for part in parts), micro_batches=len(parts))


@dataclass(frozen=True)
class Range:
    """Of a figure over the optimizer steps of a run."""

    smallest: int
    mean: float
    largest: int
    total: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Range:
        if not len(values):
            return cls(0, 0.0, 0, 0)
        return cls(min(values), sum(values) / len(values), max(values), sum(values))


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- a trainer without a model ---------------------------------------------------------------------------------------------


def planned_layout(side: BaseTrainer) -> str:
    """How batches will lie if the model agrees: a probe decides when it is loaded."""
    args = side.args
    if args.layout == PADDED or args.neftune_noise_alpha is not None:
        return PADDED
    return SHARED if isinstance(args, SharedPromptsConfig) and args.share_prompts else RAGGED


def complete(side: BaseTrainer, train: Any, evaluation: Any) -> None:
    """Give a trainer without a model (`BaseTrainer.without_model`) what its loaders, `set_initial_training_values` and the
    questions about its reference read.
    """
    args = side.args
    side.train_dataset, side.eval_dataset = train, evaluation
    side._train_batch_size = args.train_batch_size
    side.model, side.accelerator = None, SimpleNamespace(parallelism_config=None)
    side.is_deepspeed_enabled = False  # asked for a tensor-parallel size, of which there is none
    side.optimizer = side.optimizer_cls_and_kwargs = side.custom_loss = None
    side.engine = SimpleNamespace(is_foreign=getattr(args, "use_vllm", False))
    side.data_collator = Collator(
        side.roles, side.renderer.tokenizer.pad_token_id or 0, planned_layout(side), args.pad_multiple
    )


# ---- micro-batches, epoch by epoch -----------------------------------------------------------------------------------------


class Source(Protocol):
    """The micro-batches of all processes, in order."""

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[MicroBatch]: ...


class StoredBatches:
    """Of a dataset whose rows are known: the batch samplers of all processes are asked side by side."""

    def __init__(self, side: BaseTrainer, sampler: EpochBatches) -> None:
        self.dataset, self.layout = side.train_dataset, side.data_collator.layout
        self.max_tokens = side.args.max_tokens_per_pass
        self.samplers = []
        for rank in range(sampler.world_size):
            self.samplers.append(copy.copy(sampler))
            self.samplers[rank].rank = rank
        self.samples, self.tokens, self.trained = figures_of_units(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for shares in zip(*self.samplers):
            rows = [row for share in shares for row in share]
            sums = (int(figure[rows].sum()) for figure in (self.samples, self.tokens, self.trained))
            yield MicroBatch(len(rows), *sums, sum(map(self._passes, shares)))

    def _passes(self, rows: list[int]) -> int:
        if self.max_tokens is None:
            return 1
        return len(split_by_tokens([self.dataset[row] for row in rows], self.layout, self.max_tokens))


def figures_of_units(dataset: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(samples, tokens, trained tokens) of each unit. The first token of a sample is never predicted."""
    found = np.zeros((3, len(dataset)), dtype=np.int64)
    for index in range(len(dataset)):
        unit = dataset[index]
        found[:, index] = len(unit), sum(map(len, unit)), sum(int(sample.trained[1:].sum()) for sample in unit)
    return found[0], found[1], found[2]


class StreamedBatches:
    """Of a stream: read, as the run will, for the first optimizer steps; after those the number of rows is all that is known."""

    def __init__(self, side: BaseTrainer) -> None:
        args = side.args
        self.processes, self.rows = args.world_size, args.train_batch_size * args.world_size
        self.batches = StreamBatches(side.train_dataset, self.rows, 0, 1, side.data_collator)
        self.looked_at = STREAM_STEPS_LOOKED_AT * args.gradient_accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in self.batches:
            if self.looked_at <= 0:
                break
            self.looked_at -= 1
            parts = passes_of(batch)
            counted = ((part.num_units, part.num_samples, part.num_tokens, part.num_trained) for part in parts)
            yield MicroBatch(*map(sum, zip(*counted)), self.processes)
        else:
            return
        while True:  # a stream that ends earlier than its steps is met by the run, not here
            yield MicroBatch(self.rows, 0, 0, 0, self.processes, is_known=False)


class PlannedRollouts(RolloutLoader):
    """A RolloutLoader that generates nothing: its samples are the longest that a completion of each prompt may be."""

    def __init__(self, side: Any, loader: RolloutLoader) -> None:
        self.prompts = loader.source
        super().__init__(self, loader.schedule, _micro_batch_of)
        self.side, self.args = side, side.args
        self.ranks = range(loader.schedule.world_size)
        self.lengths = prompt_lengths(side)
        self.rollouts = Rollouts(
            prompts_per_generation=loader.schedule.prompts,
            completions_per_generation=loader.schedule.samples,
            steps_per_generation=loader.schedule.window / loader.schedule.accumulation,
        )
        self.shares: list[list[int]] = []

    @property
    def num_rows(self) -> int | None:
        return self.prompts.num_rows

    def next_window(self) -> list[Any]:
        """One generation: counted, not made. Rank by rank, as `take_window` deals requests out."""
        first, found, longest = self.prompts.taken, self.rollouts, self.args.max_completion_length
        self.shares = []
        for rank in self.ranks:
            self.prompts.rank, self.prompts.taken = rank, first
            requests = self.prompts.take_window()
            known = [0 if self.lengths is None else int(self.lengths[request.row]) for request in requests]
            self.shares.append([length + longest for length in known])
            found.completions += len(requests)
            found.reward_calls += REWARD_CALLS[self.args.reward_batching]([request.number for request in requests])
            if self.lengths is not None:
                found.prompt_tokens += sum(known)
                found.most_tokens += sum(self.shares[-1])
                found.longest_prompt = max(found.longest_prompt, *known)
        found.generations += 1
        found.prompts += self.schedule.prompts
        if self.lengths is None:
            found.prompt_tokens = found.most_tokens = None
        return []

    def _units(self, micro_batch: int) -> list[Any]:
        size = self.schedule.batch_size
        return [share[micro_batch * size : (micro_batch + 1) * size] for share in self.shares]


REWARD_CALLS = {"group": lambda groups: len(set(groups)), "sample": len, "all": lambda groups: 1}
"""Value of `reward_batching` -> calls of one reward function for the completions of one generation of one process."""


def _micro_batch_of(shares: list[list[int]]) -> MicroBatch:
    samples = sum(map(len, shares))
    return MicroBatch(samples, samples, sum(map(sum, shares)), 0, len(shares))


def prompt_lengths(side: Any) -> np.ndarray | None:
    """Tokens of each prompt; None where they are not known before the run."""
    prepared = getattr(side.train_dataset, "prepared", None)
    environments = getattr(getattr(side, "agents", None), "environments", None)
    if environments is not None or not hasattr(prepared, "unit_lengths"):
        return None
    return np.asarray(prepared.unit_lengths)


def source_of(side: BaseTrainer, loader: Any) -> Source:
    if isinstance(loader, RolloutLoader):
        return PlannedRollouts(side, loader)
    return (
        StreamedBatches(side)
        if isinstance(side.train_dataset, IterableDataset)
        else StoredBatches(side, loader.batch_sampler)
    )


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


def walk(source: Source, events: Events, epochs: int, updates: int, micro_batches: int) -> list[Step]:
    """Trainer's loop over `epochs` of `updates` optimizer steps, without a model. `tests/cli/test_explain.py` compares the two."""
    args, state, steps = events.args, events.state, []
    accumulation = args.gradient_accumulation_steps
    last = micro_batches % accumulation or accumulation
    for epoch in range(epochs):
        source.set_epoch(epoch)
        coming, seen = iter(source), 0
        for update in range(updates):
            parts = list(itertools.islice(coming, last if update == updates - 1 else accumulation))
            seen += len(parts)
            if not parts or (seen % accumulation and seen != micro_batches):
                continue  # the data ended inside of a step, which is not taken then
            steps.append(Step.of(parts))
            state.global_step += 1
            state.epoch = epoch + seen / micro_batches
            events.after("on_step_end")
            if events.control.should_training_stop:
                break
        events.control.should_training_stop |= seen == 0
        events.after("on_epoch_end")
        if events.control.should_training_stop:
            break
    return steps


def count_run(side: BaseTrainer, evals: Sequence[EvalSpec] = ()) -> RunCounts:
    """Everything that can be counted about the run of `side`, which `complete` has seen. `evals`: its tasks."""
    args = side.args
    loader = side.get_train_dataloader()
    _refuse_no_batch(args, side.train_dataset, loader)
    epochs, updates, _, _, _, micro_batches, max_steps = side.set_initial_training_values(args, loader)
    state = TrainerState(max_steps=max_steps)
    state.compute_steps(args, max_steps)
    events = Events(args, state, side.eval_dataset is not None)
    source = source_of(side, loader)
    steps = walk(source, events, epochs, updates, micro_batches)
    events.evaluations += bool(args.eval_on_start and side.eval_dataset is not None)
    known = [step for step in steps if step.is_known]
    counts = RunCounts(
        processes=args.world_size,
        rows_of_dataset=len(side.train_dataset) if hasattr(side.train_dataset, "__len__") else None,
        optimizer_steps=state.global_step,
        steps_per_epoch=updates,
        epochs=float(state.epoch or 0),
        warmup_steps=args.get_warmup_steps(max_steps),
        logs=events.logs,
        evaluations=events.evaluations,
        checkpoints=len(events.saved),
        checkpoints_kept=_kept(args, len(events.saved)),
        per_step=_ranges(steps, known),
        steps_counted=len(known),
        rollouts=getattr(source, "rollouts", None),
    )
    counts.tasks = [_count_task(side, spec, evals, events) for spec in evals]
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


def _ranges(steps: list[Step], known: list[Step]) -> dict[str, Range]:
    always = {name: Range.of([getattr(step, name) for step in steps]) for name in ("rows", "micro_batches", "passes")}
    counted = {name: Range.of([getattr(step, name) for step in known]) for name in ("samples", "tokens", "trained")}
    return always | counted


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
