"""CollectingTrainer: from requests to the samples that are trained on or evaluated, and what is said about them on the way."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.core.processes import of_every_process
from posttrain.core.sample import Sample
from posttrain.losses.advantages import replay_scores, zero_variance
from posttrain.rewards.reward import RewardSet
from posttrain.rollout.collector import Collected, RolloutCollector, joined
from posttrain.rollout.loader import RolloutLoader
from posttrain.rollout.prompt_rows import PromptRows
from posttrain.rollout.replay_buffer import ReplayBuffer
from posttrain.rollout.rollout import Request, Rollout
from posttrain.trainer.agents import Agents, AnyRows
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.rollout_log import RolloutLog
from posttrain.trainer.rollout_metrics import as_tensors, rollout_metrics

FAILURES = "reward_failures/"  # and the kind: how many calls of rewards have failed since the beginning of the run
ENOUGH_TO_STOP = 8  # completions; where all of fewer fail, it may be bad luck
EVALUATION_SEED = 0x5EED  # evaluation draws other numbers than training, and the same ones each time


class CollectingTrainer(BaseTrainer):
    """What OnlineTrainer's dataloaders call. OnlineTrainer makes the parts."""

    collector: RolloutCollector
    rewards: RewardSet
    log_of_rollouts: RolloutLog
    replay: ReplayBuffer | None = None
    agents: Agents | None = None  # methods with tools set it before they call this class's __init__

    _rows: AnyRows  # the prompts that are answered now, and the seed of their noise
    _sampling_seed: int = 0
    _evaluated: list[Collected]  # so far, of the evaluation that is going on

    # ---- training ----------------------------------------------------------------------------------------------------

    def _collect_window(self, loader: RolloutLoader) -> list[Sample | None]:
        """This process's samples of a new window; None for those that take part in nothing."""
        self._rows, self._sampling_seed = self.train_dataset, self.args.sampling(()).seed
        collected = self._collect(loader.take_window())
        if self.args.drop_zero_variance:
            return self._refilled(loader, collected)
        self._heard(collected)
        if self.replay is not None:
            return self._replayed(loader, collected)
        return [self._trained_sample(rollout) for rollout in collected.rollouts]

    def _replayed(self, loader: RolloutLoader, collected: Collected) -> list[Sample | None]:
        """Groups that teach nothing give way to remembered ones; those that do are remembered."""
        teaching, flat = self._sorted_groups(collected)
        remembered = self.replay.draw(len(flat), loader.window_start)
        scores = replay_scores(collected.advantages, collected.totals, collected.table.groups)
        score_of = dict(zip(collected.table.groups.unique().tolist(), scores.tolist()))
        for group in teaching:
            samples = [self._trained_sample(rollout) for rollout in group if not rollout.masked]
            self.replay.add(score_of[group[0].group], samples)
        place = {group[0].group: samples for group, samples in zip(flat, remembered)}
        found: list[Sample | None] = []
        for group in self._groups_of(collected.rollouts):
            own = [self._trained_sample(rollout) for rollout in group]
            other = place.get(group[0].group, own)
            found += [*other, *[None] * (len(own) - len(other))]
        self.metrics.add("train", as_tensors({"rollouts/replayed_groups": len(remembered)}))
        return found

    def _refilled(self, loader: RolloutLoader, collected: Collected) -> list[Sample | None]:
        """Groups that teach, generated until there are enough of them; what is still missing then is filled with the others."""
        size, wanted = self.args.num_generations, loader.schedule.share // self.args.num_generations
        kept, spare = self._sorted_groups(collected)
        parts = [collected]
        for _ in range(self.args.refill_rounds):
            missing = of_every_process(max(wanted - len(kept), 0), self.args.world_size)
            if not any(missing):
                break
            parts.append(self._collect(loader.take_groups(missing)))
            more, others = self._sorted_groups(parts[-1])
            kept, spare = kept + more, spare + others
        groups = [*kept, *spare][:wanted]
        self._credit_together(joined(parts), groups)
        self.metrics.add("train", as_tensors({"rollouts/refilled_groups": len(kept) + len(spare) - wanted}))
        samples = [self._trained_sample(rollout) for group in groups for rollout in group]
        return samples + [None] * (wanted * size - len(samples))

    def _credit_together(self, collected: Collected, groups: list[list[Rollout]]) -> None:
        """What is trained on together is scaled together, whichever round of a refill it came with."""
        trained = of_every_process([group[0].group for group in groups], self.args.world_size)
        kept = torch.isin(collected.table.groups, torch.tensor([number for part in trained for number in part]))
        self.collector.credit_again(collected, kept)
        self._heard(collected)

    def _sorted_groups(self, collected: Collected) -> tuple[list[list[Rollout]], list[list[Rollout]]]:
        """(groups of this process that teach, the others)."""
        flat = zero_variance(collected.advantages, collected.table.groups)
        numbers = collected.table.groups.unique()  # in the order of `flat`
        is_flat = dict(zip(numbers.tolist(), flat.tolist()))
        groups = self._groups_of(collected.rollouts)
        return (
            [group for group in groups if not is_flat[group[0].group]],
            [group for group in groups if is_flat[group[0].group]],
        )

    @staticmethod
    def _groups_of(rollouts: list[Rollout]) -> list[list[Rollout]]:
        groups: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        return list(groups.values())

    def _collect(self, requests: list[Request]) -> Collected:
        collected = self.collector.collect(requests, self.state)
        if self.agents is not None:
            self.agents.collected()
        if len(collected.table.unwritten) >= ENOUGH_TO_STOP and collected.table.unwritten.all():
            errors = [rollout.error for rollout in collected.rollouts if rollout.error]
            raise RuntimeError(
                f"Not one of the {len(collected.table.unwritten)} completions of a generation could be written. "
                + (f"The first: {errors[0]}" if errors else "Another process says why.")
            )
        return collected

    def _heard(self, collected: Collected) -> None:
        """Counts, shows and keeps what will be trained on."""
        self._measure(collected, "train")
        self.metrics.count("num_tokens", sum(len(rollout.sample) for rollout in collected.rollouts))
        for kind, number in collected.table.failures.items():
            self.metrics.count(f"{FAILURES}{kind}", number)
        self.log_of_rollouts.hear(collected)

    def _measure(self, collected: Collected, mode: str) -> None:
        found = rollout_metrics(collected, self.rewards.names)
        if self.agents is not None:
            found |= self.agents.metrics(collected)
        self.metrics.add(mode, as_tensors(found))

    def _trained_sample(self, rollout: Rollout) -> Sample | None:
        if rollout.masked:
            return None
        if self.args.mask_truncated_completions and rollout.is_truncated:
            rollout.sample.trained = np.zeros_like(rollout.sample.trained)  # the store may still read the other
        return rollout.sample

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def _collect_evaluation(self, rows: PromptRows, requests: list[Request]) -> list[Sample | None]:
        self._rows, self._sampling_seed = rows, self.args.sampling(()).seed ^ EVALUATION_SEED
        collected = self._collect(requests)
        self._evaluated.append(collected)
        return [self._trained_sample(rollout) for rollout in collected.rollouts]

    def _finish_evaluation(self) -> None:
        """The numbers of all prompts together: the last ones of many are not a batch of their own."""
        evaluated, self._evaluated = self._evaluated, []
        self._measure(joined(evaluated), "eval")
