"""Token losses: worked numbers, naive formulas, and the identities everybody checks first."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from posttrain.losses.supervised import SUPERVISED_LOSSES, dft, label_smoothed_nll, nll


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_golden_nll():
    """p = 1/2 and 1/8: -ln(1/2) = 0.693147180560, -ln(1/8) = 3 ln 2 = 2.079441541680. Slope -1 by log p."""
    logps = numbers(math.log(1 / 2), math.log(1 / 8))
    values = nll(logps)
    assert values.tolist() == pytest.approx([0.693147180560, 2.079441541680], abs=1e-11)
    values.sum().backward()
    assert logps.grad.tolist() == [-1, -1]


def test_golden_label_smoothed_nll():
    """Vocabulary of 2, p = (1/2, 1/2) and (1/4, 3/4), target the first, e = 0.2.

    Mean log-probs: -ln 2 = -0.693147180560; -(ln 4 + ln 4/3) / 2 = -(1.386294361120 + 0.287682072452) / 2
    = -0.836988216786. Losses: 0.8 ln 2 + 0.2 ln 2 = 0.693147180560; 0.8 * 1.386294361120 + 0.2 * 0.836988216786
    = 1.109035488896 + 0.167397643357 = 1.276433132253. Slopes -0.8 by log p and -0.2 by its mean.
    """
    logps, mean_logps = numbers(-0.693147180560, -1.386294361120), numbers(-0.693147180560, -0.836988216786)
    values = label_smoothed_nll(logps, mean_logps, label_smoothing=0.2)
    assert values.tolist() == pytest.approx([0.693147180560, 1.276433132253], abs=1e-11)
    values.sum().backward()
    assert logps.grad.tolist() == [-0.8, -0.8]
    assert mean_logps.grad.tolist() == [-0.2, -0.2]


def test_golden_dft():
    """-p ln p at p = 1/2: 0.346573590280; at p = 1/8: 2.079441541680 / 8 = 0.259930192710. Slope by log p: -p, not
    -p (1 + ln p), as the weight p carries no gradient: -1/2 and -1/8.
    """
    logps = numbers(math.log(1 / 2), math.log(1 / 8))
    values = dft(logps)
    assert values.tolist() == pytest.approx([0.346573590280, 0.259930192710], abs=1e-11)
    values.sum().backward()
    assert logps.grad.tolist() == pytest.approx([-0.5, -0.125], abs=1e-12)


@pytest.mark.parametrize("name", SUPERVISED_LOSSES)
def test_every_loss_has_a_golden_number(name):
    golden = getattr(sys.modules[__name__], f"test_golden_{name}", None)
    assert golden is not None, f"{name} is in SUPERVISED_LOSSES but has no test_golden_{name} with worked numbers."
    assert any(character.isdigit() for character in golden.__doc__ or "")


def naive_probabilities(logits):
    exponentials = [[torch.exp(x) for x in row] for row in logits]
    return [[x / sum(row) for x in row] for row in exponentials]


NAIVE = {
    "nll": lambda p, y, e: -torch.log(p[y]),
    "label_smoothed_nll": lambda p, y, e: sum(
        -((1 - e) * (v == y) + e / len(p)) * torch.log(p[v]) for v in range(len(p))
    ),
    "dft": lambda p, y, e: -p[y].item() * torch.log(p[y]),
}
"""Loss of one token from its distribution: cross-entropy against one-hot, smoothed and reweighted targets."""


@pytest.mark.parametrize("name", SUPERVISED_LOSSES)
def test_gradient_by_the_logits_equals_the_naive_formula(name):
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets, e = [0, 4, 2, 2, 1, 3], 0.15
    log_probabilities = logits.log_softmax(-1)
    logps = log_probabilities[range(6), targets]
    inputs = {"label_smoothed_nll": ((logps, log_probabilities.mean(-1)), {"label_smoothing": e})}
    arguments, options = inputs.get(name, ((logps,), {}))
    ours = SUPERVISED_LOSSES[name](*arguments, **options)
    naive = [NAIVE[name](p, y, e) for p, y in zip(naive_probabilities(logits), targets)]
    assert ours.tolist() == pytest.approx([x.item() for x in naive], abs=1e-9)
    (mine,) = torch.autograd.grad(ours.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(sum(naive), logits)
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("vocabulary", [2, 50, 32_000])
def test_uniform_logits_give_log_vocabulary_and_confidently_wrong_exceeds_it(vocabulary):
    """Uniform: ln V. All of the mass elsewhere, logit 10 against 0: ln(e^10 + V - 1) > ln V."""
    uniform = torch.zeros(vocabulary, dtype=torch.float64).log_softmax(-1)
    assert nll(uniform[3 % vocabulary]).item() == pytest.approx(math.log(vocabulary), abs=1e-9)
    logits = torch.zeros(vocabulary, dtype=torch.float64)
    logits[0] = 10
    wrong = nll(logits.log_softmax(-1)[1]).item()
    assert wrong == pytest.approx(math.log(math.exp(10) + vocabulary - 1), abs=1e-9)
    assert wrong > math.log(vocabulary)


def test_no_smoothing_is_nll_and_full_smoothing_forgets_the_target():
    logps, mean_logps = numbers(-1.0, -2.0), numbers(-3.0, -5.0)
    assert torch.equal(label_smoothed_nll(logps, mean_logps, label_smoothing=0.0), nll(logps))
    assert torch.equal(label_smoothed_nll(logps, mean_logps, label_smoothing=1.0), -mean_logps)


def test_dft_is_finite_for_impossible_tokens():
    """-p ln p -> 0 as p -> 0, in float32 too, where e^-10000 is 0."""
    logps = torch.tensor([-1e4, -100.0, 0.0], requires_grad=True)
    values = dft(logps)
    assert values.tolist() == pytest.approx([0, 0, 0], abs=1e-30)
    values.sum().backward()
    assert torch.isfinite(logps.grad).all()
