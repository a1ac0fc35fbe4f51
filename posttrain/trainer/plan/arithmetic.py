"""What a run will do, counted before it begins: rows, tokens, passes, optimizer steps, generations, evaluations, checkpoints.

Nothing is estimated from averages. The run's own objects are asked (EpochBatches which rows come together, RolloutLoader which
prompts, transformers' Trainer how many steps that makes, its DefaultFlowCallback when it logs, evaluates and saves) in the order in
which Trainer's loop asks them, and no model is there. Only the loop itself is written again, in `walk`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
from posttrain.data.loader import EpochBatches, StreamBatches, UnitLoader
from posttrain.rollout.engines.protocol import FP8
from posttrain.rollout.loader import RolloutLoader, Window
from posttrain.rollout.rollout import DATASET, Request
from posttrain.rollout.schedule import Schedule
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

    @classmethod
    def of(cls, schedule: Schedule) -> Rollouts:
        return cls(
            prompts_per_generation=schedule.prompts,
            completions_per_generation=schedule.samples,
            steps_per_generation=schedule.window / schedule.accumulation,
        )


@dataclass
class TaskCount:
    """A task of `evals`."""

    name: str
    prompts: int
    answers: int  # each time
    times: int
    most_tokens: int  # written, in the whole run


def complete(side: BaseTrainer, train: Any, evaluation: Any) -> None:
    """Give a trainer without a model (`BaseTrainer.without_model`) what its loaders, `set_initial_training_values` and the
    questions about its reference read. Batches are laid out as counted here if the model allows it, which a probe decides later.
    """
    args = side.args
    side.train_dataset, side.eval_dataset = train, evaluation
    side._train_batch_size = args.train_batch_size
    side.model, side.accelerator = None, SimpleNamespace(parallelism_config=None)
    side.is_deepspeed_enabled = False  # asked for a tensor-parallel size, of which there is none
    side.optimizer = side.optimizer_cls_and_kwargs = side.custom_loss = None
    is_rounded = FP8 in (getattr(args, "rollout_kv_dtype", None), getattr(args, "rollout_weight_dtype", None))
    side.engine = SimpleNamespace(is_foreign=getattr(args, "use_vllm", False), rounds=is_rounded)
    side.replay = True if getattr(args, "replay_buffer_size", 0) else None
    layout = PADDED if args.layout == PADDED else SHARED if getattr(args, "share_prompts", False) else RAGGED
    pad = side.renderer.tokenizer.pad_token_id or 0
    side.data_collator = collator_of(None, side.roles, pad, layout, args, graphs=side.graphs)


# ---- micro-batches ---------------------------------------------------------------------------------------------------------

FIGURES = ("rows", "samples", "tokens", "trained", "passes", "micro_batches")
"""Of an optimizer step of all processes; NaN where one is not known. Tokens of online methods: at most so many."""


@dataclass
class Counted(Collator):
    """A Collator whose batches are what is counted about them: all FIGURES but the last."""

    def __call__(self, units: Sequence[Unit]) -> list[int]:
        samples = [sample for unit in units for sample in unit]
        figures = [len(units), len(samples), sum(map(len, samples)), sum(sample.num_trained for sample in samples)]
        return [*figures, len(split_by_tokens(units, self.layout, self.limit))]


def counting_loaders(side: BaseTrainer, loader: Any, rollouts: Rollouts | None) -> list[Any]:
    """The loaders of all processes, of the kind of `loader`, with a collator that counts."""
    args, dataset, ranks = side.args, side.train_dataset, range(side.args.readers)
    collate = Counted(**vars(side.row_collator) | {"max_tokens": args.max_tokens_per_pass})
    if rollouts is not None:
        prompts = [Prompts(loader.source.order, loader.schedule, rank) for rank in ranks]
        how = (loader.schedule, collate, False, loader.permutation_seed)
        return [RolloutLoader(PlannedWindows(mine, side, rollouts), *how) for mine in prompts]
    if isinstance(dataset, IterableDataset):
        return [StreamBatches(dataset, args.train_batch_size, rank, args.readers, collate) for rank in ranks]
    known = np.array([collate([dataset[row]]) for row in range(len(dataset))])  # once, however many epochs there are

    def counted(rows: list[int]) -> list[int]:
        figures = known[np.array(rows, dtype=np.int64)].sum(0)
        is_whole = collate.max_tokens is None
        return [*figures[:-1], 1 if is_whole else collate([dataset[row] for row in rows])[-1]]

    rows = {f.name: getattr(loader.batch_sampler, f.name) for f in fields(EpochBatches)}  # without partners
    samplers = [EpochBatches(**rows | {"rank": rank}) for rank in ranks]
    return [UnitLoader(range(len(dataset)), batch_sampler=mine, collate_fn=counted) for mine in samplers]


class PlannedWindows:
    """A RolloutSource that generates nothing: its samples are the longest that a completion of each prompt may be."""

    def __init__(self, prompts: Prompts, side: Any, found: Rollouts) -> None:
        self.prompts, self.args, self.found, self.num_rows = prompts, side.args, found, prompts.num_rows
        self.author_of, self.rows, self.is_rewarded = side.author_of, side.train_dataset, side.needs_rewards
        self.has_answers = getattr(side.train_dataset, "has_answers", False)
        prepared = getattr(side.train_dataset, "prepared", None)
        is_written = getattr(getattr(side, "agents", None), "environments", None) is not None
        self.lengths = None if is_written else getattr(prepared, "unit_lengths", None)  # None: not known before the run
        if self.lengths is None:
            found.prompt_tokens = found.most_tokens = None
        self.window_start = 0

    def next_window(self) -> Window:
        self.window_start = self.prompts.taken
        requests, found = self.prompts.take_window(), self.found
        given = [self.author_of(request) == DATASET for request in requests]
        written = [request for request, is_given in zip(requests, given) if not is_given]
        found.completions += len(written)
        if self.is_rewarded:
            found.reward_calls += REWARD_CALLS[self.args.reward_batching]([request.number for request in written])
        if self.prompts.rank == 0:
            found.generations += 1
            found.prompts += self.prompts.schedule.prompts
        return [(self._given(one) if is_given else self._longest(one),) for one, is_given in zip(requests, given)]

    def _longest(self, request: Request) -> Sample:
        """What the engine writes at most."""
        found, longest = self.found, self.args.max_completion_length
        prompt = 0 if self.lengths is None else int(self.lengths[request.row])
        if prompt and self.has_answers:  # the length is that of prompt and completion
            prompt = len(self.rows[request.row].ids)
        if self.lengths is not None:
            found.prompt_tokens += prompt
            found.most_tokens += prompt + longest
            found.longest_prompt = max(found.longest_prompt, prompt)
        return Sample(np.zeros(prompt + longest), np.arange(prompt + longest) >= max(prompt, 1), group=request.number)

    def _given(self, request: Request) -> Sample:
        """What the dataset brings; of a stream it is not known."""
        if self.lengths is None:
            return Sample(np.zeros(2), [False, True], group=request.number)
        return replace(self.rows[request.row].answer, group=request.number)


REWARD_CALLS = {"group": lambda groups: len(set(groups)), "sample": len, "all": lambda groups: 1}
"""Value of `reward_batching` -> calls of one reward function for the completions of one generation of one process."""


# ---- the loop --------------------------------------------------------------------------------------------------------------


@dataclass
class Events:
    """After which steps Trainer logs, saves and evaluates: what its default callback asks for."""

    args: Any
    state: TrainerState
    logged: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    evaluated: set[int] = field(default_factory=set)  # asked for, with or without rows
    control: TrainerControl = field(default_factory=TrainerControl)

    def after(self, moment: str) -> None:
        getattr(DefaultFlowCallback(), moment)(self.args, self.state, self.control)
        step, control = self.state.global_step, self.control
        if step and (control.should_log or self.args.logs_at(step, self.state)):
            self.logged.add(step)
        if control.should_evaluate:
            self.evaluated.add(step)
        if control.should_save:
            self.saved.add(step)
        control.should_log = control.should_evaluate = control.should_save = False


def walk(side: BaseTrainer, loaders: list[Any], events: Events, epochs: int, updates: int, micro_batches: int) -> Any:
    """(steps, FIGURES) of Trainer's loop over `epochs` of `updates` optimizer steps, without a model.

    `tests/cli/test_explain.py` compares the two.
    """
    args, state, steps = side.args, events.state, []
    accumulation = args.gradient_accumulation_steps
    last = micro_batches % accumulation or accumulation
    is_stream = isinstance(side.train_dataset, IterableDataset)
    unknown = [args.train_batch_size * args.readers, math.nan, math.nan, math.nan, args.readers]
    for epoch in range(epochs):
        for loader in loaders:
            loader.set_epoch(epoch)
        coming, seen = (np.sum(shares, axis=0) for shares in zip(*loaders)), 0
        for update in range(updates):
            if is_stream and len(steps) >= STREAM_STEPS_LOOKED_AT:
                coming = itertools.repeat(unknown)  # one that ends earlier than its steps is met by the run, not here
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
    return np.array(steps, dtype=np.float64).reshape(-1, len(FIGURES))


class RunCounts:
    """Everything that can be counted about the run of `side`, which `complete` has seen. `evals`: its tasks."""

    def __init__(self, side: BaseTrainer, evals: Sequence[EvalSpec] = ()) -> None:
        args, dataset, loader = side.args, side.train_dataset, side.get_train_dataloader()
        _refuse_no_batch(args, dataset, loader)
        epochs, updates, _, _, _, micro_batches, max_steps = side.set_initial_training_values(args, loader)
        state = TrainerState(max_steps=max_steps)
        state.compute_steps(args, max_steps)
        events = Events(args, state)
        self.rollouts = Rollouts.of(loader.schedule) if isinstance(loader, RolloutLoader) else None
        steps = walk(side, counting_loaders(side, loader, self.rollouts), events, epochs, updates, micro_batches)
        self.per_step = {name: Range.of(column) for name, column in zip(FIGURES, steps.T)}
        if self.rollouts is not None:
            self.per_step["rows"] = self.per_step["samples"]  # units are groups, or what a micro-batch has of them
        self.steps_counted = int((~np.isnan(steps).any(axis=1)).sum())
        self.processes = args.world_size
        self.rows_of_dataset = len(dataset) if hasattr(dataset, "__len__") else None
        self.optimizer_steps, self.steps_per_epoch, self.epochs = state.global_step, updates, float(state.epoch or 0)
        self.warmup_steps, self.logs = args.get_warmup_steps(max_steps), len(events.logged)
        self.checkpoints, is_known = len(events.saved), args.save_strategy != SaveStrategy.BEST
        kept = min(self.checkpoints, args.save_total_limit or self.checkpoints)
        self.checkpoints_kept = kept if is_known else None
        self.evaluations = len(events.evaluated) + args.eval_on_start if side.eval_dataset is not None else 0
        self.eval_rows = self.eval_batches = self.eval_completions = None
        if hasattr(side.eval_dataset, "__len__"):
            self.eval_rows, self.eval_batches = len(side.eval_dataset), len(side.get_eval_dataloader())
            if self.rollouts is not None:
                self.eval_completions = self.eval_rows * (args.num_generations_eval or args.num_generations)
        self.tasks = [_count_task(side, spec, evals, events) for spec in evals]
        self.notes: list[str] = []
        self._note_unknowns(args)

    def as_json(self) -> dict[str, Any]:
        rollouts = None if self.rollouts is None else asdict(self.rollouts)
        per_step = {name: asdict(found) for name, found in self.per_step.items()}
        return vars(self) | {"per_step": per_step, "rollouts": rollouts, "tasks": [asdict(task) for task in self.tasks]}

    def _note_unknowns(self, args: Any) -> None:
        rollouts, notes = self.rollouts, self.notes
        if self.checkpoints_kept is None:
            notes.append("Checkpoints are written when an evaluation is the best so far: their number is not known.")
        if self.steps_counted < self.optimizer_steps:
            notes.append(f"Tokens are those of the first {self.steps_counted} optimizer steps: the data are a stream.")
        if args.max_tokens_per_pass is not None:
            notes.append(
                "Passes are for batches that lie as the model is expected to take them; it is asked when it is loaded."
            )
        if rollouts is None:
            return
        rollouts.is_at_least = args.drop_zero_variance
        most = 1 + args.refill_rounds if args.drop_zero_variance else 1
        rollouts.most_prompts = rollouts.prompts * most
        if args.drop_zero_variance:
            notes.append(
                f"`drop_zero_variance`: groups without a difference are generated again, up to {args.refill_rounds} times; "
                f"prompts, completions and calls of rewards are at least those given, and at most {most} times as many."
            )
        if rollouts.prompt_tokens is None:
            notes.append("Tokens of the prompts are not known before the run: a stream or an environment brings them.")


def _count_task(side: BaseTrainer, spec: EvalSpec, evals: Sequence[EvalSpec], events: Events) -> TaskCount:
    """When `TaskEvals` runs it: before the first step, after the last, and in between as the spec says."""
    last = events.state.global_step
    asked = events.saved | events.evaluated
    steps = {0, last} | {step for step in range(1, last + 1) if is_due(spec, step, step in asked)}
    if side.eval_dataset is not None and is_read(spec, best_metric(side.args, evals)):
        steps |= events.evaluated
    prompts = len(spec.rows(side.renderer, side.args.chat_template_kwargs))
    answers = prompts * spec.samples
    return TaskCount(spec.name, prompts, answers, len(steps), len(steps) * answers * spec.max_new_tokens)


def _refuse_no_batch(args: Any, dataset: Any, loader: Any) -> None:
    if hasattr(dataset, "__len__") and not len(loader):
        raise ValueError(
            f"`dataloader_drop_last` leaves no batch: {len(dataset)} rows are fewer than the {args.train_batch_size} x "
            f"{args.readers} of `per_device_train_batch_size` and the processes. Lower it, or keep the last batch."
        )
