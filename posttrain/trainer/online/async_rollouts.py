"""AsyncRollouts: groups are written beside the training, by a thread of this process with a shadow of the weights, or by workers
outside of it (rollout/feed/platform.py).

    rollout thread:   pull work -> write -> judge -> finish            (engine on the shadow)
    trainer:          next_window -> credit -> step -> publish weights

In order, groups of several labels are written at once: each label has a thread and a shadow of its own. Threads begin with the
first window and end with the training.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import SaveStrategy

from posttrain.core.processes import RollCall
from posttrain.models.sharding import reshard
from posttrain.rewards.reward_set import RewardSet
from posttrain.rollout.collector import RolloutCollector, Written
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams
from posttrain.rollout.engines.weight_sync import WeightSync
from posttrain.rollout.episodes.writing import AnyRows
from posttrain.rollout.feed.board import Board, Shadow, trained_weights
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import Group, joined_groups, nothing_written
from posttrain.rollout.feed.journal import Journal
from posttrain.rollout.feed.judging import Judge
from posttrain.rollout.feed.pacing import IN_ORDER, MASK
from posttrain.rollout.feed.platform import Platform, Seat, Threads
from posttrain.rollout.feed.processes import WorkerProcesses
from posttrain.rollout.feed.replay import ReplayFeed
from posttrain.rollout.feed.worker import CONTINUE, KEEP, RESTART, RolloutWorker, SentByTrainer, TrainersOwn, Writing
from posttrain.rollout.prompt_rows import PromptRow, StreamedPrompts
from posttrain.rollout.rollout import DATASET, POLICY, Request, Rollout, versions_of
from posttrain.rollout.schedule import Schedule
from posttrain.trainer.online.agents import Agents
from posttrain.trainer.online.authors import other_authors
from posttrain.trainer.options.async_rollouts import RAY
from posttrain.trainer.options.online import OnlineConfig

STOP_SECONDS = 60.0
OLDEST_SHOWN = 8
"""Ages of tokens are counted one by one up to this, or to the bound; what is older counts there."""


class WrittenAhead(Protocol):
    """What is asked of a trainer whose rollouts are written beside its steps."""

    args: OnlineConfig
    state: TrainerState
    model: nn.Module
    engine: RolloutEngine
    collector: RolloutCollector
    rewards: RewardSet
    rollout_func: Any
    shown_pixels: Any
    weight_sync: WeightSync
    agents: Agents | None
    is_fully_sharded: bool

    def local_engine(self, model: nn.Module) -> RolloutEngine: ...

    def engine_maker(self, **options: Any) -> Callable[[nn.Module], RolloutEngine]: ...

    def author_in_training(self, request: Request) -> str: ...

    def authors(self) -> set[str]: ...


class AsyncRollouts(TrainerCallback):
    """Of one process. As `groups` of a FedSource it hands out windows; as a callback it learns of steps."""

    def __init__(self, run: WrittenAhead, rows: AnyRows, params: SamplingParams, row_of: Callable[[int], int]) -> None:
        """`row_of`: which row of the dataset the prompt of a number is."""
        self.run, self.rows, self.params = run, rows, params
        args = run.args
        self.own = own_groups(args.schedule(), args.process_index)
        self.journal = Journal(args.output_dir, args.process_index)
        self.feed = self._feed()
        self.roll_call = RollCall(args.process_index, args.world_size, args.ddp_timeout)
        self.feed.while_waiting = self.roll_call.waits
        self.row_of = row_of
        self.platform: Platform | None = None
        self._rows: dict[int, PromptRow] = {}  # of a stream: it is read once
        self._taken: list[tuple[int, int]] = []  # numbers in the feed and rows of them, which are still kept
        self._next = 0  # number in the feed up to which it was read
        self._reading = threading.Lock()
        self.is_resumed = False
        self._last_window = 0.0  # when the last one was taken
        self._sent: dict[str, float] = {}  # what it took to send weights to other programs, the last time
        self._held: list[float] = []  # seconds of the training that weights took, since the last window
        self._needed: dict[int, int] = {}  # step of a checkpoint -> the oldest number that it needs of the journal

    def _feed(self) -> Feed | ReplayFeed:
        args = self.run.args
        how = (args.pace(), args.lead())
        if args.replay_from is not None:
            return ReplayFeed(args.replay_from, args.process_index, args.world_size, *how, self._row)
        return Feed(*how, self._prompt, self._row, self.journal, patience=args.heartbeat_stale_after_s)

    def _prompt(self, number: int) -> tuple[int, int]:
        """Each process writes the groups that it trains on, as without a lead."""
        window, place = divmod(number, len(self.own))
        prompt = window * self.run.args.schedule().prompts + self.own[place]
        return prompt, self.row_of(prompt)

    def _row(self, row: int) -> PromptRow:
        with self._reading:
            if not isinstance(self.rows, StreamedPrompts):
                return self._read(row)
            while row not in self._rows:  # workers ask in any order, and a stream is read in its own
                number = min(self._prompt(self._next)[1], row)
                self._rows[number] = self._read(number)
                self._next += 1
            return self._rows[row]

    def _read(self, row: int) -> PromptRow:
        return replace(self.rows.take([row])[row], media=getattr(self.run.shown_pixels, "media", None))

    # ---- as groups of a source ---------------------------------------------------------------------------------------

    def next_window(self) -> Written:
        if self.platform is None and not self.is_replay:
            self._start()
        self.feed.trained(self.run.state.global_step)
        with self.roll_call.together():
            groups = self.feed.next_window()
        if self.run.args.save_strategy == SaveStrategy.NO:  # else `on_save` does
            self._trim([self.feed.oldest_open(), *self._needed.values()])
        now = time.monotonic()
        since, self._last_window = max(now - self._last_window, 1e-9), now
        idle = self.feed.waited / since
        if self.feed.windows > 1:  # nothing can be written ahead of the first
            self.feed.lead.after_window(idle)
        written = self._joined(groups)
        shares = {"trainer_idle": idle, "overlap": self.feed.overlap_seconds() / since}
        idle_seconds = self.feed.idle_seconds()
        shares |= {f"worker_idle/{name}": seconds / since for name, seconds in idle_seconds.items()}
        waiting = {f"async/{name}": min(share, 1.0) for name, share in shares.items()}
        written.numbers |= self._numbers(groups, now) | waiting | self._sent | self._pauses()
        written.numbers["async/workers_up"] = float(len(idle_seconds))
        return written

    def further(self, count: int) -> Written:
        with self.roll_call.together():
            groups = self.feed.further(count)
        written = self._joined(groups) if groups else nothing_written(len(self.run.rewards.names))
        written.numbers |= {"async/wait_s": self.feed.waited} | self._totals()
        return written

    def _joined(self, groups: Sequence[Group]) -> Written:
        self._taken += [(group.number, group.written.rollouts[0].request.row) for group in groups]
        oldest = self.feed.oldest_needed()
        for row in (row for number, row in self._taken if number < oldest):
            self._rows.pop(row, None)
        self._taken = [(number, row) for number, row in self._taken if number >= oldest]
        written = joined_groups(groups, self.feed.waited)
        written.numbers = self._mask_old(written.rollouts) if self.run.args.on_stale == MASK else {}
        return written

    def state(self) -> dict[str, Any]:
        """What weights that no checkpoint has must write is written first: a resumed run could not."""
        if self.feed.pace.order == IN_ORDER:
            with self.roll_call.together():
                self.feed.wait_until_written(self.run.state.global_step)
        self._needs()
        return self.feed.state()

    def _needs(self) -> None:
        self._needed[self.run.state.global_step] = self.feed.oldest_open()

    def load_state(self, state: dict[str, Any]) -> None:
        self.is_resumed = True
        if not self.is_replay:
            self._next = min(state["ledger"]["live"], default=state["ledger"]["begun"])
            self.feed.step = self.run.state.global_step
        self.feed.load_state(state)
        self._needs()

    @property
    def is_replay(self) -> bool:
        return self.run.args.replay_from is not None

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        run, args = self.run, self.run.args
        if not self.is_resumed:
            self.journal.forget(args.world_size)
        step = run.state.global_step
        self.feed.trained(step)
        episodes = run.collector.writer.episodes
        row_of = lambda work: self._row(work.row)  # noqa: E731
        at_once = args.async_order == IN_ORDER or not self.is_ahead  # its last bits depend on what is written beside it
        writing = Writing(row_of, self.params, episodes, run.author_in_training, args.num_generations, at_once)
        judge = Judge(run.rewards, run.state, self.feed.finish, run.collector.release)
        how = {"in_flight": args.update_in_flight, "keeps_cache": args.kv_after_update == KEEP}
        if args.rollout_workers is None:
            self.platform = self._threads(writing, judge, how)
        else:
            self.platform = self._remote_workers(writing, judge, how)
        self._last_window = time.monotonic()
        self.platform.start()

    def _remote_workers(self, writing: Writing, judge: Judge, how: dict[str, Any]) -> Platform:
        args, agents, pixels = self.run.args, self.run.agents, self.run.shown_pixels
        plays = agents is not None and agents.environments is not None
        if plays:
            how |= {"environments": agents.environments, "reward_timeout": args.reward_timeout}
        if pixels is not None:
            how["sent"] = lambda row: row.carrying(pixels.carrying, looks=plays)
        model, how["pieces"] = self._whole_model()
        options = {} if pixels is None else {"pixels": pixels.without_datasets()}
        given = (model, self.run.engine_maker(**options), writing, self.feed, judge, self._labels_at_once())
        if args.rollout_workers != RAY:
            return WorkerProcesses(worker_devices(args), *given, **how)
        from posttrain.rollout.feed.ray_platform import RayWorkers

        asked = args.worker_resources or ({"GPU": 1} if args.device.type == "cuda" else {"CPU": 1})
        devices = ["cuda" if asked.get("GPU") else "cpu"] * args.ray_workers
        return RayWorkers(devices, *given, ray_address=args.ray_address, resources=asked, **how)

    def _whole_model(self) -> tuple[nn.Module, list[nn.Parameter] | None]:
        """What workers are made of. Of a model that lies in pieces: a whole copy, and the pieces that are trained. All processes
        gather it together, each for workers of its own."""
        run = self.run
        if not run.is_fully_sharded:
            return run.model, None
        made, pieces = run.engine.whole_copy(), trained_weights(run.model, run.engine)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name in pieces)
        return made, [pieces[name] for name, _ in made.named_parameters() if name in pieces]

    def _threads(self, writing: Writing, judge: Judge, how: dict[str, Any]) -> Threads:
        run, args, board = self.run, self.run.args, None
        gathered = run.engine if run.is_fully_sharded else None
        others = run.authors() - {POLICY, DATASET}
        # an engine that gathers would do so when it likes
        if not args.use_vllm and (self.is_ahead or run.is_fully_sharded):
            dtype = args.compute_dtype if run.is_fully_sharded else None
            board = Board([*trained_weights(run.model, gathered).values()], sharded_dtype=dtype)
            self._publish(board, run.state.global_step)

        def make_worker(seat: Seat) -> Callable[[], None]:
            weights, engine, engines = TrainersOwn(run.state), run.engine, run.collector.writer.others
            if args.use_vllm:
                engine.labels_tokens = args.update_in_flight == CONTINUE
                self._sent = run.weight_sync.ready(run.state.global_step)
                weights = SentByTrainer(engine)
            elif board is not None:
                weights = Shadow(run.model, board, gathered)
                engine, engines = run.local_engine(weights.model), other_authors(run, others, weights.copied)
                for one in (engine, *engines.values()):
                    one.labels_tokens = args.update_in_flight == CONTINUE
            given = (engine, weights, writing, seat, judge.add, judge.poll)
            worker = RolloutWorker(seat.name, *given, others=engines, **how)
            return functools.partial(on_own_stream, args.device, worker.run)

        return Threads(self.feed, board, self._labels_at_once(), make_worker)

    def _labels_at_once(self) -> int:
        """In order, window b is written by the label of `lead` windows before: so many are between it and the trainer."""
        return 1 + int(self.feed.lead.value) if self.feed.pace.order == IN_ORDER else 1

    @property
    def is_ahead(self) -> bool:
        """Whether anything is ever written while the trainer trains."""
        lead = self.feed.lead
        return lead.adapts or lead.value > 0

    def stop(self) -> None:
        self.feed.stop()
        if self.platform is not None:
            self.platform.stop(STOP_SECONDS)
            self.platform = None
        self.journal.close()

    # ---- as a callback -----------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trim()

    def _trim(self, also: Sequence[int] = ()) -> None:
        """Of the journal, what no checkpoint needs may go, up to `also`. One that an earlier start left may need all."""
        args = self.run.args
        names = (path.name.removeprefix("checkpoint-") for path in Path(args.output_dir).glob("checkpoint-*"))
        kept = (int(name) for name in names if name.isdigit())  # and not those that are being written
        needed = [*also, *(self._needed.get(step, 0) for step in kept)]
        if needed and not args.keep_journal and not self.is_replay:
            self.feed.forget_before(min(needed))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_replay and state.global_step >= self.feed.steps:  # it was stopped there
            control.should_training_stop = True
        if self.platform is not None and state.global_step % args.weight_sync_steps == 0:
            began = time.perf_counter()
            if self.platform.board is not None:
                self._publish(self.platform.board, state.global_step)
            if args.use_vllm:
                self._restart_what_is_written(state.global_step)
                self._sent = self.run.weight_sync.ready(state.global_step)
            if self.platform.board is not None or args.use_vllm:
                self._held.append(time.perf_counter() - began)
        # Without a copy of the weights the engine is the trainer's, which may evaluate before it asks for a window.
        if self.is_ahead or (self.platform is not None and self.platform.board is not None):
            self.feed.trained(state.global_step)

    def _restart_what_is_written(self, step: int) -> None:
        """Of `update_in_flight="restart"`: servers are sent weights when no completion of the old ones is waited for."""
        if self.run.args.update_in_flight == RESTART:
            self.feed.trained(step)
            with self.roll_call.together():
                self.feed.wait_until_given_back()

    def _publish(self, board: Board, step: int) -> None:
        """The weights, and not what a forward has gathered of them."""
        reshard(self.run.model)
        board.publish(step, self.feed.oldest_label())

    # ---- ages --------------------------------------------------------------------------------------------------------

    def _mask_old(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Tokens that are too old for the last step of their window are not trained."""
        pace, masked, trained = self.feed.pace, 0, 0
        oldest = self.feed.windows * pace.steps - 1 - pace.max_staleness
        for rollout in rollouts:
            sample = rollout.sample
            is_old = sample.trained & (versions_of(rollout) < oldest)
            masked, trained = masked + int(is_old.sum()), trained + int(sample.trained.sum())
            sample.trained = sample.trained & ~is_old
        return {"async/masked_old_tokens": float(masked), "async/masked_share": masked / max(trained, 1)}

    def _pauses(self) -> dict[str, float]:
        """Mean seconds for which new weights held the training and a worker, by the host's clock."""
        board = None if self.platform is None else self.platform.board
        seconds = {"trainer_held": self._held, "worker_paused": [] if board is None else board.paused_seconds()}
        self._held = []
        return {f"sync/{name}_s": float(np.mean(measured)) for name, measured in seconds.items() if measured}

    def _numbers(self, groups: Sequence[Group], now: float) -> dict[str, float]:
        step = self.feed.windows * self.feed.pace.steps - 1  # the last one that trains on them
        ages = step - np.concatenate([trained_labels(group) for group in groups])
        seconds = [group.seconds for group in groups]
        return {
            "async/lead": self.feed.lead.value,
            "async/wait_s": self.feed.waited,
            "async/token_age/mean": float(ages.mean()) if len(ages) else 0.0,
            "async/token_age/p95": float(np.percentile(ages, 95)) if len(ages) else 0.0,
            "async/token_age/max": float(ages.max(initial=0)),
            "async/bound_used": float(ages.max(initial=0)) / max(self.feed.pace.max_staleness, 1),
            **self._age_parts(groups, step, now),
            "async/group_age/mean": float(np.mean([step - group.label for group in groups])),
            "async/group_age/max": float(max(step - group.label for group in groups)),
            "async/group_seconds/p50": float(np.median(seconds)),
            "async/group_seconds/p95": float(np.percentile(seconds, 95)),
            "async/group_seconds/max": max(seconds),
            **self._age_shares(ages),
            "async/journal_mb": self.journal.num_bytes / 2**20,
            **self._totals(),
        }

    def _totals(self) -> dict[str, float]:
        return {f"async/{name}": float(count) for name, count in self.feed.counts().items()}

    def _age_parts(self, groups: Sequence[Group], step: int, now: float) -> dict[str, float]:
        """Mean age of a token, split: what it had when its group was finished, and what came while the group waited."""
        known = [(group, trained_labels(group)) for group in groups if group.finished_step is not None]
        tokens = sum(len(labels) for _, labels in known)
        if not tokens:
            return {}
        written = sum(float((group.finished_step - labels).sum()) for group, labels in known)
        queued = sum((step - group.finished_step) * len(labels) for group, labels in known)
        return {
            "async/token_age/in_flight": written / tokens,
            "async/token_age/in_queue": queued / tokens,
            "async/queue_s": float(np.mean([now - group.finished_at for group, _ in known])),
        }

    def _age_shares(self, ages: np.ndarray) -> dict[str, float]:
        """A histogram: age -> share of the trained tokens."""
        oldest = min(self.feed.pace.max_staleness, OLDEST_SHOWN)
        counts = np.bincount(np.clip(ages, 0, oldest).astype(int), minlength=oldest + 1)
        return {f"async/token_age/share/{age}": count / max(len(ages), 1) for age, count in enumerate(counts.tolist())}


def trained_labels(group: Group) -> np.ndarray:
    """Of every trained token that was written, the label of the weights that wrote it."""
    rollouts = [rollout for rollout in group.written.rollouts if not rollout.is_given]
    return np.concatenate([np.zeros(0), *(versions_of(rollout)[rollout.sample.trained] for rollout in rollouts)])


def on_own_stream(device: torch.device, run: Callable[[], None]) -> None:
    """In a thread. On a GPU its kernels, which are small, come before those of the training, which fill the device."""
    if device.type != "cuda":
        return run()
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        run()


def worker_devices(args: OnlineConfig) -> list[str]:
    """Where the workers of a training process are: on free GPUs of this machine, in turn, or else on its own."""
    if args.device.type != "cuda":
        return [args.device.type] * args.rollout_workers
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = list(range(here, torch.cuda.device_count()))
    if not free:
        return [f"cuda:{args.device.index or 0}"] * args.rollout_workers
    first = int(os.environ.get("LOCAL_RANK", "0")) * args.rollout_workers
    return [f"cuda:{free[(first + number) % len(free)]}" for number in range(args.rollout_workers)]


def own_groups(schedule: Schedule, rank: int) -> list[int]:
    """Which groups of a window a process trains on."""
    return sorted({place // schedule.num_generations for place in schedule.places(rank)})


def asks_live_environments(reward: Any) -> bool:
    """And more of them than their `get_reward`."""
    own = getattr(getattr(reward, "function", None), "asks_environments_only", False)
    return getattr(reward, "takes_environments", False) and not own


def refuse_async(run: WrittenAhead, has_given_engine: bool = False) -> None:
    """What cannot be written beside the training, and is not seen by the options alone: before an engine is made."""
    args = run.args
    args.check_writers()
    if has_given_engine and not args.use_vllm and (args.async_lead != 0 or args.rollout_workers is not None):
        raise ValueError(
            "`engine` is given, and rollouts beside training use an engine of their own, over a copy of the weights: leave "
            "`engine` out (`rollout_engine` chooses a kind), or leave `async_rollouts` out."
        )
    if run.rollout_func is not None:
        raise ValueError("`rollout_func` is given the trainer, which trains meanwhile: leave `async_rollouts` out.")
    if args.rollout_workers == RAY and run.agents is not None and run.agents.shows_images:
        raise ValueError(
            "Tools or environments return images, which a worker keeps in `OUTPUT/media`, and actors of Ray may not have that "
            "folder. Set `rollout_workers` to a number of processes of this machine, or leave it out, and a thread writes."
        )
    asking = [reward.name for reward in run.rewards.rewards if asks_live_environments(reward)]
    if args.rollout_workers is not None and asking and run.agents is not None and run.agents.environments is not None:
        raise ValueError(
            f"The reward {asking[0]} takes `environments`, and worker processes keep theirs: give the environment a method "
            "`get_reward`, or leave `rollout_workers` out, and a thread writes."
        )
    others = sorted(run.authors() - {POLICY, DATASET})
    if others and args.rollout_workers is not None:
        raise ValueError(
            f"Of this run's completions the {others[0]} writes some, and worker processes have the weights of the policy alone: "
            "leave `rollout_workers` out, and a thread writes."
        )
    if others and getattr(args, "sync_ref_model", False):
        raise ValueError(
            f"Of this run's completions the {others[0]} writes some, and `sync_ref_model` changes its weights meanwhile: leave "
            "`async_rollouts` or `sync_ref_model` out."
        )
