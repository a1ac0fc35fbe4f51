"""ReplayBuffer: past groups that still teach something, for the place of new ones that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from posttrain.core.sample import Sample
from posttrain.rollout.loader import pack_samples, unpack_samples

Group = list[Sample]


class ReplayBuffer:
    """The `size` groups of highest score so far. A group is scored by sum |A| times the deviation of its rewards."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.groups: list[tuple[float, Group]] = []  # best first

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, score: float, group: Group) -> None:
        """Keep a group that teaches, if it is among the best; of equal scores the earlier one stays in front."""
        if score > 0 and group:
            self.groups.append((score, group))
            self.groups.sort(key=lambda pair: -pair[0])
            del self.groups[self.size :]

    def draw(self, count: int, moment: int) -> list[Group]:
        """Up to `count` different groups, more likely ones of high score; a function of (seed, moment) and what is stored."""
        count = min(count, len(self.groups))
        if not count:
            return []
        scores = np.array([score for score, _ in self.groups])
        rng = np.random.default_rng((self.seed, moment))
        chosen = rng.choice(len(self.groups), size=count, replace=False, p=scores / scores.sum())
        return [self.groups[index][1] for index in chosen]

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "scores": torch.tensor([score for score, _ in self.groups], dtype=torch.float64),
            "sizes": torch.tensor([len(group) for _, group in self.groups], dtype=torch.int64),
            "samples": pack_samples([sample for _, group in self.groups for sample in group]),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        samples = iter(unpack_samples(state["samples"]))
        self.groups = [
            (score, [next(samples) for _ in range(size)])
            for score, size in zip(state["scores"].tolist(), state["sizes"].tolist())
        ]
