"""RolloutSource: the windows of a run. It deals prompts out, has them answered and credited, and returns units to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from posttrain.core.processes import of_every_process
from posttrain.core.sample import Sample
from posttrain.losses.advantages import replay_scores, zero_variance
from posttrain.rollout.collector import Collected, MethodHooks, RolloutCollector, Written, joined
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.episodes.writing import AnyRows
from posttrain.rollout.group_filter import GroupFilter
from posttrain.rollout.loader import Window
from posttrain.rollout.replay_buffer import ReplayBuffer
from posttrain.rollout.rollout import Request, Rollout
from posttrain.rollout.schedule import Schedule


class PromptOrder(Protocol):
    """Which row the `number`-th prompt of a run is."""

    num_rows: int | None  # of an epoch; None: not known

    def row(self, number: int) -> int: ...


class WindowsOfGroups(Protocol):
    """Who writes groups ahead."""

    def next_window(self) -> Written:
        """This process's samples of the next window."""

    def further(self, count: int) -> Written:
        """So many groups in the place of some of the last window."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptStream:
    """An endless order of rows: one permutation of the dataset after the other, each a function of (seed, epoch)."""

    def __init__(self, num_rows: int, seed: int, shuffle: bool, kept: Sequence[int] | None = None) -> None:
        """`kept`: the rows of the dataset that there are `num_rows` of. None: all."""
        self.num_rows, self.seed, self.shuffle, self.kept = num_rows, seed, shuffle, kept
        self._known: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def row(self, number: int) -> int:
        """The row of the `number`-th prompt of the run."""
        epoch, place = divmod(number, self.num_rows)
        if self._known[0] != epoch:
            self._known = (epoch, self._order(epoch))
        row = int(self._known[1][place])
        return row if self.kept is None else self.kept[row]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return torch.randperm(self.num_rows, generator=torch.Generator().manual_seed(self.seed + epoch)).numpy()


class Prompts:
    """Numbers the prompts of a run, and says which requests are this process's."""

    def __init__(self, order: PromptOrder, schedule: Schedule, rank: int = 0) -> None:
        self.order, self.schedule, self.rank = order, schedule, rank
        self.taken = 0  # by all processes

    @property
    def num_rows(self) -> int | None:
        return self.order.num_rows

    def take_window(self) -> list[Request]:
        """The requests of this process in the next generation batch."""
        schedule, first = self.schedule, self.taken
        self.taken += schedule.prompts
        size = schedule.num_generations
        return [self._request(first + place // size, place % size) for place in schedule.places(self.rank)]

    def take_groups(self, wanted: Sequence[int]) -> list[Request]:
        """Whole groups in the place of others: `wanted[r]` for process r; those of this process are returned."""
        first = self.taken + sum(wanted[: self.rank])
        self.taken += sum(wanted)
        numbers = range(first, first + wanted[self.rank])
        return [self._request(number, sample) for number in numbers for sample in range(self.schedule.num_generations)]

    def _request(self, number: int, sample: int) -> Request:
        return Request(self.order.row(number), number, sample)


@dataclass(frozen=True)
class WindowRules:
    """What becomes of the completions of a window."""

    drops_flat_groups: bool = False  # groups that teach nothing are generated again
    refill_rounds: int = 0
    masks_truncated: bool = False  # completions that were cut off are not trained


class RolloutSource:
    """What a RolloutLoader asks for the next window."""

    def __init__(
        self,
        prompts: Prompts,
        rows: AnyRows,
        params: SamplingParams,
        collector: RolloutCollector,
        rules: WindowRules,
        replay: ReplayBuffer | None = None,
        group_filter: GroupFilter | None = None,
    ) -> None:
        self.prompts, self.rows, self.params, self.collector = prompts, rows, params, collector
        self.rules, self.replay, self.group_filter = rules, replay, group_filter
        self.window_start = 0  # prompts that were taken before the window in use
        self.finished: list[Collected] = []  # what `take_finished` hands out

    @property
    def num_rows(self) -> int | None:
        return self.prompts.num_rows

    def next_window(self) -> Window:
        """This process's units of a new window."""
        self.window_start = self.prompts.taken
        collected = self._collect_window()
        if self.rules.drops_flat_groups:
            return self._refilled(collected)
        self.finished.append(collected)
        return self._arranged(collected.rollouts) if self.replay is None else self._replayed(collected)

    def take_finished(self) -> list[Collected]:
        """What was collected since the last call: to be logged, and kept."""
        finished, self.finished = self.finished, []
        return finished

    def _collect_window(self) -> Collected:
        return self._collect(self.prompts.take_window())

    def _collect_further(self, wanted: Sequence[int]) -> Collected:
        """So many groups of each process."""
        return self._collect(self.prompts.take_groups(wanted))

    def _collect(self, requests: list[Request]) -> Collected:
        return self._filtered(self.collector.collect(requests, self.rows, self.params))

    def _filtered(self, collected: Collected) -> Collected:
        if self.group_filter is not None:
            kept = self.group_filter.kept(collected, self.collector.world_size)
            self.collector.leave_out(collected, ~kept & ~collected.table.masked)
        return collected

    def _arranged(self, rollouts: list[Rollout]) -> Window:
        return arranged(rollouts, self.collector.method, self.rules)

    def _replayed(self, collected: Collected) -> Window:
        """Groups that teach nothing give way to remembered ones; those that do are remembered."""
        teaching, flat = _sorted_groups(collected)
        remembered = self.replay.draw(len(flat), self.window_start)
        totals = collected.totals.masked_fill(collected.table.compared().masked, float("nan"))
        scores = replay_scores(collected.advantages, totals, collected.table.groups)
        score_of = dict(zip(collected.table.groups.unique().tolist(), scores.tolist()))
        own = {group[0].group: self._arranged(group) for group in groups_of(collected.rollouts)}
        for group in teaching:
            number = group[0].group
            self.replay.add(score_of[number], [sample for unit in own[number] if unit is not None for sample in unit])
        place: dict[int, list[Sample]] = {group[0].group: samples for group, samples in zip(flat, remembered)}
        found: Window = []
        for number, units in own.items():
            other = [(sample,) for sample in place[number]] if number in place else units
            found += [*other, *[None] * (len(units) - len(other))]
        collected.numbers["rollouts/replayed_groups"] = len(remembered)
        return found

    def _refilled(self, collected: Collected) -> Window:
        """Groups that teach, generated until there are enough of them; what is still missing then is filled with the others."""
        schedule = self.prompts.schedule
        wanted = schedule.share // schedule.num_generations
        kept, spare = _sorted_groups(collected)
        parts = [collected]
        for _ in range(self.rules.refill_rounds):
            missing = of_every_process(max(wanted - len(kept), 0), schedule.world_size)
            if not any(missing):
                break
            parts.append(self._collect_further(missing))
            more, others = _sorted_groups(parts[-1])
            kept, spare = kept + more, spare + others
        groups = [*kept, *spare][:wanted]
        whole = joined(parts)
        self._credit_together(whole, groups)
        whole.numbers["rollouts/refilled_groups"] = len(kept) + len(spare) - wanted
        units = self._arranged([rollout for group in groups for rollout in group])
        a_group = len(units) // len(groups) if groups else schedule.num_generations
        return units + [None] * (wanted * a_group - len(units))

    def _credit_together(self, collected: Collected, groups: list[list[Rollout]]) -> None:
        """What is trained on together is scaled together, whichever round of a refill it came with."""
        trained = of_every_process([group[0].group for group in groups], self.prompts.schedule.world_size)
        kept = torch.isin(collected.table.groups, torch.tensor([number for part in trained for number in part]))
        self.collector.credit_again(collected, kept)
        self.finished.append(collected)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"taken": self.prompts.taken, "window_start": self.window_start}

    def load_state(self, state: dict[str, Any]) -> None:
        self.prompts.taken, self.window_start = state["taken"], state["window_start"]


class FedSource(RolloutSource):
    """Windows of groups that are written ahead (`rollout/feed`); what is compared and scored is so when a window is taken."""

    def __init__(self, *given: Any, groups: WindowsOfGroups, **named: Any) -> None:
        super().__init__(*given, **named)
        self.groups = groups

    def _collect_window(self) -> Collected:
        self.prompts.taken += self.prompts.schedule.prompts
        return self._completed(self.groups.next_window())

    def _collect_further(self, wanted: Sequence[int]) -> Collected:
        self.prompts.taken += sum(wanted)
        return self._completed(self.groups.further(wanted[self.prompts.rank]))

    def _completed(self, written: Written) -> Collected:
        self.collector.rewards.stop_if_too_many_failed(written.results, len(written.rollouts))
        return self._filtered(self.collector.complete(written))

    def state(self) -> dict[str, Any]:
        return super().state() | {"groups": self.groups.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.groups.load_state(state["groups"])


def arranged(rollouts: list[Rollout], method: MethodHooks, rules: WindowRules) -> Window:
    """The units of rollouts, group by group."""
    if rules.masks_truncated:
        rollouts = [_untrained(rollout) if rollout.is_truncated else rollout for rollout in rollouts]
    return method.arranged(groups_of(rollouts))


def _untrained(rollout: Rollout) -> Rollout:
    """A copy that trains no token, nor does its twin; the rollout itself is kept as it was written."""
    return replace(rollout, sample=_untrained_sample(rollout.sample))


def _untrained_sample(sample: Sample) -> Sample:
    twin = None if sample.twin is None else _untrained_sample(sample.twin)
    return replace(sample, trained=np.zeros_like(sample.trained), twin=twin)


def groups_of(rollouts: list[Rollout]) -> list[list[Rollout]]:
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    return list(groups.values())


def _sorted_groups(collected: Collected) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
    """(groups of this process that teach, the others)."""
    flat = zero_variance(collected.advantages, collected.table.groups)
    numbers = collected.table.groups.unique()  # in the order of `flat`
    is_flat = dict(zip(numbers.tolist(), flat.tolist()))
    groups = groups_of(collected.rollouts)
    return (
        [group for group in groups if not is_flat[group[0].group]],
        [group for group in groups if is_flat[group[0].group]],
    )
