"""Every paired loss against its formula written naively: one pair at a time, exp and log as they stand, Python's sort.

The naive formulas are differentiated by autograd in float64; values and gradients agree to 1e-9.
"""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.losses.divergences import F_DIVERGENCES
from posttrain.losses.preference import PREFERENCE_LOSSES, preference_loss


def logistic(x):
    return 1 / (1 + torch.exp(-x))


def log_logistic(x):
    return torch.log(logistic(x))


NAIVE_SCORES = {
    "reverse_kl": lambda ratio, a: torch.log(ratio),
    "forward_kl": lambda ratio, a: 1 - 1 / ratio,
    "js_divergence": lambda ratio, a: torch.log(2 * ratio / (1 + ratio)),
    "alpha_divergence": lambda ratio, a: (ratio ** (a - 1) - 1) / (a - 1),
}
"""f'(u) up to a constant, as a function of u = policy / reference."""


class OnePair:
    """The numbers of pair `i`, under the names of the formulas."""

    def __init__(self, pair, i):
        self.policy_c, self.policy_r = pair.chosen_logps[i], pair.rejected_logps[i]
        self.reference_c, self.reference_r = pair.reference_chosen_logps[i], pair.reference_rejected_logps[i]
        self.len_c, self.len_r = pair.chosen_lengths[i].item(), pair.rejected_lengths[i].item()
        score = NAIVE_SCORES[pair.f_divergence]
        self.l_c, self.l_r = self.policy_c - self.reference_c, self.policy_r - self.reference_r
        self.s_c, self.s_r = score(torch.exp(self.l_c), pair.f_alpha), score(torch.exp(self.l_r), pair.f_alpha)
        self.d = self.s_c - self.s_r


def naive_exo(p, beta, e, tau):
    policy_says = [logistic(beta * p.d), logistic(-beta * p.d)]
    return sum(share * torch.log(share / label) for share, label in zip(policy_says, [1 - e, e]))


def naive_robust(p, beta, e, tau):
    return (-(1 - e) * log_logistic(beta * p.d) + e * log_logistic(-beta * p.d)) / (1 - 2 * e)


def naive_nca(p, beta, e, tau):
    lost = log_logistic(-beta * p.l_c) + log_logistic(-beta * p.l_r)
    return -log_logistic(beta * p.l_c) - 0.5 * lost


def naive_discopop(p, beta, e, tau):
    m = logistic(beta * p.d / tau)
    return -log_logistic(beta * p.d) * (1 - m) + torch.exp(-beta * p.d) * m


NAIVE_LOSSES = {
    "sigmoid": lambda p, beta, e, tau: -log_logistic(beta * p.d),
    "hinge": lambda p, beta, e, tau: torch.maximum(1 - beta * p.d, torch.zeros_like(p.d)),
    "ipo": lambda p, beta, e, tau: (p.s_c / p.len_c - p.s_r / p.len_r - 1 / (2 * beta)) ** 2,
    "exo_pair": naive_exo,
    "nca_pair": naive_nca,
    "robust": naive_robust,
    "bco_pair": lambda p, beta, e, tau: -log_logistic(beta * p.l_c) - log_logistic(-beta * p.l_r),
    "sppo_hard": lambda p, beta, e, tau: (p.l_c - 0.5 / beta) ** 2 + (p.l_r + 0.5 / beta) ** 2,
    "apo_zero": lambda p, beta, e, tau: 1 - logistic(beta * p.l_c) + logistic(beta * p.l_r),
    "apo_down": lambda p, beta, e, tau: logistic(beta * p.l_c) + 1 - logistic(beta * (p.l_c - p.l_r)),
    "discopop": naive_discopop,
    "sft": lambda p, beta, e, tau: -p.policy_c,
    "sigmoid_norm": lambda p, beta, e, tau: -log_logistic(beta * (p.s_c / p.len_c - p.s_r / p.len_r)),
}
"""Loss of one pair, from the papers' formulas."""

NAIVE_SORTED = {
    "aot": (lambda p: p.policy_c - p.policy_r, lambda p: p.reference_c - p.reference_r),
    "aot_unpaired": (lambda p: p.l_c, lambda p: p.l_r),
}
"""The two sets of numbers that are sorted and compared."""


def naive_total(pair, name, beta, e, tau):
    pairs = [OnePair(pair, i) for i in range(len(pair))]
    if name not in NAIVE_SORTED:
        return sum(NAIVE_LOSSES[name](p, beta, e, tau) for p in pairs)
    upper, lower = (sorted((pick(p) for p in pairs), key=lambda x: x.item()) for pick in NAIVE_SORTED[name])
    differences = [high - low for high, low in zip(upper, lower)]
    return sum(-(1 - e) * log_logistic(beta * x) - e * log_logistic(-beta * x) for x in differences)


CASES = [
    (name, divergence)
    for name, loss in PREFERENCE_LOSSES.items()
    for divergence in (F_DIVERGENCES if loss.f_divergences else ["reverse_kl"])
]


@pytest.mark.parametrize(("beta", "e", "tau", "f_alpha"), [(0.1, 0.1, 0.05, 0.5), (1.3, 0.3, 0.7, 1.4)])
@pytest.mark.parametrize(("name", "divergence"), CASES)
def test_value_and_gradient_equal_the_naive_formula(random_pair, name, divergence, beta, e, tau, f_alpha):
    for seed in range(3):
        pair = random_pair(seed, spread=1.0, f_divergence=divergence, f_alpha=f_alpha)
        options = {"beta": beta, "label_smoothing": e, "discopop_tau": tau}
        (term,) = preference_loss(pair, [name], None, options)
        ours, naive = term.values.sum(), naive_total(pair, name, beta, e, tau)
        assert ours.item() == pytest.approx(naive.item(), rel=1e-9)
        logps = (pair.chosen_logps, pair.rejected_logps)
        for mine, expected in zip(
            torch.autograd.grad(ours, logps, allow_unused=True), torch.autograd.grad(naive, logps, allow_unused=True)
        ):
            assert (mine is None) == (expected is None)
            if mine is not None:
                torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


def test_every_loss_has_a_naive_formula():
    assert PREFERENCE_LOSSES.keys() == NAIVE_LOSSES.keys() | NAIVE_SORTED.keys()
    assert F_DIVERGENCES.keys() == NAIVE_SCORES.keys()


LN2 = math.log(2)


@pytest.mark.parametrize("divergence", F_DIVERGENCES)
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_at_policy_equal_to_reference(random_pair, beta, divergence):
    """All log-ratios, hence all scores, are 0 there; what a loss is then is in its formula."""
    pair = random_pair(0, f_divergence=divergence)
    pair = type(pair)(
        pair.chosen_logps,
        pair.rejected_logps,
        pair.chosen_logps.detach(),
        pair.rejected_logps.detach(),
        pair.chosen_lengths,
        pair.rejected_lengths,
        f_divergence=divergence,
    )
    e = 0.2
    expected = {
        "sigmoid": LN2,
        "sigmoid_norm": LN2,
        "hinge": 1.0,
        "ipo": 1 / (4 * beta**2),
        "exo_pair": -LN2 - 0.5 * math.log(e * (1 - e)),
        "nca_pair": 2 * LN2,
        "robust": LN2,
        "bco_pair": 2 * LN2,
        "sppo_hard": 1 / (2 * beta**2),
        "aot": LN2,
        "aot_unpaired": LN2,
        "apo_zero": 1.0,
        "apo_down": 1.0,
        "discopop": 0.5 * LN2 + 0.5,
    }
    assert expected.keys() == PREFERENCE_LOSSES.keys() - {"sft"}
    options = {"beta": beta, "label_smoothing": e, "discopop_tau": 0.05}
    for name, value in expected.items():
        (term,) = preference_loss(pair, [name], None, options)
        # aot_unpaired sorts two sets of zeros, all others are per pair
        assert term.values.tolist() == pytest.approx([value] * len(pair), abs=1e-9), name
