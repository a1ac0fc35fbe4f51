"""What is read off two chunks of logits, and the slopes: torch's way and Triton's way against float64 autograd.

Triton's kernels run on a CPU too where triton is installed: TRITON_INTERPRET=1 python -m pytest tests/models/test_pair_kernels.py
"""

from __future__ import annotations

import pytest
import torch

from posttrain.losses.distributions import Divergence
from posttrain.models.scoring import pair_kernels
from posttrain.models.scoring.pair_kernels import Compared, PairRows
from tests.models.test_head_kernels import WAYS

COMPARE = {"torch": "_torch_compare", "triton": "_triton_compare"}
SLOPES = {"torch": "_torch_slopes", "triton": "_triton_slopes"}
FAMILY = {
    "forward": Divergence(0),
    "reverse": Divergence(1),
    "jsd": Divergence(0.3),
    "half": Divergence(0.5),
    "skew_forward": Divergence(kind="skew_forward"),
    "skew_reverse": Divergence(kind="skew_reverse"),
}
SCALE, TEACHER_SCALE = 0.7, 1.3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(pair_kernels, "BLOCK", 64)


def read(way, divergence, logits, taught):
    """(rows, how) of all rows, from normalisers in float32."""
    how = Compared(divergence.shares, SCALE, TEACHER_SCALE)
    rows = PairRows((SCALE * logits).logsumexp(-1), (TEACHER_SCALE * taught).logsumexp(-1))
    getattr(pair_kernels, COMPARE[way])(logits, taught, rows, slice(0, len(logits)), how, None)
    return rows, how


@pytest.mark.parametrize("with_logps", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILY)
def test_divergences_and_slopes_are_those_of_float64_autograd(name, way, with_logps):
    logits, taught = 3 * torch.randn(2, 5, 203)
    factors, logp_factors, targets = torch.randn(5), torch.randn(5), torch.randint(0, 203, (5,))
    exact = logits.double().requires_grad_()
    logps = (SCALE * exact).log_softmax(-1)
    expected = FAMILY[name](logps, (TEACHER_SCALE * taught.double()).log_softmax(-1))
    loss = (factors * expected).sum()
    if with_logps:
        loss = loss + (logp_factors * logps.gather(-1, targets[:, None])[:, 0]).sum()
    loss.backward()

    rows, how = read(way, FAMILY[name], logits, taught)
    assert torch.allclose(rows.divergences.double(), expected, atol=2e-5)
    slopes = getattr(pair_kernels, SLOPES[way])(
        logits.clone(), taught, rows, slice(0, 5), how, factors, targets, logp_factors if with_logps else None
    )
    assert torch.allclose(slopes.double(), exact.grad, atol=2e-6)
    if not with_logps:
        at_once = getattr(pair_kernels, COMPARE[way])(logits.clone(), taught, rows, slice(0, 5), how, factors)
        assert torch.equal(at_once, slopes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILY)
def test_words_of_no_mass_and_extremes_are_no_trouble(name, way):
    """-inf in both, and logits so far apart that exponentials underflow: everything that is left is finite."""
    logits, taught = torch.zeros(2, 203), torch.zeros(2, 203)
    logits[:, 100] = taught[:, 100] = -torch.inf
    logits[0, 3], taught[0, 3], taught[1, 70] = 150, 120, 90
    rows, how = read(way, FAMILY[name], logits, taught)
    exact = logits.double().requires_grad_()
    expected = FAMILY[name]((SCALE * exact).log_softmax(-1), (TEACHER_SCALE * taught.double()).log_softmax(-1))
    expected.sum().backward()
    torch.testing.assert_close(rows.divergences.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    slopes = getattr(pair_kernels, SLOPES[way])(
        logits.clone(), taught, rows, slice(0, 2), how, torch.ones(2), None, None
    )
    assert slopes[:, 100].tolist() == [0, 0]
    torch.testing.assert_close(slopes.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILY)
def test_a_nan_of_either_side_is_passed_on(name, way, whose):
    both = torch.randn(2, 2, 203)
    both[whose, 1, 100] = torch.nan
    rows, _ = read(way, FAMILY[name], *both)
    assert rows.divergences.isnan().tolist() == [False, True]
