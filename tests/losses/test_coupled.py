"""A coupled loss, cut into micro-batches, keeps the value and the gradient it has on the whole step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.pair import Pair, coupled_coefficients, linearised
from posttrain.losses.preference import PREFERENCE_LOSSES, preference_loss

OPTIONS = {"beta": 0.7, "label_smoothing": 0.1}
COUPLED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.coupled]


def coupling_of(name, pair):
    return coupled_coefficients(partial(PREFERENCE_LOSSES[name].function, **OPTIONS), pair)


def test_golden_coupling(golden_pair):
    """From test_golden_aot: shares 0.351413277983 and 1.213261687518, slopes -0.041212761903 and -0.315529289315."""
    golden = partial(PREFERENCE_LOSSES["aot"].function, beta=0.5, label_smoothing=0.1)
    coupling = coupled_coefficients(golden, golden_pair)
    assert coupling.shares.tolist() == pytest.approx([0.351413277983, 1.213261687518], abs=1e-11)
    assert coupling.chosen.tolist() == pytest.approx([-0.041212761903, -0.315529289315], abs=1e-11)
    assert coupling.rejected.tolist() == pytest.approx([0.041212761903, 0.315529289315], abs=1e-11)
    assert golden_pair.chosen_logps.grad is None


@pytest.mark.parametrize("name", COUPLED)
@settings(max_examples=40, deadline=None)
@given(units=st.integers(1, 9), cuts=st.lists(st.integers(0, 9), max_size=5), seed=st.integers(0, 1000))
def test_any_split_reproduces_the_whole_step(name, units, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(units, generator=generator, dtype=torch.float64) for _ in range(4)]
    chosen, rejected = columns[0].requires_grad_(), columns[1].requires_grad_()
    lengths = torch.ones(units, dtype=torch.long)
    whole = Pair(chosen, rejected, columns[2], columns[3], lengths, lengths)

    (term,) = preference_loss(whole, [name], None, OPTIONS)
    expected = torch.autograd.grad(term.values.sum(), (chosen, rejected))

    edges = [0, *sorted(min(cut, units) for cut in cuts), units]
    gathered = Pair.gathered([whole.units(*part) for part in pairwise(edges)])
    coupling = coupling_of(name, gathered)
    values, total = [], 0.0
    for part in pairwise(edges):
        (piece,) = preference_loss(whole.units(*part), [name], None, OPTIONS, {name: coupling.units(*part)})
        piece.values.sum().backward()  # one micro-batch after the other, gradients accumulate
        values += piece.values.tolist()
        total += piece.values.sum().item()
    assert values == pytest.approx(term.values.tolist(), abs=1e-12)
    assert total == pytest.approx(term.values.sum().item(), abs=1e-9)
    torch.testing.assert_close(chosen.grad, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rejected.grad, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", COUPLED)
def test_micro_batches_alone_would_be_wrong(name, random_pair):
    """Why coupling is needed: sorting half of the pairs at a time is another loss."""
    pair = random_pair(0, units=8)
    whole = preference_loss(pair, [name], None, OPTIONS)[0].values.sum()
    halves = sum(preference_loss(pair.units(*half), [name], None, OPTIONS)[0].values.sum() for half in ((0, 4), (4, 8)))
    assert abs(whole.item() - halves.item()) > 1e-3


@pytest.mark.parametrize("name", [name for name, loss in PREFERENCE_LOSSES.items() if not loss.coupled])
def test_losses_marked_uncoupled_do_not_see_other_pairs(name, random_pair):
    pair = random_pair(1, units=6)
    options = OPTIONS | {"discopop_tau": 0.05}
    whole = preference_loss(pair, [name], None, options)[0].values
    alone = [preference_loss(pair.units(i, i + 1), [name], None, options)[0].values.item() for i in range(6)]
    assert alone == pytest.approx(whole.tolist(), abs=1e-12)


def test_works_under_no_grad_and_leaves_no_graph(random_pair):
    pair = random_pair(2)
    with torch.no_grad():
        coupling = coupling_of("aot", pair)
    assert not coupling.shares.requires_grad
    assert not coupling.chosen.requires_grad
    assert linearised(pair, coupling).requires_grad


def test_values_are_the_shares_exactly(random_pair):
    """logp - logp is exactly 0, so linearising adds no rounding to the value."""
    pair = random_pair(3)
    coupling = coupling_of("aot_unpaired", pair)
    assert torch.equal(linearised(pair, coupling), coupling.shares)
