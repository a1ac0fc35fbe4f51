"""From rewards to advantages: how much better a completion was than what it is compared with.

Rewards are (N, K), one row for each completion and one column for each reward function, NaN where a function has no
opinion. `groups` is (N,) integers: completions of one prompt share a number; groups may be of any size, in any order.
A completion that takes no part (masked, or without any opinion) has a NaN reward here: it is in no statistics and
its own advantage is 0. Where all rewards that a completion is compared with are equal, its advantage is exactly 0 and
not the rounding error of a mean: an optimizer such as Adam would blow that error up to a full step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it."""
DEVIATIONS = {"sample": 1, "population": 0}
"""Value of `advantage_std` -> `ddof`: a variance is the sum of squares over the number of rewards less this."""


def weighted_rewards(rewards: Tensor, weights: Tensor | None = None, masked: Tensor | None = None) -> Tensor:
    """(N, K) -> (N,): sum_k w_k r_k over the functions that have an opinion; NaN for a row without any, or masked."""
    rewards = _without(rewards, masked)
    summed = (rewards if weights is None else rewards * weights.to(rewards)).nansum(dim=1)
    return summed.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_normalised(
    rewards: Tensor, groups: Tensor, scale: str = "group", epsilon: float = EPSILON, ddof: int = 1
) -> Tensor:
    """GRPO, arXiv:2402.03300 section 4.1.2: A = (r - mean of its group) / (std + epsilon), with the sample std (`ddof` 1).

    The std is that of the group, or with `scale` "batch" of the whole batch (arXiv:2508.08221); "none" divides by nothing
    (Dr. GRPO, arXiv:2503.20783). (N,) rewards -> (N,) advantages.
    """
    if scale not in REWARD_SCALES:
        raise ValueError(f"scale_rewards {scale!r} is unknown; take one of {', '.join(REWARD_SCALES)}.")
    table = _Groups.of(rewards, groups, ddof)
    return table.differences / REWARD_SCALES[scale](table, epsilon)


def normalised_then_summed(
    rewards: Tensor,
    groups: Tensor,
    weights: Tensor | None = None,
    masked: Tensor | None = None,
    epsilon: float = EPSILON,
    ddof: int = 1,
) -> Tensor:
    """GDPO, arXiv:2601.05242: each reward is normalised in its group before they are summed. (N, K) -> (N,).

    z_k = (r_k - mean of its group) / (std of its group + epsilon), z = sum_k w_k z_k, A = (z - mean) / (std + epsilon)
    with mean and std over the batch. A function without opinion adds nothing to its row.
    """
    rewards = _without(rewards, masked)
    scaled = [group_normalised(column, groups, "group", epsilon, ddof) for column in rewards.unbind(1)]
    columns = torch.stack(scaled, dim=1)
    summed = (columns if weights is None else columns * weights.to(columns)).sum(dim=1)
    return batch_normalised(summed, rewards.isnan().all(dim=1), epsilon, ddof)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """RLOO, arXiv:2402.14740: A_i = r_i - mean of the others' rewards in its group = n / (n - 1) (r_i - mean).

    n counts the members that have a reward; alone, there is nothing to compare with and A = 0. (N,) -> (N,).
    """
    table = _Groups.of(rewards, groups)
    sizes = table.sizes[table.index]
    return table.differences * (sizes / (sizes - 1).clamp(min=1))


def incomparable(rewards: Tensor, groups: Tensor) -> Tensor:
    """(N,) bool: completions without a reward, or the only one in their group that has one: they have no advantage."""
    table = _Groups.of(rewards, groups)
    return ~table.valid | (table.sizes < 2)[table.index]


def batch_normalised(
    advantages: Tensor, masked: Tensor | None = None, epsilon: float = EPSILON, ddof: int = 1
) -> Tensor:
    """(A - mean) / (std + epsilon) over the batch, with the sample std (`ddof` 1); 0 for masked rows, which are in no statistic.

    For advantages that compare completions with their group: these sum to 0 in every group, so their mean is 0 and is not computed.
    What rounding leaves of it would be an advantage for groups that teach nothing.
    """
    known = advantages if masked is None else advantages.masked_fill(masked, 0)
    number = torch.as_tensor(len(known)) if masked is None else (~masked).sum()
    std = (known.square().sum() / (number - ddof).clamp(min=1)).sqrt()
    return known / (std + epsilon)


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """(number of groups,) bool, in the order of the group numbers: groups from which nothing can be learnt.

    Every member that has a reward has the same one; or only one has any, or none.
    """
    return _Groups.of(rewards, groups).constant


def replay_scores(advantages: Tensor, rewards: Tensor, groups: Tensor) -> Tensor:
    """(number of groups,) sum of |A| in the group times the std of its rewards: what a replay buffer ranks groups by."""
    table = _Groups.of(rewards, groups)
    return table.summed(advantages.abs()) * table.std


@dataclass(frozen=True)
class _Groups:
    """Statistics of G groups of rewards. NaN rewards have no part in them."""

    known: Tensor  # (N,) the rewards, 0 where there is none
    valid: Tensor  # (N,) bool: has a reward
    index: Tensor  # (N,) which of the G groups
    sizes: Tensor  # (G,) members that have a reward
    constant: Tensor  # (G,) bool
    differences: Tensor  # (N,) r - mean of the group; exactly 0 in constant groups and without a reward
    ddof: int = 1  # of the deviations

    @classmethod
    def of(cls, rewards: Tensor, groups: Tensor, ddof: int = 1) -> _Groups:
        if rewards.ndim != 1 or rewards.shape != groups.shape:
            raise ValueError(f"One reward and one group for each completion: got {rewards.shape} and {groups.shape}.")
        rewards = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
        numbers, index = torch.unique(groups, return_inverse=True)
        valid = ~rewards.isnan()
        known = rewards.where(valid, 0)
        zeros = known.new_zeros(len(numbers))
        sizes = zeros.index_add(0, index, valid.to(known.dtype))
        lowest = zeros.scatter_reduce(0, index, rewards.where(valid, float("inf")), "amin", include_self=False)
        highest = zeros.scatter_reduce(0, index, rewards.where(valid, float("-inf")), "amax", include_self=False)
        constant = lowest >= highest  # of an empty group the lowest is inf and the highest -inf
        mean = zeros.index_add(0, index, known) / sizes.clamp(min=1)
        rounding = torch.finfo(known.dtype).eps * zeros.index_add(0, index, known.abs())
        mean = mean.where(mean.abs() > rounding, 0)
        differences = (known - mean[index]).where(valid & ~constant[index], 0)
        return cls(known, valid, index, sizes, constant, differences, ddof)

    def summed(self, values: Tensor) -> Tensor:
        """(N,) -> (G,)."""
        return values.new_zeros(len(self.sizes)).index_add(0, self.index, values)

    @property
    def std(self) -> Tensor:
        """(G,) std of the members' rewards."""
        return (self.summed(self.differences**2) / (self.sizes - self.ddof).clamp(min=1)).sqrt()

    @property
    def batch_std(self) -> Tensor:
        """() std of all rewards, whatever their group."""
        number = self.valid.sum()
        differences = (self.known - self.known.sum() / number.clamp(min=1)).where(self.valid, 0)
        return ((differences**2).sum() / (number - self.ddof).clamp(min=1)).sqrt()


def _without(rewards: Tensor, masked: Tensor | None) -> Tensor:
    """(N, K) with NaN in masked rows."""
    if rewards.ndim != 2:
        raise ValueError(f"Rewards have a row for each completion and a column for each function; got {rewards.shape}.")
    rewards = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
    return rewards if masked is None else rewards.masked_fill(masked[:, None], float("nan"))


REWARD_SCALES: dict[str, Callable[[_Groups, float], Tensor | float]] = {
    "group": lambda table, epsilon: (table.std + epsilon)[table.index],
    "batch": lambda table, epsilon: table.batch_std + epsilon,
    "none": lambda table, epsilon: 1.0,
}
"""Value of `scale_rewards` -> what the difference from the group's mean is divided by."""
