"""RolloutCollector: requests -> episodes -> rewards -> advantages, written on Samples.

Rewards are worked on while other completions are still being written: a group goes to them as soon as its last sample (of this
process) is over. Groups may lie on several processes; what is compared within a group is therefore gathered first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from posttrain.core.processes import of_every_process
from posttrain.core.sample import Unit
from posttrain.losses.advantages import weighted_rewards
from posttrain.rewards.reward_set import Judged, RewardResults, RewardSet
from posttrain.rewards.runtime.results import joined_results
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.episodes.writing import AnyRows, Writer
from posttrain.rollout.prompt_rows import COMPLETION, with_pictures
from posttrain.rollout.rollout import Request, Rollout

ENOUGH_TO_STOP = 8  # completions; where all of fewer fail, it may be bad luck


class MethodHooks(Protocol):
    """What is a method's own between a completion and the units that are trained on."""

    state: Any  # of the run: rewards are shown it, and its `global_step` is the version of the weights

    def author_of(self, request: Request) -> str:
        """Who writes this request: POLICY or another of its `authors`."""

    def annotate(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        """Write old and reference log-probs, and whatever else is known of finished rollouts, on their samples; numbers of those
        that cannot be trained on, and why."""

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        """(N,) advantages of the samples of all processes; `totals` are their weighted rewards, NaN where there is none."""

    def spread(self, rollouts: list[Rollout]) -> None:
        """Write the advantage of each token on rollouts that have their `advantage`."""

    def arranged(self, groups: list[list[Rollout]]) -> list[Unit | None]:
        """The units of these groups; None for what takes part in nothing. As many for each group."""


@dataclass
class GroupTable:
    """What advantages are made of: the samples of all processes, groups not necessarily adjacent."""

    rewards: Tensor  # (N, K) float64; NaN: no opinion
    groups: Tensor  # (N,) number of the group
    masked: Tensor  # (N,) bool: takes part in nothing
    lengths: Tensor  # (N,) trained tokens
    truncated: Tensor  # (N,) bool
    unwritten: Tensor  # (N,) bool: there is no completion, only the reason why
    kl_sums: Tensor  # (N,) sum over a sample's tokens of old - reference log-prob; 0 without a reference
    mine: Tensor  # rows of this process's samples
    # (N,) bool: left out by a filter of groups; its reward is logged and compared with nothing
    filtered: Tensor | None = None
    failures: Counter[str] = field(default_factory=Counter)  # kind ("error", "timeout", ...) -> rewards that failed so

    def only(self, kept: Tensor) -> GroupTable:
        """The rows that `kept` (N,) bool marks."""
        columns = {name: getattr(self, name)[kept] for name in COLUMNS}
        place = kept.long().cumsum(0) - 1
        filtered = None if self.filtered is None else self.filtered[kept]
        return GroupTable(**columns, mine=place[self.mine[kept[self.mine]]], filtered=filtered, failures=self.failures)

    def compared(self) -> GroupTable:
        """As methods see it: what was filtered out takes part in nothing."""
        return self if self.filtered is None else replace(self, masked=self.masked | self.filtered)


COLUMNS = ("rewards", "groups", "masked", "lengths", "truncated", "unwritten", "kl_sums")
"""What a GroupTable says about each sample."""


@dataclass
class Written:
    """Rollouts of this process with their rewards, in the order of their requests. Nothing is compared or scored yet."""

    rollouts: list[Rollout]
    values: np.ndarray  # (n, K) rewards; NaN: no opinion, or not judged
    results: RewardResults  # of those that were judged
    seconds: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass
class Collected:
    """The rollouts of one call, or of several that belong together, and the numbers of all processes about them."""

    rollouts: list[Rollout]
    table: GroupTable
    totals: Tensor  # (N,) weighted sum of the rewards of each sample of all processes
    advantages: Tensor  # (N,) of all processes
    results: RewardResults
    seconds: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)  # more to log: what sending weights took, refills


class RolloutCollector:
    """Collects rollouts for one process. Every process must call `collect` equally often."""

    def __init__(
        self,
        writer: Writer,
        rewards: RewardSet,
        method: MethodHooks,
        world_size: int = 1,
        release: Callable[[list[Any]], None] = lambda environments: None,
    ) -> None:
        """`release` is given the environments of episodes that have their rewards."""
        self.writer, self.rewards, self.method = writer, rewards, method
        self.world_size, self.release = world_size, release

    def collect(self, requests: Sequence[Request], rows: AnyRows, params: SamplingParams) -> Collected:
        return self.complete(self.write(requests, rows, params))

    def write(self, requests: Sequence[Request], rows: AnyRows, params: SamplingParams) -> Written:
        """Completions and their rewards."""
        began, state = time.perf_counter(), self.method.state
        pending = PendingRewards(requests)
        with self.rewards.open(state) as judged:
            pending.reward_round = judged
            authors = [self.method.author_of(request) for request in requests]
            took = self.writer.write(rows, requests, params, state.global_step, pending.on_finished, authors)
            written = time.perf_counter()
            results = judged.finish()
        seconds = {"generate": written - began, "reward_wait": time.perf_counter() - written}
        rollouts = pending.with_rewards(results, self.rewards.names)
        self.release([rollout.environment for rollout in rollouts if rollout.environment is not None])
        return Written(rollouts, pending.values(results), results, seconds, took)

    def complete(self, written: Written) -> Collected:
        """What the trainer's weights say of them, and what the samples of all processes say of each other."""
        rollouts, results, began = written.rollouts, written.results, time.perf_counter()
        kept = [rollout for rollout in rollouts if not rollout.masked]
        for number, why in (self.method.annotate(kept) or {}).items():
            kept[number].masked, kept[number].error = True, why
        annotated = time.perf_counter()
        table = gathered(rollouts, written.values, results.failure_counts(), self.world_size)
        totals, advantages = self.credited(rollouts, table)
        refuse_if_all_failed(rollouts, table)
        seconds = written.seconds | {"annotate": annotated - began}
        return Collected(rollouts, table, totals, advantages, results, seconds, written.numbers)

    def credited(self, rollouts: list[Rollout], table: GroupTable) -> tuple[Tensor, Tensor]:
        """Writes rewards and advantages on `rollouts`, which are `table.mine`; gives those of all processes."""
        weights = torch.tensor(self.rewards.weights, dtype=torch.float64)
        totals = weighted_rewards(table.rewards, weights).masked_fill(table.masked, float("nan"))
        compared = table.compared()
        advantages = self.method.credit(compared, totals.masked_fill(compared.masked, float("nan")))
        for rollout, total, advantage in zip(rollouts, totals[table.mine].tolist(), advantages[table.mine].tolist()):
            rollout.reward, rollout.advantage = total, advantage
        self.method.spread(rollouts)
        return totals, advantages

    def credit_again(self, collected: Collected, kept: Tensor) -> None:
        """As if only the samples that `kept` (N,) bool marks had been collected: what is scaled by others is scaled by these."""
        table = collected.table
        is_mine_kept = kept[table.mine].tolist()
        rollouts = [rollout for rollout, is_kept in zip(collected.rollouts, is_mine_kept) if is_kept]
        _, advantages = self.credited(rollouts, table.only(kept))
        collected.advantages = collected.advantages.masked_scatter(kept, advantages)

    def leave_out(self, collected: Collected, filtered: Tensor) -> None:
        """The samples that `filtered` (N,) bool marks are not trained on, and the others are compared among themselves."""
        table = collected.table
        table.filtered = filtered
        for rollout, is_out in zip(collected.rollouts, filtered[table.mine].tolist()):
            rollout.masked = rollout.masked or is_out
        collected.totals, collected.advantages = self.credited(collected.rollouts, table)
        collected.numbers["rollouts/filtered"] = filtered.double().mean().item()


class PendingRewards:
    """Puts rollouts back into the order of their requests, and hands whole groups to the rewards."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.members: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            self.members.setdefault(request.number, []).append(index)
        self.missing = {number: len(indices) for number, indices in self.members.items()}
        self.order: list[int] = []  # indices of requests, in the order in which they went to the rewards
        self.reward_round: Any = None

    def on_finished(self, index: int, rollout: Rollout) -> None:
        self.rollouts[index] = rollout
        number = rollout.request.number
        self.missing[number] -= 1
        if self.missing[number]:
            return
        indices = [i for i in self.members[number] if not self.rollouts[i].masked]
        if indices:
            self.order += indices
            self.reward_round.add([judged(self.rollouts[i]) for i in indices])

    def with_rewards(self, results: RewardResults, names: list[str]) -> list[Rollout]:
        places = {index: place for place, index in enumerate(self.order)}
        failures: dict[int, list[Any]] = {}
        for failure in results.failures:
            failures.setdefault(failure.sample, []).append(failure)
        for index, place in places.items():
            rollout = self.rollouts[index]
            rollout.rewards = dict(zip(names, results.values[place].tolist()))
            rollout.masked = rollout.masked or bool(results.masked[place])
            rollout.failures = failures.get(place, [])
            rollout.extras = {
                name: column[place] for name, column in results.extras.items() if column[place] is not None
            }
        return self.rollouts

    def values(self, results: RewardResults) -> np.ndarray:
        """(requests, K) in the order of the requests; NaN for what was not judged."""
        values = np.full((len(self.rollouts), results.values.shape[1]), np.nan)
        values[self.order] = results.values
        return values


def refuse_if_all_failed(rollouts: list[Rollout], table: GroupTable) -> None:
    if len(table.unwritten) >= ENOUGH_TO_STOP and table.unwritten.all():
        errors = [rollout.error for rollout in rollouts if rollout.error]
        raise RuntimeError(
            f"Not one of the {len(table.unwritten)} completions of a generation could be written. "
            + (f"The first: {errors[0]}" if errors else "Another process says why.")
        )


def judged(rollout: Rollout) -> Judged:
    """As rewards see it, pictures included; a group shares those of its row, which are sent to a worker once."""
    columns, pictures = rollout.columns, rollout.pictures
    if pictures and COMPLETION in columns:
        columns = columns | {COMPLETION: with_pictures(columns[COMPLETION], pictures)}
    said = [with_pictures(messages, pictures) for messages in (rollout.prompt, rollout.completion)]
    return Judged(*said, rollout.completion_ids.tolist(), columns, rollout.environment)


def gathered(rollouts: list[Rollout], values: np.ndarray, failures: Counter[str], world_size: int) -> GroupTable:
    """The samples of all processes in one table, process after process."""
    kl = [float(rollout.sample.scalars.get("kl_sum", 0.0)) for rollout in rollouts]
    mine = {
        "rewards": values,
        "groups": np.array([rollout.group for rollout in rollouts], dtype=np.int64),
        "masked": np.array([rollout.masked for rollout in rollouts], dtype=bool),
        "lengths": np.array([rollout.sample.num_trained for rollout in rollouts], dtype=np.int64),
        "truncated": np.array([rollout.is_truncated for rollout in rollouts], dtype=bool),
        "unwritten": np.array([rollout.is_unwritten for rollout in rollouts], dtype=bool),
        "kl_sums": np.array(kl, dtype=np.float64),
    }
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    parts, counts = zip(*of_every_process((mine, failures), world_size))
    sizes = [len(part["groups"]) for part in parts]
    start = sum(sizes[:rank])
    columns = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in mine}
    return GroupTable(**columns, mine=torch.arange(start, start + sizes[rank]), failures=sum(counts, Counter()))


def joined(parts: Sequence[Collected]) -> Collected:
    """Several collections as one: a mean over them weighs every sample alike, whichever it came with."""
    if len(parts) == 1:
        return parts[0]
    tables = [part.table for part in parts]
    firsts = np.cumsum([0, *(len(table.groups) for table in tables[:-1])]).tolist()
    table = GroupTable(
        **{name: torch.cat([getattr(table, name) for table in tables]) for name in COLUMNS},
        mine=torch.cat([table.mine + first for table, first in zip(tables, firsts)]),
        filtered=None if tables[0].filtered is None else torch.cat([table.filtered for table in tables]),
        failures=sum((table.failures for table in tables), Counter()),
    )
    return Collected(
        [rollout for part in parts for rollout in part.rollouts],
        table,
        torch.cat([part.totals for part in parts]),
        torch.cat([part.advantages for part in parts]),
        joined_results([part.results for part in parts]),
        {phase: sum(part.seconds[phase] for part in parts) for phase in parts[0].seconds},
        {name: number for part in parts for name, number in part.numbers.items()},
    )
