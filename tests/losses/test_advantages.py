"""Advantages against explicit loops over Python numbers, and what must hold for any rewards and groups."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from posttrain.losses.advantages import (
    batch_normalised,
    group_normalised,
    incomparable,
    leave_one_out,
    normalised_then_summed,
    replay_scores,
    weighted_rewards,
    zero_variance,
)

NAN = float("nan")
SCALES = ("group", "batch", "none")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- loops ---------------------------------------------------------------------------------------------------------------


def known(values):
    return [value for value in values if not math.isnan(value)]


def sample_std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def members(rewards, groups, i):
    return known([r for r, g in zip(rewards, groups) if g == groups[i]])


def loop_group_normalised(rewards, groups, scale):
    found = []
    for i, reward in enumerate(rewards):
        if math.isnan(reward):
            found.append(0.0)
            continue
        mine = members(rewards, groups, i)
        divisor = {"group": sample_std(mine) + 1e-4, "batch": sample_std(known(rewards)) + 1e-4, "none": 1.0}[scale]
        found.append((reward - statistics.fmean(mine)) / divisor)
    return found


def loop_leave_one_out(rewards, groups):
    found = []
    for i, reward in enumerate(rewards):
        others = known([r for j, (r, g) in enumerate(zip(rewards, groups)) if g == groups[i] and j != i])
        found.append(0.0 if math.isnan(reward) or not others else reward - statistics.fmean(others))
    return found


def loop_normalised_then_summed(rows, groups, weights, masked):
    rows = [[NAN] * len(row) if hidden else row for row, hidden in zip(rows, masked)]
    columns = [loop_group_normalised([row[k] for row in rows], groups, "group") for k in range(len(weights))]
    sums = [sum(w * column[i] for w, column in zip(weights, columns)) for i in range(len(rows))]
    sums = [NAN if all(math.isnan(r) for r in row) else z for row, z in zip(rows, sums)]
    return loop_group_normalised(sums, [0] * len(sums), "group")


# ---- drawn batches -------------------------------------------------------------------------------------------------------

REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 0.3, NAN]), st.floats(-5, 5, width=32))
BATCH = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.lists(REWARD, min_size=n, max_size=n), st.lists(st.integers(-1, 3), min_size=n, max_size=n))
)
MATRIX = st.tuples(st.integers(1, 10), st.integers(1, 3)).flatmap(
    lambda shape: st.tuples(
        st.lists(st.lists(REWARD, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]),
        st.lists(st.integers(0, 2), min_size=shape[0], max_size=shape[0]),
        st.lists(st.floats(-2, 2), min_size=shape[1], max_size=shape[1]),
        st.lists(st.booleans(), min_size=shape[0], max_size=shape[0]),
    )
)
FUNCTIONS = {
    **{scale: (lambda r, g, scale=scale: group_normalised(r, g, scale)) for scale in SCALES},
    "leave_one_out": leave_one_out,
}


def close(found, expected):
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(BATCH)
@settings(max_examples=150, deadline=None)
def test_group_advantages_equal_a_loop(batch):
    rewards, groups = batch
    tensors = numbers(*rewards), torch.tensor(groups)
    for scale in SCALES:
        close(group_normalised(*tensors, scale), loop_group_normalised(rewards, groups, scale))
    close(leave_one_out(*tensors), loop_leave_one_out(rewards, groups))


@given(MATRIX)
@settings(max_examples=150, deadline=None)
def test_sums_and_gdpo_equal_a_loop(batch):
    rows, groups, weights, masked = batch
    rewards = torch.tensor(rows, dtype=torch.float64)
    hidden, factors, numbered = torch.tensor(masked), numbers(*weights), torch.tensor(groups)
    expected = [
        NAN if off or not known(row) else sum(w * r for w, r in zip(weights, row) if not math.isnan(r))
        for row, off in zip(rows, masked)
    ]
    assert weighted_rewards(rewards, factors, hidden).tolist() == pytest.approx(expected, abs=1e-9, nan_ok=True)
    found = normalised_then_summed(rewards, numbered, factors, hidden)
    close(found, loop_normalised_then_summed(rows, groups, weights, masked))


@given(BATCH, st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_completions_does_not_matter(batch, random):
    rewards, groups = numbers(*batch[0]), torch.tensor(batch[1])
    order = list(range(len(groups)))
    random.shuffle(order)
    for function in FUNCTIONS.values():
        plain, shuffled = function(rewards, groups), function(rewards[order], groups[order])
        torch.testing.assert_close(shuffled, plain[order], rtol=1e-9, atol=1e-10)


@given(BATCH, st.integers(-1, 3), st.floats(-10, 10))
@settings(max_examples=100, deadline=None)
def test_a_constant_added_to_a_group_changes_nothing(batch, group, constant):
    rewards, groups = numbers(*batch[0]), torch.tensor(batch[1])
    shifted = torch.where(groups == group, rewards + constant, rewards)
    for name in ("group", "none", "leave_one_out"):  # the std of the batch does see it
        plain, moved = FUNCTIONS[name](rewards, groups), FUNCTIONS[name](shifted, groups)
        torch.testing.assert_close(moved, plain, rtol=1e-6, atol=1e-9)


@given(MATRIX)
@settings(max_examples=100, deadline=None)
def test_masked_completions_are_as_if_they_were_not_there(batch):
    rows, groups, weights, masked = batch
    rewards, numbered, hidden = torch.tensor(rows, dtype=torch.float64), torch.tensor(groups), torch.tensor(masked)
    factors = numbers(*weights)
    summed = weighted_rewards(rewards, factors, hidden)
    alone = weighted_rewards(rewards[~hidden], factors)
    for function in FUNCTIONS.values():
        everybody = function(summed, numbered)
        assert torch.equal(everybody[hidden], torch.zeros(int(hidden.sum()), dtype=torch.float64))
        torch.testing.assert_close(everybody[~hidden], function(alone, numbered[~hidden]), rtol=1e-9, atol=1e-10)
    everybody = normalised_then_summed(rewards, numbered, factors, hidden)
    without = normalised_then_summed(rewards[~hidden], numbered[~hidden], factors)
    assert torch.equal(everybody[hidden], torch.zeros(int(hidden.sum()), dtype=torch.float64))
    torch.testing.assert_close(everybody[~hidden], without, rtol=1e-9, atol=1e-10)


@given(
    st.floats(-100, 100),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float64]),
    st.lists(REWARD, max_size=6),
)
@settings(max_examples=150, deadline=None)
@example(value=0.0, size=1, dtype=torch.float32, others=[4.0, 4.319715976715088])
def test_a_constant_group_is_exactly_zero(value, size, dtype, others):
    """0.1 three times has the mean 0.10000000000000002: a plain difference would not be 0."""
    rewards = torch.tensor([value] * size + [NAN] + others, dtype=dtype)
    groups = torch.tensor([7] * (size + 1) + [0] * len(others))
    zeros = torch.zeros(size + 1, dtype=dtype)
    for function in FUNCTIONS.values():
        found = function(rewards, groups)
        assert found.dtype == dtype
        assert torch.equal(found[: size + 1], zeros)
    both = torch.stack([rewards, torch.where(groups == 7, 0.3, rewards)], dim=1)
    assert torch.equal(normalised_then_summed(both, groups)[:size], zeros[:size])
    valid = ~rewards.isnan()
    assert torch.equal(batch_normalised(leave_one_out(rewards, groups), ~valid)[: size + 1], zeros)
    assert zero_variance(rewards, groups).tolist()[-1]


# ---- by hand -------------------------------------------------------------------------------------------------------------


def test_by_hand():
    """Groups 0: {1, 3}, 1: {2, 2, 5}, mixed up. Means 2 and 3; sample stds sqrt 2 and sqrt 3."""
    rewards, groups = numbers(1, 2, 3, 2, 5), torch.tensor([0, 1, 0, 1, 1])
    root2, root3 = math.sqrt(2) + 1e-4, math.sqrt(3) + 1e-4
    close(group_normalised(rewards, groups), [-1 / root2, -1 / root3, 1 / root2, -1 / root3, 2 / root3])
    close(group_normalised(rewards, groups, "none"), [-1, -1, 1, -1, 2])
    # others' means: 3, 3.5, 1, 3.5, 2
    close(leave_one_out(rewards, groups), [-2, -1.5, 2, -1.5, 3])
    # all five: mean 2.6, squares 2.56 + 0.36 + 0.16 + 0.36 + 5.76 = 9.2, over 4
    std = math.sqrt(2.3) + 1e-4
    close(group_normalised(rewards, groups, "batch"), [-1 / std, -1 / std, 1 / std, -1 / std, 2 / std])
    # sum of |A| times std, with A = the plain difference: 2 sqrt 2 and 4 sqrt 3
    close(replay_scores(group_normalised(rewards, groups, "none"), rewards, groups), [2 * 2**0.5, 4 * 3**0.5])


def test_what_a_replay_buffer_ranks_by_by_hand():
    """Rewards 1, 0, 0, 1: std sqrt(1 / 3) = 0.577350, four times |A| = 0.5 / 0.577450; the product with the std is 1.999654."""
    rewards, groups = numbers(1, 0, 0, 1), torch.zeros(4, dtype=torch.long)
    assert replay_scores(group_normalised(rewards, groups), rewards, groups).item() == pytest.approx(1.999654, abs=5e-7)


def test_the_population_s_deviation_by_hand():
    """Groups {1, 3} and {2, 2, 5}: squares 2 and 6, over 2 and 3 members: stds 1 and sqrt 2; of all five sqrt(9.2 / 5).

    Of the advantages -2, -1, 0, 3, whose masked neighbour is in nothing: sqrt(14 / 4). One reward alone: 0.
    GDPO of one reward: z = -1, 1 / (1 + 1e-4), whose population std is |z| itself.
    """
    rewards, groups = numbers(1, 2, 3, 2, 5), torch.tensor([0, 1, 0, 1, 1])
    one, root2, std = 1 + 1e-4, math.sqrt(2) + 1e-4, math.sqrt(9.2 / 5) + 1e-4
    close(group_normalised(rewards, groups, ddof=0), [-1 / one, -1 / root2, 1 / one, -1 / root2, 2 / root2])
    close(group_normalised(rewards, groups, "batch", ddof=0), [-1 / std, -1 / std, 1 / std, -1 / std, 2 / std])
    assert group_normalised(numbers(4), torch.tensor([0]), ddof=0).tolist() == [0]
    std = math.sqrt(14 / 4) + 1e-4
    masked = torch.tensor([False, False, True, False, False])
    close(batch_normalised(numbers(-2, -1, 100, 0, 3), masked, ddof=0), [-2 / std, -1 / std, 0, 0, 3 / std])
    z = 1 / one
    close(
        normalised_then_summed(numbers(1, 3)[:, None], torch.tensor([0, 0]), ddof=0), [-z / (z + 1e-4), z / (z + 1e-4)]
    )


def test_unequal_opinions_by_hand():
    """The third completion has no opinion of the second function, the fourth of none."""
    rewards = torch.tensor([[1.0, 4.0], [0.0, 2.0], [1.0, NAN], [NAN, NAN]], dtype=torch.float64)
    assert weighted_rewards(rewards, numbers(2, 0.5)).tolist() == pytest.approx([4, 1, 2, NAN], nan_ok=True)
    assert weighted_rewards(rewards).tolist() == pytest.approx([5, 2, 1, NAN], nan_ok=True)
    groups = torch.zeros(4, dtype=torch.long)
    # 4, 1, 2: mean 7/3. The fourth is in nobody's mean and has no advantage.
    close(group_normalised(numbers(4, 1, 2, NAN), groups, "none"), [5 / 3, -4 / 3, -1 / 3, 0])
    close(leave_one_out(numbers(4, 1, 2, NAN), groups), [2.5, -2, -0.5, 0])


def test_batch_normalised_by_hand():
    """-2, -1, 0, 3 has the mean 0, as advantages have, and the sample std sqrt(14 / 3); the masked 100 is in neither."""
    std = math.sqrt(14 / 3) + 1e-4
    masked = torch.tensor([False, False, True, False, False])
    close(batch_normalised(numbers(-2, -1, 100, 0, 3), masked), [-2 / std, -1 / std, 0, 0, 3 / std])


def test_zero_variance_counts_groups_that_teach_nothing():
    """Group 2 is constant, 5 is not, 6 has one reward, 9 has none."""
    rewards = numbers(0.1, 1.0, 0.1, 0.0, 3.0, NAN, NAN, 0.1)
    groups = torch.tensor([2, 5, 2, 5, 6, 6, 9, 2])
    assert zero_variance(rewards, groups).tolist() == [True, False, True, True]


def test_no_completions_and_integers():
    empty = torch.zeros(0, dtype=torch.float64)
    for function in FUNCTIONS.values():
        assert function(empty, empty.long()).tolist() == []
        assert function(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32
    assert normalised_then_summed(empty.reshape(0, 2), empty.long()).tolist() == []


def test_wrong_shapes_and_names_are_refused():
    with pytest.raises(ValueError, match="'std' is unknown"):
        group_normalised(numbers(1), torch.tensor([0]), "std")
    with pytest.raises(ValueError, match="One reward and one group"):
        leave_one_out(numbers(1, 2), torch.tensor([0]))
    with pytest.raises(ValueError, match="a column for each function"):
        weighted_rewards(numbers(1, 2))


def test_completions_that_cannot_be_compared_do_not_dilute_the_scale():
    """Group 0 has one reward, group 1 two, group 2 none: the std is that of 1 and -1, and not of 0, 1 and -1."""
    rewards, groups = numbers(5, NAN, 0, 1, NAN), torch.tensor([0, 0, 1, 1, 2])
    assert incomparable(rewards, groups).tolist() == [True, True, False, False, True]
    advantages = leave_one_out(rewards, groups)
    scale = math.sqrt(2) + 1e-4
    close(batch_normalised(advantages, incomparable(rewards, groups)), [0, 0, -1 / scale, 1 / scale, 0])
