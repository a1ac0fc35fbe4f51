"""Every paired loss on two pairs, worked out by hand to 12 digits, values and gradients.

                       pair 0    pair 1
    log policy(c)        -2        -6
    log policy(r)        -5        -3
    log reference(c)     -4        -4
    log reference(r)     -3        -4
    len_c, len_r         2, 4      1, 2
    l_c                   2        -2         log policy(c) - log reference(c)
    l_r                  -2         1         log policy(r) - log reference(r)
    d = l_c - l_r         4        -3

With beta = 0.5: beta d = 2 and -1.5, beta l_c = 1 and -1, beta l_r = -1 and 0.5. Below, S is the logistic function and
P(x) = ln(1 + e^x), so that -log S(x) = P(-x), P'(x) = S(x) and S'(x) = S(x) S(-x). From a table of logarithms:

    x       S(x)             S(-x)            P(x)             P(-x)
    0       0.5              0.5              0.693147180560   0.693147180560
    0.5     0.622459331202   0.377540668798   0.974076984180   0.474076984180
    0.75    0.679178699175   0.320821300825   1.136871006115   0.386871006115
    1       0.731058578630   0.268941421370   1.313261687518   0.313261687518
    1.25    0.777299861175   0.222700138825   1.501929081345   0.251929081345
    1.5     0.817574476194   0.182425523806   1.701413277983   0.201413277983
    2       0.880797077978   0.119202922022   2.126928011043   0.126928011043
    3       0.952574126822   0.047425873178   3.048587351574   0.048587351574
    4       0.982013790038   0.017986209962   4.018149927918   0.018149927918
"""

from __future__ import annotations

import sys

import pytest
import torch

from posttrain.losses.pair import Pair
from posttrain.losses.preference import PREFERENCE_LOSSES, preference_loss

OPTIONS = {"beta": 0.5, "label_smoothing": 0.1, "discopop_tau": 0.5}


def check(pair: Pair, name: str, values: list[float], by_chosen: list[float], by_rejected: list[float]) -> None:
    """The loss of each pair, and the derivative of their sum by log policy(c) and log policy(r), to 1e-11."""
    (term,) = preference_loss(pair, [name], None, OPTIONS)
    assert term.values.tolist() == pytest.approx(values, abs=1e-11)
    gradients = torch.autograd.grad(term.values.sum(), (pair.chosen_logps, pair.rejected_logps))
    assert gradients[0].tolist() == pytest.approx(by_chosen, abs=1e-11)
    assert gradients[1].tolist() == pytest.approx(by_rejected, abs=1e-11)


def test_golden_sigmoid(golden_pair):
    """P(-2) = 0.126928011043; P(1.5) = 1.701413277983.

    Derivative by l_c: -beta S(-beta d) = -0.5 * 0.119202922022 = -0.059601461011; -0.5 * 0.817574476194 = -0.408787238097.
    """
    values = [0.126928011043, 1.701413277983]
    check(golden_pair, "sigmoid", values, [-0.059601461011, -0.408787238097], [0.059601461011, 0.408787238097])


def test_golden_hinge(golden_pair):
    """max(0, 1 - 2) = 0, flat; max(0, 1 + 1.5) = 2.5 with slope -beta = -0.5 by l_c and 0.5 by l_r."""
    check(golden_pair, "hinge", [0, 2.5], [0, -0.5], [0, 0.5])


def test_golden_ipo(golden_pair):
    """1 / (2 beta) = 1. Per token: 2/2 - (-2)/4 = 1.5, so (1.5 - 1)^2 = 0.25; -2/1 - 1/2 = -2.5, so (-3.5)^2 = 12.25.

    Derivatives: 2 * 0.5 / 2 = 0.5 and -2 * 0.5 / 4 = -0.25; 2 * (-3.5) / 1 = -7 and -2 * (-3.5) / 2 = 3.5.
    """
    check(golden_pair, "ipo", [0.25, 12.25], [0.5, -7], [-0.25, 3.5])


def test_golden_exo_pair(golden_pair):
    """e = 0.1; ln 0.9 = -0.105360515658, ln 0.1 = -2.302585092994.

    Pair 0: 0.880797077978 * (-0.126928011043 + 0.105360515658) + 0.119202922022 * (-2.126928011043 + 2.302585092994)
          = -0.018996586915 + 0.020938837442 = 0.001942250528 (last digit: rounding).
    Pair 1: 0.182425523806 * (-1.701413277983 + 0.105360515658) + 0.817574476194 * (-0.201413277983 + 2.302585092994)
          = -0.291160761190 + 1.717864446051 = 1.426703684861.
    Derivative by z = beta d: S(z) S(-z) (z - ln 9), ln 9 = 2.197224577336; times beta:
    0.5 * 0.104993585404 * -0.197224577336 = -0.010353657752; 0.5 * 0.149146452070 * -3.697224577336 = -0.275713964108.
    """
    values = [0.001942250528, 1.426703684861]
    check(golden_pair, "exo_pair", values, [-0.010353657752, -0.275713964108], [0.010353657752, 0.275713964108])


def test_golden_nca_pair(golden_pair):
    """Pair 0: P(-1) + P(1)/2 + P(-1)/2 = 0.313261687518 + 0.656630843759 + 0.156630843759 = 1.126523375036.
    Pair 1: P(1) + P(-1)/2 + P(0.5)/2 = 1.313261687518 + 0.156630843759 + 0.487038492090 = 1.956931023367.

    By l_c: beta (-S(-x) + S(x)/2): 0.5 * (-0.268941421370 + 0.365529289315) = 0.048293933973;
    0.5 * (-0.731058578630 + 0.134470710685) = -0.298293933973.
    By l_r: beta S(beta l_r)/2: 0.25 * 0.268941421370 = 0.067235355342; 0.25 * 0.622459331202 = 0.155614832800.
    """
    values = [1.126523375036, 1.956931023367]
    check(golden_pair, "nca_pair", values, [0.048293933973, -0.298293933973], [0.067235355342, 0.155614832800])


def test_golden_robust(golden_pair):
    """e = 0.1. (0.9 * 0.126928011043 - 0.1 * 2.126928011043) / 0.8 = (0.114235209939 - 0.212692801104) / 0.8
    = -0.123071988957; (0.9 * 1.701413277983 - 0.1 * 0.201413277983) / 0.8 = 1.888913277983.

    By l_c: -beta (0.9 S(-z) + 0.1 S(z)) / 0.8: -0.5 * (0.107282629820 + 0.088079707798) / 0.8 = -0.122101461011;
    -0.5 * (0.735817028575 + 0.018242552381) / 0.8 = -0.471287238097.
    """
    values = [-0.123071988957, 1.888913277983]
    check(golden_pair, "robust", values, [-0.122101461011, -0.471287238097], [0.122101461011, 0.471287238097])


def test_golden_bco_pair(golden_pair):
    """P(-1) + P(-1) = 0.626523375036; P(1) + P(0.5) = 1.313261687518 + 0.974076984180 = 2.287338671698.

    By l_c: -0.5 S(-1) = -0.134470710685; -0.5 S(1) = -0.365529289315.
    By l_r: 0.5 S(-1) = 0.134470710685; 0.5 S(0.5) = 0.311229665601.
    """
    values = [0.626523375036, 2.287338671698]
    check(golden_pair, "bco_pair", values, [-0.134470710685, -0.365529289315], [0.134470710685, 0.311229665601])


def test_golden_sppo_hard(golden_pair):
    """1 / (2 beta) = 1. (2 - 1)^2 + (-2 + 1)^2 = 2; (-2 - 1)^2 + (1 + 1)^2 = 13. Slopes 2(l_c - 1) and 2(l_r + 1)."""
    check(golden_pair, "sppo_hard", [2, 13], [2, -6], [-2, 4])


def test_golden_aot(golden_pair):
    """Margins of the policy: 3, -3; of the reference: -1, 0. Sorted: (-3, 3) against (-1, 0), so D = -2 for pair 1 and
    D = 3 for pair 0, which meets the reference margin of the other pair. beta D = 1.5 and -1; e = 0.1.

    0.9 P(-1.5) + 0.1 P(1.5) = 0.181271950184 + 0.170141327798 = 0.351413277983 (last digit: rounding);
    0.9 P(1) + 0.1 P(-1) = 1.181935518766 + 0.031326168752 = 1.213261687518.
    By log policy(c): beta (-0.9 S(-x) + 0.1 S(x)): 0.5 * (-0.164182971426 + 0.081757447619) = -0.041212761903;
    0.5 * (-0.657952720767 + 0.026894142137) = -0.315529289315.
    """
    values = [0.351413277983, 1.213261687518]
    check(golden_pair, "aot", values, [-0.041212761903, -0.315529289315], [0.041212761903, 0.315529289315])


def test_golden_aot_unpaired(golden_pair):
    """l_c = (2, -2) sorted (-2, 2); l_r = (-2, 1) sorted already. D = 0 for the chosen answer of pair 1 with the rejected
    one of pair 0, D = 1 for the chosen answer of pair 0 with the rejected one of pair 1. beta D = 0.5 (pair 0), 0 (pair 1).

    0.9 P(-0.5) + 0.1 P(0.5) = 0.426669285762 + 0.097407698418 = 0.524076984180; P(0) = 0.693147180560.
    By the chosen: 0.5 * (-0.9 * 0.377540668798 + 0.1 * 0.622459331202) = -0.138770334399; 0.5 * (-0.45 + 0.05) = -0.2.
    By the rejected, crossed over: 0.2 for pair 0, 0.138770334399 for pair 1.
    """
    values = [0.524076984180, 0.693147180560]
    check(golden_pair, "aot_unpaired", values, [-0.138770334399, -0.2], [0.2, 0.138770334399])


def test_golden_apo_zero(golden_pair):
    """1 - S(1) + S(-1) = 0.537882842740; 1 - S(-1) + S(0.5) = 0.731058578630 + 0.622459331202 = 1.353517909832.

    S(1) S(-1) = 0.196611933241, S(0.5) S(-0.5) = 0.235003712202. By l_c: -0.5 * 0.196611933241 = -0.098305966621, twice.
    By l_r: 0.5 * 0.196611933241 = 0.098305966621; 0.5 * 0.235003712202 = 0.117501856101.
    """
    values = [0.537882842740, 1.353517909832]
    check(golden_pair, "apo_zero", values, [-0.098305966621, -0.098305966621], [0.098305966621, 0.117501856101])


def test_golden_apo_down(golden_pair):
    """S(1) + 1 - S(2) = 0.731058578630 + 0.119202922022 = 0.850261500652;
    S(-1) + 1 - S(-1.5) = 0.268941421370 + 0.817574476194 = 1.086515897564.

    By l_c: 0.5 * (0.196611933241 - 0.104993585404) = 0.045809173919; 0.5 * (0.196611933241 - 0.149146452070)
    = 0.023732740586. By l_r: 0.5 * 0.104993585404 = 0.052496792702; 0.5 * 0.149146452070 = 0.074573226035.
    """
    values = [0.850261500652, 1.086515897564]
    check(golden_pair, "apo_down", values, [0.045809173919, 0.023732740586], [0.052496792702, 0.074573226035])


def test_golden_discopop(golden_pair):
    """tau = 0.5, so m = S(4) and S(-3); e^-2 = 0.135335283237, e^1.5 = 4.481689070338.

    Pair 0: 0.017986209962 * 0.126928011043 + 0.982013790038 * 0.135335283237 = 0.002282953857 + 0.132901114417
          = 0.135184068274. Pair 1: 0.952574126822 * 1.701413277983 + 0.047425873178 * 4.481689070338
          = 1.620722267639 + 0.212548017471 = 1.833270285110.
    By z = beta d: m' (e^-z - P(-z)) - (1 - m) S(-z) - m e^-z with m' = m (1 - m) / tau = 0.035325412427, 0.090353319462:
    0.000296990358 - 0.002144008784 - 0.132901114417 = -0.134748132843; 0.251207146859 - 0.778800292772 - 0.212548017471
    = -0.740141163385 (last digit: rounding). Times beta: -0.067374066422; -0.370070581692.
    """
    values = [0.135184068274, 1.833270285110]
    check(golden_pair, "discopop", values, [-0.067374066422, -0.370070581692], [0.067374066422, 0.370070581692])


def test_golden_sigmoid_norm(golden_pair):
    """Margins per token 1.5 and -2.5 (see ipo), times beta 0.75 and -1.25. P(-0.75) = 0.386871006115,
    P(1.25) = 1.501929081345.

    By l_c: -0.5 * 0.320821300825 / 2 = -0.080205325206; -0.5 * 0.777299861175 / 1 = -0.388649930587.
    By l_r: 0.5 * 0.320821300825 / 4 = 0.040102662603; 0.5 * 0.777299861175 / 2 = 0.194324965294.
    """
    values = [0.386871006115, 1.501929081345]
    check(golden_pair, "sigmoid_norm", values, [-0.080205325206, -0.388649930587], [0.040102662603, 0.194324965294])


def test_golden_sft(golden_pair):
    """Chosen tokens: log-probs -0.5, -1.5 of pair 0 and -6 of pair 1. Sums 2 and 6; per token 8 / 3 with 3 chosen tokens."""
    (term,) = preference_loss(golden_pair, ["sft"], None, OPTIONS)
    assert term.values.tolist() == [2, 6]
    assert term.per == "token:chosen"


def test_golden_mixture(golden_pair):
    """MPO's mix 0.8 sigmoid + 0.2 bco_pair + 1 sft, 2 pairs, 3 chosen tokens:
    0.8 * (0.126928011043 + 1.701413277983) / 2 + 0.2 * (0.626523375036 + 2.287338671698) / 2 + 8 / 3
    = 0.731336515610 + 0.291386204673 + 2.666666666667 = 3.689389386950.
    """
    terms = preference_loss(golden_pair, ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0], OPTIONS)
    denominators = {"unit": 2, "token:chosen": 3}
    total = sum(term.weight * term.values.sum().item() / denominators[term.per] for term in terms)
    assert total == pytest.approx(3.689389386950, abs=1e-11)


def test_golden_metrics(golden_pair):
    """Rewards beta l: 1, -1 (chosen) and -1, 0.5 (rejected); margins 2, -1.5; pair 0 is ranked right, pair 1 is not."""
    metrics = {name: values.tolist() for name, values in golden_pair.metrics(beta=0.5).items()}
    assert metrics == {
        "rewards/chosen": [1, -1],
        "rewards/rejected": [-1, 0.5],
        "rewards/accuracies": [1, 0],
        "rewards/margins": [2, -1.5],
        "logps/chosen": [-2, -6],
        "logps/rejected": [-5, -3],
    }
    assert not any(values.requires_grad for values in golden_pair.metrics(beta=0.5).values())


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_every_loss_has_a_golden_number(name):
    golden = getattr(sys.modules[__name__], f"test_golden_{name}", None)
    assert golden is not None, f"{name} is in PREFERENCE_LOSSES but has no test_golden_{name} with worked numbers."
    assert any(character.isdigit() for character in golden.__doc__ or "")
