"""Pair.of: from tokens of a batch to numbers about pairs; LD-DPO and WPO weights; cutting and joining."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.losses.pair import Pair, length_weights, on_policy_weights
from posttrain.losses.preference import PREFERENCE_LOSSES, preference_loss


def batch_with(counts: list[int], roles: tuple[str, ...] = ("chosen", "rejected")) -> TokenBatch:
    """A batch of which only the trained tokens matter."""
    trained, samples = sum(counts), len(counts)
    nothing = torch.zeros(1, trained + 1, dtype=torch.long)
    return TokenBatch(
        layout="ragged",
        input_ids=nothing,
        position_ids=nothing,
        positions=torch.arange(trained),
        targets=torch.zeros(trained, dtype=torch.long),
        counts=torch.tensor(counts, dtype=torch.long),
        lengths=torch.tensor(counts, dtype=torch.long),
        ends=torch.zeros(samples, dtype=torch.long),
        num_units=samples // len(roles),
        roles=roles,
        rows=tuple(range(samples)),
        num_trained=trained,
    )


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


POLICY = numbers(-1, -2, -4, -3, -5, -6, -7)  # chosen 2 tokens, rejected 1; chosen 1, rejected 3
REFERENCE = numbers(-2, -2, -1, -1, -1, -2, -3)


def test_sums_over_tokens():
    """Pair 0: chosen -1 - 2 = -3, rejected -4; pair 1: chosen -3, rejected -5 - 6 - 7 = -18. Reference -4, -1; -1, -6."""
    pair = Pair.of(batch_with([2, 1, 1, 3]), POLICY, REFERENCE)
    assert len(pair) == 2
    assert pair.chosen_logps.tolist() == [-3, -3]
    assert pair.rejected_logps.tolist() == [-4, -18]
    assert pair.reference_chosen_logps.tolist() == [-4, -1]
    assert pair.reference_rejected_logps.tolist() == [-1, -6]
    assert pair.chosen_lengths.tolist() == [2, 1]
    assert pair.rejected_lengths.tolist() == [1, 3]
    assert pair.chosen_nll.tolist() == [3, 3]
    assert pair.weights is None
    assert pair.chosen_log_ratios.tolist() == [1, -2]
    assert pair.rejected_log_ratios.tolist() == [-3, -12]
    assert pair.margins.tolist() == [4, 10]
    assert pair.margins_per_token.tolist() == [0.5 + 3, -2 + 4]


def test_golden_ld_dpo():
    """ld_alpha = 0.25. Pair 0 shares 1 token: chosen -1 + 0.25 * -2 = -1.5, rejected -4. Pair 1 shares 1: chosen -3,
    rejected -5 + 0.25 * (-6 - 7) = -8.25. Reference: -2 - 0.5 = -2.5, -1; -1, -1 + 0.25 * -5 = -2.25.
    The nll of `sft` counts every token once; lengths do not change.
    """
    policy = POLICY.clone().requires_grad_()
    pair = Pair.of(batch_with([2, 1, 1, 3]), policy, REFERENCE, ld_alpha=0.25)
    assert pair.chosen_logps.tolist() == [-1.5, -3]
    assert pair.rejected_logps.tolist() == [-4, -8.25]
    assert pair.reference_chosen_logps.tolist() == [-2.5, -1]
    assert pair.reference_rejected_logps.tolist() == [-1, -2.25]
    assert pair.chosen_nll.tolist() == [3, 3]
    assert pair.chosen_lengths.tolist() == [2, 1]
    (pair.chosen_logps.sum() - pair.rejected_logps.sum()).backward()
    assert policy.grad.tolist() == [1, 0.25, -1, 1, -1, -0.25, -0.25]


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(lambda c: len(c) % 2 == 0), a=st.floats(0, 1))
def test_ld_weights_equal_the_loop(counts, a):
    expected = []
    for chosen, rejected in zip(counts[::2], counts[1::2]):
        shared = min(chosen, rejected)
        for length in (chosen, rejected):
            expected += [1.0 if t < shared else a for t in range(length)]
    assert length_weights(batch_with(counts), a, torch.float64).tolist() == expected


def test_ld_alpha_of_one_is_plain_and_of_zero_drops_the_tail():
    batch = batch_with([2, 1, 1, 3])
    plain, one = Pair.of(batch, POLICY, REFERENCE), Pair.of(batch, POLICY, REFERENCE, ld_alpha=1.0)
    assert torch.equal(plain.chosen_logps, one.chosen_logps)
    assert torch.equal(plain.rejected_logps, one.rejected_logps)
    assert Pair.of(batch, POLICY, REFERENCE, ld_alpha=0.0).rejected_logps.tolist() == [-4, -5]


def test_golden_wpo():
    """Pair 0: chosen tokens p = 1/2 with sum_v p^2 = 1/2, and p = 1/4 with 3/8: ratios 1 and 2/3; rejected p = 1/8 with
    1/4: ratio 1/2. exp(mean of logs): sqrt(2/3) = 0.816496580928; times 1/2 = 0.408248290464.
    Pair 1: chosen p = 3/4 with 5/8: ratio 1.2; rejected p = 1/4 with 5/8, twice: ratio 0.4. Product 0.48.
    """
    logps = numbers(1 / 2, 1 / 4, 1 / 8, 3 / 4, 1 / 4, 1 / 4).log().requires_grad_()
    collision = numbers(1 / 2, 3 / 8, 1 / 4, 5 / 8, 5 / 8, 5 / 8).log()
    batch = batch_with([2, 1, 1, 2])
    pair = Pair.of(batch, logps, logps.detach(), log_collision=collision)
    assert pair.weights.tolist() == pytest.approx([0.408248290464, 0.48], abs=1e-11)
    assert not pair.weights.requires_grad
    (term,) = preference_loss(pair, ["sigmoid"], None, {"beta": 0.1})
    assert term.values.tolist() == pytest.approx([0.408248290464 * math.log(2), 0.48 * math.log(2)], abs=1e-11)
    term.values.sum().backward()  # the weight is a constant: gradient -w beta S(0) for each chosen token
    expected = [-0.05 * 0.408248290464] * 2 + [0.05 * 0.408248290464] + [-0.05 * 0.48] + [0.05 * 0.48] * 2
    assert logps.grad.tolist() == pytest.approx(expected, abs=1e-11)


def test_wpo_weights_of_a_uniform_policy_are_one():
    """p = 1/V everywhere and sum_v p^2 = 1/V: every answer is as typical as any."""
    logps = torch.full((7,), -math.log(50), dtype=torch.float64)
    assert on_policy_weights(batch_with([2, 1, 1, 3]), logps, logps).tolist() == pytest.approx([1, 1], abs=1e-12)


def test_an_answer_without_trained_tokens_counts_as_zero():
    pair = Pair.of(batch_with([0, 2]), numbers(-1, -2), numbers(-2, -2), ld_alpha=0.5)
    assert pair.chosen_logps.tolist() == [0]
    assert pair.margins_per_token.tolist() == [0 - 0.5 / 2]


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_process_without_rows_has_an_empty_loss_that_still_runs_backward(layout):
    batch = collate([], ("chosen", "rejected"), layout)
    logps = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for name in PREFERENCE_LOSSES:
        pair = Pair.of(batch, logps, logps.detach(), ld_alpha=0.5, log_collision=logps.detach())
        (term,) = preference_loss(pair, [name], None, {"beta": 0.1, "label_smoothing": 0.1, "discopop_tau": 0.05})
        assert term.values.shape == (0,)
        LossOutput([term]).local(batch).backward()
    assert logps.grad.shape == (0,)


def test_of_a_collated_batch():
    """From Samples to pairs: padded and ragged batches of the same samples give the same numbers, those of a loop."""
    units = [
        (Sample.of_text([1, 2], [3, 4, 5]), Sample.of_text([1, 2], [6])),
        (Sample.of_text([7], [8, 9]), Sample.of_text([7], [8, 9, 9, 9])),
    ]
    policy = torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parts = [part.sum().item() for part in policy.split([3, 1, 2, 4])]
    for layout in ("ragged", "padded"):
        pair = Pair.of(collate(units, ("chosen", "rejected"), layout), policy, torch.zeros_like(policy))
        assert pair.chosen_logps.tolist() == pytest.approx(parts[0::2], abs=1e-12)
        assert pair.rejected_logps.tolist() == pytest.approx(parts[1::2], abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(0, 7), max_size=4))
def test_cutting_and_joining_gives_the_same_pairs(cuts):
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(7, generator=generator) for _ in range(4)]
    pair = Pair(*columns, torch.arange(7), torch.arange(7), f_divergence="js_divergence", weights=columns[0] * 2)
    edges = [0, *sorted(cuts), 7]
    parts = [pair.units(start, stop) for start, stop in pairwise(edges)]
    joined = Pair.gathered(parts)
    assert [len(part) for part in parts] == [stop - start for start, stop in pairwise(edges)]
    assert torch.equal(joined.chosen_logps, pair.chosen_logps)
    assert torch.equal(joined.reference_rejected_logps, pair.reference_rejected_logps)
    assert torch.equal(joined.rejected_lengths, pair.rejected_lengths)
    assert torch.equal(joined.weights, pair.weights)
    assert joined.chosen_nll is None
    assert joined.f_divergence == "js_divergence"


def test_pairs_under_different_divergences_do_not_join(golden_pair):
    other = Pair.of(batch_with([1, 1]), numbers(-1, -1), numbers(-1, -1), f_divergence="forward_kl")
    with pytest.raises(ValueError, match="share one f-divergence"):
        Pair.gathered([golden_pair, other])
