"""The policy losses: hand-worked numbers, every loss x level x option against naive loops, and what must always hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from posttrain.core.batch import StepTotals
from posttrain.losses.extrema import highest, lowest
from posttrain.losses.kl import k1, k3
from posttrain.losses.policy import (
    POLICY_LOSSES,
    TRUST_DIVERGENCES,
    PolicyTokens,
    check_policy_loss,
    policy_loss,
)
from tests.losses.policy_oracle import SURROGATES, naive_loss, random_tokens, token_batch, values_of

NEEDED = {"beta": 0.0, "max_completion_length": 16}
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo", "rloo")
COUNTS = [3, 1, 0, 5, 2]


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(name, tokens, options, reference=None):
    output = policy_loss(name, tokens, {**NEEDED, **options}, reference)
    loss = output.local(tokens.batch)
    (gradient,) = torch.autograd.grad(loss, tokens.logps)
    return loss.item(), gradient, output.metrics


# ---- by hand -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def golden() -> PolicyTokens:
    """Two completions. The first, A = 2, has ratios 1.5 and 0.5; the second, A = -1, has the ratio 0.5.

    Old probabilities are 1/4, 1/2 and 1/2; those of the policy 3/8, 1/4 and 1/4.
    """
    return PolicyTokens(
        batch=token_batch([2, 1]),
        logps=numbers(3 / 8, 1 / 4, 1 / 4).log().requires_grad_(),
        old_logps=numbers(1 / 4, 1 / 2, 1 / 2).log(),
        advantages=numbers(2, 2, -1),
    )


def check(tokens, name, loss, gradient, **options):
    value, found, _ = loss_and_gradient(name, tokens, options)
    assert value == pytest.approx(loss, abs=1e-11)
    assert found.tolist() == pytest.approx(gradient, abs=1e-11)


def test_golden_clipped(golden):
    """epsilon 0.2. Token 1: min(1.5 * 2, 1.2 * 2) = 2.4, clipped, gradient 0. Token 2: min(0.5 * 2, 0.8 * 2) = 1, and
    d(-rho A) = -rho A dlogp = -1. Token 3: min(0.5 * -1, 0.8 * -1) = -0.8, clipped.
    Values -2.4, -1, 0.8. Token sums -3.4 and 0.8; means -1.7 and 0.8.
    grpo (-1.7 + 0.8) / 2; dapo, bnpo -2.6 / 3; dr_grpo -2.6 / (2 * 16); luspo on tokens -2.6 / 2.
    """
    check(golden, "grpo", -0.45, [0, -1 / 4, 0])
    check(golden, "dapo", -2.6 / 3, [0, -1 / 3, 0])
    check(golden, "bnpo", -2.6 / 3, [0, -1 / 3, 0])
    check(golden, "dr_grpo", -2.6 / 32, [0, -1 / 32, 0])
    check(golden, "luspo", -1.3, [0, -1 / 2, 0], importance_sampling_level="token")


def test_golden_two_bounds_and_delta(golden):
    """epsilon 0.6, epsilon_high 0.4: token 1 gives min(3, 1.4 * 2) = 2.8, clipped; tokens 2 and 3 are within 0.4 and 1.4:
    1 and -0.5. Sum of values -2.8 - 1 + 0.5 = -3.3; gradients 0, -1, 0.5, over 3 tokens.

    delta 1.25 with epsilon_high 0.6 and A = 2: min(1.25 * 2, 1.5 * 2) = 2.5, without gradient; -2.5 - 1 + 0.8 = -2.7.
    """
    check(golden, "dapo", -1.1, [0, -1 / 3, 1 / 6], epsilon=0.6, epsilon_high=0.4)
    check(golden, "dapo", -0.9, [0, -1 / 3, 0], epsilon=0.2, epsilon_high=0.6, delta=1.25)


def test_golden_gspo(golden):
    """Ratio of the first: sqrt(1.5 * 0.5) = 0.866025403784; min(rho 2, 0.8..1.2 of it 2) = 1.732050807569, not clipped;
    of the second 0.5, clipped to 0.8. grpo: (-1.732050807569 + 0.8) / 2. d rho / dlogp_t = rho / 2 for each token of the first:
    -2 * rho / 2 / 2 completions = -0.433012701892. Per token of GSPO-token: sg(rho) dlogp_t, -2 rho / 2 tokens / 2: the same.
    luspo: (2 * -1.732050807569 + 0.8) / 2 = -1.332050807569; each of two values moves with rho / 2: -2 rho / 2 = -rho.
    """
    root = math.sqrt(0.75)
    gradient = [-root / 2, -root / 2, 0]
    check(golden, "grpo", (-2 * root + 0.8) / 2, gradient, importance_sampling_level="sequence")
    check(golden, "grpo", (-2 * root + 0.8) / 2, gradient, importance_sampling_level="sequence_token")
    check(golden, "luspo", (-4 * root + 0.8) / 2, [-root, -root, 0])


def test_golden_rloo(golden):
    """Ratios of the completions: 1.5 * 0.5 = 0.75 and 0.5. -min(0.75 * 2, 0.8 * 2) = -1.5; -min(-0.5, -0.8) = 0.8, clipped.
    Mean -0.35; the gradient of the first by each of its log-probs is -1.5 / 2.
    """
    check(golden, "rloo", -0.35, [-0.75, -0.75, 0])


def test_golden_cispo(golden):
    """Weights min(rho, 1.25) = 1.25, 0.5, 0.5 without gradient: gradients -w A = -2.5, -1, 0.5 over 3 tokens.
    Loss: (-2.5 ln(3/8) - ln(1/4) + 0.5 ln(1/4)) / 3 = (2.452073132530 + 0.693147180560) / 3 = 1.048406771030.
    """
    check(golden, "cispo", 1.048406771030, [-2.5 / 3, -1 / 3, 0.5 / 3], epsilon_high=1.25)


def test_golden_sapo(golden):
    """tau 2 for A > 0, 4 for the other. With S the logistic function: -2 * 4/2 * S(2 * 0.5) = -4 S(1) = -2.924234314520;
    -4 S(-1) = -1.075765685480; 1 * 4/4 * S(4 * -0.5) = S(-2) = 0.119202922022.
    grpo's mean: ((-2.924234314520 - 1.075765685480) / 2 + 0.119202922022) / 2 = -0.940398538989.
    Slope by log p: -A 4 S S' rho: -8 * 0.196611933241 * 1.5 = -2.359343198897, over 4: -0.589835799724; -8 * 0.196611933241 *
    0.5 over 4: -0.196611933241; third 4 * S(2) S(-2) * 0.5 / 2 = 0.104993585404.
    """
    gradient = [-0.589835799724, -0.196611933241, 0.104993585404]
    check(golden, "sapo", -0.940398538989, gradient, sapo_temperature_pos=2.0, sapo_temperature_neg=4.0)


def test_golden_vespo(golden):
    """w = 0.75 and 0.5. phi(0.75) = e^3 0.75^2 e^(-2.25) = 0.5625 e^0.75 = 1.190812509344; phi(0.5) = e^2 / 8 e^-1 = e / 8 =
    0.339785228557. Gradients -phi A / 3 = -0.793875006229 twice, 0.113261742852.
    Loss = sum of gradient * log p: 0.793875006229 (0.980829253012 + 1.386294361120) - 0.113261742852 * 1.386294361120.
    """
    slope, other = -2 * 0.5625 * math.exp(0.75) / 3, math.e / 24
    loss = slope * (math.log(3 / 8) + math.log(1 / 4)) + other * math.log(1 / 4)
    assert loss == pytest.approx(1.722186158468, abs=1e-11)
    check(golden, "vespo", loss, [slope, slope, other])


def test_golden_gmpo(golden):
    """epsilon 0.4 in log space. First, A > 0: min(ln 1.5, 0.4) = 0.4 and ln 0.5; w = e^((0.4 - 0.693147180560) / 2) =
    0.863653998; its second token has the gradient -2 w / 2 / 2. Second, A < 0: max(ln 0.5, -0.4) = -0.4, w = e^-0.4.
    """
    w = math.sqrt(math.exp(0.4) * 0.5)
    check(golden, "gmpo", (-2 * w + math.exp(-0.4)) / 2, [0, -w / 2, 0])


@pytest.mark.parametrize(
    ("kind", "advantage", "epsilon", "is_kept"),
    [
        ("binary_tv", 1, None, False),  # |0.5 - 0.3| = 0.2 > 0.15
        ("binary_tv", 1, 0.2000001, True),
        ("binary_tv", -1, None, True),  # the step leads back to the sampler
        ("binary_kl", 1, 0.15, True),  # 0.082283
        ("binary_kl", 1, None, False),  # > 0.05
        ("binary_kl", 1, 0.0823, True),
        (
            "topk_tv",
            1,
            None,
            False,
        ),  # sampler 0.3, 0.4, rest 0.3; policy 0.5, 0.1, rest 0.4: (0.2 + 0.3 + 0.1) / 2 = 0.3
        ("topk_tv", 1, 0.301, True),
        ("topk_kl", 1, 0.314965, False),  # 0.3 ln 0.6 + 0.4 ln 4 + 0.3 ln 0.75 = 0.31496543
        ("topk_kl", 1, 0.314966, True),
    ],
)
def test_golden_dppo(kind, advantage, epsilon, is_kept):
    """mu 0.3, p 0.5: the weight is 5/3, the gradient -5/3 A where the token is kept and 0 where it is masked."""
    logp = numbers(0.5).log().requires_grad_()
    likeliest = numbers(0.3, 0.4).log()[None], numbers(0.5, 0.1).log()[None]
    tokens = PolicyTokens(
        token_batch([1]),
        logp,
        numbers(0.9).log(),
        numbers(advantage),
        sampling_logps=numbers(0.3).log(),
        likeliest=likeliest,
    )
    value, gradient, metrics = loss_and_gradient("dppo", tokens, {"divergence_type": kind, "epsilon": epsilon})
    slope = -advantage * 5 / 3 if is_kept else 0
    assert (value, gradient.item()) == pytest.approx((slope * math.log(0.5), slope), abs=1e-11)
    assert metrics["mask_ratio/overall_mean"].tolist() == [not is_kept]
    assert metrics["prob_diff/mean"].tolist() == pytest.approx([0.2])
    assert [len(metrics[f"mask_ratio/{sign}_adv_mean"]) for sign in ("positive", "negative")] == (
        [1, 0] if advantage > 0 else [0, 1]
    )


def test_dppo_keeps_what_the_sampler_did_not_say_and_bounds_its_weights():
    """Unknown mu: the old policy's, 0.1, is far from p = 0.9, and the token is kept; its weight 9 is bounded by 4."""
    tokens = PolicyTokens(
        token_batch([1]),
        numbers(0.9).log().requires_grad_(),
        numbers(0.1).log(),
        numbers(1),
        sampling_logps=numbers(math.nan),
    )
    assert loss_and_gradient("dppo", tokens, {})[1].item() == pytest.approx(-9)
    assert loss_and_gradient("dppo", tokens, {"clip_ratio_c": 4.0})[1].item() == pytest.approx(-4)
    known = replace(tokens, sampling_logps=tokens.old_logps)
    assert loss_and_gradient("dppo", known, {})[1].item() == 0
    for wrong, sentence in (
        ({"divergence_type": "js"}, "take one of binary_tv, binary_kl, topk_tv, topk_kl"),
        ({"clip_ratio_c": 0.5}, "at least 1; got 0.5"),
        ({"divergence_type": "topk_tv"}, "likeliest is not set"),
    ):
        with pytest.raises(ValueError, match=sentence):
            loss_and_gradient("dppo", tokens, wrong)


def test_golden_kl(golden):
    """With reference = old, d = -log rho: k3 = 1 / rho + ln rho - 1. rho 1.5: 0.072131774775; 0.5: 0.306852819440.
    Times rho: 0.108197662162 and 0.153426409720. beta 0.1 over 3 tokens. Slope of k3 by log p: 1 - 1 / rho = 1/3 and -1;
    of rho k3 = 1 + rho ln rho - rho: rho ln rho = 0.608197662162 and -0.346573590280.
    """
    plain, _, _ = loss_and_gradient("dapo", golden, {})
    kl = [0.072131774775, 0.306852819440, 0.306852819440]
    _, policy, _ = loss_and_gradient("dapo", golden, {})
    for corrected, values, slopes in (
        (False, kl, [1 / 3, -1, -1]),
        (True, [0.108197662162, 0.153426409720, 0.153426409720], [0.608197662162, -0.346573590280, -0.346573590280]),
    ):
        options = {"beta": 0.1, "use_bias_correction_kl": corrected}
        loss, gradient, metrics = loss_and_gradient("dapo", golden, options, golden.old_logps)
        assert loss - plain == pytest.approx(0.1 * sum(values) / 3, abs=1e-11)
        assert (gradient - policy).tolist() == pytest.approx([0.1 * slope / 3 for slope in slopes], abs=1e-11)
        assert metrics["kl"].tolist() == pytest.approx(values, abs=1e-11)


def test_golden_clamped_kl(golden):
    """At most 0.12 of a token: 0.108197662162 keeps its slope 0.608197662162, 0.153426409720 becomes 0.12 without one."""
    options = {"beta": 0.1, "kl_clip": 0.12}
    plain, policy, _ = loss_and_gradient("dapo", golden, {})
    loss, gradient, metrics = loss_and_gradient("dapo", golden, options, golden.old_logps)
    assert loss - plain == pytest.approx(0.1 * (0.108197662162 + 0.12 + 0.12) / 3, abs=1e-11)
    assert (gradient - policy).tolist() == pytest.approx([0.1 * 0.608197662162 / 3, 0, 0], abs=1e-11)
    assert metrics["kl"].tolist() == pytest.approx([0.108197662162, 0.12, 0.12], abs=1e-11)
    assert metrics["kl_clip_ratio"].tolist() == [0, 1, 1]


def test_a_divergence_without_weight_is_logged_and_nothing_more(golden):
    """beta 0 with a reference a long way off, whose divergence overflows float32: loss and gradient are those without it."""
    far = golden.old_logps - 200
    plain, policy, _ = loss_and_gradient("dapo", golden, {})
    loss, gradient, metrics = loss_and_gradient("dapo", golden, {}, far)
    assert (loss, gradient.tolist()) == (plain, policy.tolist())
    ratios = numbers(1.5, 0.5, 0.5)
    assert metrics["kl"].tolist() == pytest.approx((ratios * (200 + ratios.log() - 1)).tolist())


def test_estimators_of_the_divergence():
    """log p = ln 0.5, log reference = ln 0.25: k1 = ln 2, k3 = 0.5 + ln 2 - 1."""
    found = [estimate(numbers(0.5).log(), numbers(0.25).log()).item() for estimate in (k1, k3)]
    assert found == pytest.approx([0.693147180560, 0.193147180560], abs=1e-11)


def extremum(metric, kind):
    """The values that it is chosen from, where it is of that kind."""
    assert metric.is_largest == kind(metric.values).is_largest
    return metric.values.tolist()


def test_clip_metrics_by_hand(golden):
    """Tokens: one of three is above with A > 0, one below with A < 0. Completions: ratios 0.87 and 0.5, the second below."""
    _, _, metrics = loss_and_gradient("dapo", golden, {})
    assert metrics["clip_ratio/high_mean"].tolist() == [1, 0, 0]
    assert metrics["clip_ratio/low_mean"].tolist() == [0, 0, 1]
    assert metrics["clip_ratio/region_mean"].tolist() == [1, 0, 1]
    assert extremum(metrics["clip_ratio/low_min"], lowest) == [0, 1]  # completions: 0 of 2 tokens, 1 of 1
    assert extremum(metrics["clip_ratio/high_max"], highest) == [1 / 2, 0]
    _, _, metrics = loss_and_gradient("grpo", golden, {"importance_sampling_level": "sequence"})
    assert metrics["clip_ratio/low_mean"].tolist() == [0, 1]
    assert metrics["clip_ratio/high_mean"].tolist() == [0, 0]
    assert extremum(metrics["clip_ratio/low_min"], lowest) == [0, 1]
    _, _, metrics = loss_and_gradient("cispo", golden, {"epsilon_high": 1.25})
    assert metrics["cispo_clip_ratio"].tolist() == [1, 0, 0]
    _, _, metrics = loss_and_gradient("vespo", golden, {})
    assert metrics["vespo/phi_seq_mean"].tolist() == pytest.approx([1.190812509344, 0.339785228557], abs=1e-9)
    _, _, metrics = loss_and_gradient("gmpo", golden, {})
    assert metrics["clip_ratio/region_mean"].tolist() == [1, 0, 1]


# ---- against the naive formulas ------------------------------------------------------------------------------------------


def option_sets(name):
    """Every value of every option of this loss at least once, each with others."""
    if name in CLIPPED:
        return [{}, {"epsilon": 0.1, "epsilon_high": 0.28}, {"epsilon": 0.3, "delta": 1.5}, {"epsilon_high": 0.0}]
    return {
        "cispo": [{}, {"epsilon_high": 1.2}],
        "sapo": [{}, {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 2.0}],
        "vespo": [{}, {"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.7, "vespo_k_neg": 0.4, "vespo_lambda_neg": 1.5}],
        "gmpo": [{}, {"epsilon": 0.1, "epsilon_high": 0.2}],
        "dppo": [
            *({"divergence_type": kind} for kind in TRUST_DIVERGENCES),
            {"epsilon": 0.05, "epsilon_high": 0.02, "clip_ratio_c": 1.1},
        ],
    }[name]


CASES = [
    (name, level, options)
    for name, loss in POLICY_LOSSES.items()
    for level in (None, *loss.levels)
    for options in option_sets(name)
]
KL = [None, {"beta": 0.3}, {"beta": 0.3, "use_bias_correction_kl": False}, {"beta": 0.3, "kl_clip": 0.05}]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize(("name", "level", "options"), CASES)
def test_value_and_gradient_equal_the_naive_formula(name, level, options, kl, weighted):
    tokens, reference = random_tokens(int(weighted), COUNTS, weighted=weighted)
    reference = None if kl is None else reference
    options = {**NEEDED, **options, **(kl or {}), "importance_sampling_level": level}
    value, gradient, metrics = loss_and_gradient(name, tokens, options, reference)
    expected = naive_loss(name, tokens, reference, options)
    (expected_gradient,) = torch.autograd.grad(expected, tokens.logps)
    assert value == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)
    assert metrics["policy_loss"].mean().item() == pytest.approx(value, rel=1e-10, abs=1e-12)


def test_every_loss_has_an_oracle():
    assert set(SURROGATES) == set(POLICY_LOSSES)


# ---- what must hold ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
@pytest.mark.parametrize("name", [n for n, loss in POLICY_LOSSES.items() if "sequence" in loss.levels])
def test_completions_of_one_token_make_gspo_equal_to_grpo(name, level):
    tokens, reference = random_tokens(3, [1] * 9)
    options = {"beta": 0.2, "importance_sampling_level": "token"}
    value, gradient, _ = loss_and_gradient(name, tokens, options, reference)
    other, other_gradient, _ = loss_and_gradient(
        name, tokens, {**options, "importance_sampling_level": level}, reference
    )
    assert other == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "luspo", "gmpo", "rloo"])
def test_at_a_ratio_of_one_the_gradient_is_the_plain_policy_gradient(name):
    """-A times what the normaliser gives a token; of a whole completion's ratio (rloo), each token has the full slope."""
    tokens, _ = random_tokens(4, COUNTS, spread=0.0)
    _, gradient, _ = loss_and_gradient(name, tokens, {"importance_sampling_level": None if name == "rloo" else "token"})
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    n = len(COUNTS)
    shares = {
        "mean": 1 / (n * counts.clamp(min=1)), "max": torch.full((n,), 1 / (16.0 * n), dtype=torch.float64),
        "sum": torch.full((n,), 1.0 / n, dtype=torch.float64), "token": (1 / counts.sum()).expand(n),
    }  # fmt: skip
    rule = {"grpo": "mean", "sapo": "mean", "gmpo": "mean", "dr_grpo": "max", "luspo": "sum", "rloo": "sum"}
    share = shares[rule.get(name, "token")]
    torch.testing.assert_close(gradient, -tokens.advantages * tokens.batch.expand(share), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", CLIPPED)
def test_a_large_delta_changes_nothing(name):
    tokens, _ = random_tokens(5, COUNTS)
    plain, bounded = loss_and_gradient(name, tokens, {}), loss_and_gradient(name, tokens, {"delta": 1e6})
    assert plain[0] == bounded[0]
    assert torch.equal(plain[1], bounded[1])


def test_delta_bounds_what_the_clip_does_not():
    """A = -1 and rho = 10: the clip keeps -10 A = 10 with its gradient; delta 3 gives 3 and none."""
    tokens = PolicyTokens(token_batch([1]), numbers(math.log(10)).requires_grad_(), numbers(0), numbers(-1))
    assert loss_and_gradient("dapo", tokens, {})[0] == pytest.approx(10)
    value, gradient, _ = loss_and_gradient("dapo", tokens, {"delta": 3.0})
    assert (value, gradient.item()) == (3, 0)


@pytest.mark.parametrize("cap", [1.0, 1.3, 5.0])
def test_the_gradient_of_cispo_is_the_weighted_policy_gradient(cap):
    tokens, _ = random_tokens(6, COUNTS, spread=1.0)
    _, gradient, _ = loss_and_gradient("cispo", tokens, {"epsilon_high": cap})
    ratio = (tokens.logps - tokens.old_logps).detach().exp()
    torch.testing.assert_close(gradient, -ratio.clamp(max=cap) * tokens.advantages / sum(COUNTS), rtol=1e-12, atol=0)


def test_one_micro_batch_makes_bnpo_equal_to_dapo():
    tokens, reference = random_tokens(7, COUNTS, weighted=True)
    bnpo, dapo = (loss_and_gradient(name, tokens, {"beta": 0.1}, reference) for name in ("bnpo", "dapo"))
    assert bnpo[0] == pytest.approx(dapo[0], rel=1e-12)
    torch.testing.assert_close(bnpo[1], dapo[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_zero_advantages_give_exactly_zero_whatever_the_ratio(name):
    tokens, _ = random_tokens(8, COUNTS)
    far = (tokens.old_logps.float() + 200).requires_grad_()  # e^200 is inf in float32
    tokens = replace(
        tokens, logps=far, old_logps=tokens.old_logps.float(), advantages=torch.zeros(sum(COUNTS), dtype=torch.float32)
    )
    value, gradient, _ = loss_and_gradient(name, tokens, {})
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_an_empty_batch_gives_zero_and_adds_nothing_to_metrics(name):
    batch = token_batch([0], num_units=0)
    nothing = torch.zeros(0, dtype=torch.float64)
    tokens = PolicyTokens(batch, nothing.clone().requires_grad_(), nothing, nothing, nothing, nothing.bool())
    value, _, metrics = loss_and_gradient(name, tokens, {"beta": 0.1}, nothing)
    assert value == 0
    assert {len(values) for values in values_of(metrics)} == {0}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_mask_takes_tokens_out_of_the_policy_term_and_not_out_of_the_count(name):
    tokens, reference = random_tokens(9, COUNTS)
    nobody = replace(tokens, keep=torch.zeros(sum(COUNTS), dtype=torch.bool))
    assert loss_and_gradient(name, nobody, {})[0] == 0
    everybody = replace(
        tokens, keep=torch.ones(sum(COUNTS), dtype=torch.bool), correction=torch.ones(sum(COUNTS)).double()
    )
    plain, same = (loss_and_gradient(name, t, {"beta": 0.1}, reference) for t in (tokens, everybody))
    assert plain[0] == pytest.approx(same[0], rel=1e-12)
    if POLICY_LOSSES[name].has_kl:
        assert loss_and_gradient(name, nobody, {"beta": 0.1}, reference)[0] > 0


def test_a_masked_token_takes_its_whole_completion_out_of_vespo():
    """A correction of 0 at one token: w = 1e-8 for the completion, phi = e^3 1e-16."""
    tokens, _ = random_tokens(10, [3, 2], spread=0.0)
    tokens = replace(tokens, correction=numbers(1, 0, 1, 1, 1), advantages=numbers(1, 1, 1, 1, 1))
    _, gradient, _ = loss_and_gradient("vespo", tokens, {})
    assert gradient[:3].abs().max() < 1e-14
    assert gradient[3:].tolist() == pytest.approx([-0.2, -0.2])


def test_an_advantage_of_zero_counts_as_positive_in_vespo():
    """w = 1/2: phi = e^(3 - 1.5) / 4 with k 2 and lambda 3."""
    tokens = PolicyTokens(token_batch([1]), numbers(0.25).log().requires_grad_(), numbers(0.5).log(), numbers(0))
    _, _, metrics = loss_and_gradient("vespo", tokens, {})
    assert metrics["vespo/phi_seq_mean"].item() == pytest.approx(math.exp(1.5) / 4)


def part_of(tokens, reference, first, stop):
    """The completions `first` to `stop` as a micro-batch of their own, which shares the leaf `logps`."""
    starts = [0, *tokens.batch.counts.cumsum(0).tolist()]
    at = slice(starts[first], starts[stop])
    names = ("logps", "old_logps", "advantages", "correction", "keep", "sampling_logps")
    cut = {n: getattr(tokens, n)[at] for n in names}
    return PolicyTokens(batch=token_batch(tokens.batch.counts[first:stop].tolist()), **cut), reference[at]


@pytest.mark.parametrize("bounds", [(0, 1, 2, 3, 4, 5), (0, 2, 5), (0, 4, 5)])
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "bnpo"])
def test_a_step_has_one_gradient_however_it_is_cut(name, bounds):
    tokens, reference = random_tokens(11, COUNTS, weighted=True)
    options = {**NEEDED, "beta": 0.2}
    _, whole, _ = loss_and_gradient(name, tokens, options, reference)
    parts = [part_of(tokens, reference, *pair) for pair in pairwise(bounds)]
    totals = StepTotals.of([part.batch for part, _ in parts])
    loss = sum(policy_loss(name, part, options, ref).reduce(totals) for part, ref in parts)
    (gradient,) = torch.autograd.grad(loss, tokens.logps)
    torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-15)


def test_bnpo_is_the_mean_of_its_micro_batches():
    tokens, reference = random_tokens(12, COUNTS, weighted=True)
    parts = [part_of(tokens, reference, *pair) for pair in ((0, 2), (2, 5))]
    totals = StepTotals.of([part.batch for part, _ in parts])
    step = sum(policy_loss("bnpo", part, NEEDED).reduce(totals) for part, _ in parts)
    alone = [loss_and_gradient("bnpo", part, {})[0] for part, _ in parts]
    assert step.item() == pytest.approx(sum(alone) / 2, rel=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_float32_agrees_with_float64(name):
    tokens, reference = random_tokens(13, COUNTS, weighted=True)
    single = {n: getattr(tokens, n).detach().float() for n in ("old_logps", "advantages", "correction")}
    narrow = replace(tokens, logps=tokens.logps.detach().float().requires_grad_(), **single)
    wide, small = (
        loss_and_gradient(name, t, {"beta": 0.1}, r) for t, r in ((tokens, reference), (narrow, reference.float()))
    )
    assert small[0] == pytest.approx(wide[0], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(small[1].double(), wide[1], rtol=1e-4, atol=1e-5)


# ---- options -------------------------------------------------------------------------------------------------------------


def test_a_loss_says_which_options_it_takes():
    kl = {"beta", "use_bias_correction_kl", "kl_clip"}
    clip = {"epsilon", "epsilon_high", "delta"}
    level = {"importance_sampling_level"}
    assert POLICY_LOSSES["dapo"].options == kl | clip | level
    assert POLICY_LOSSES["dr_grpo"].options == kl | clip | level | {"max_completion_length"}
    assert POLICY_LOSSES["rloo"].options == clip
    assert POLICY_LOSSES["cispo"].options == kl | level | {"epsilon_high"}
    assert POLICY_LOSSES["gmpo"].options == kl | {"epsilon", "epsilon_high"}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_defaults_are_in_range_and_an_option_of_none_is_the_default(name):
    check_policy_loss(name, {**NEEDED, "epsilon": None, "epsilon_high": None, "delta": None})
    tokens, _ = random_tokens(14, COUNTS)
    nothing = {"epsilon": None, "epsilon_high": None, "delta": None, "importance_sampling_level": None}
    assert loss_and_gradient(name, tokens, nothing)[0] == loss_and_gradient(name, tokens, {})[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {}, "loss_type 'ppo' is unknown"),
        ("dapo", {"epsilon": -0.1}, "negative"),
        ("dapo", {"epsilon": 1.2}, "at most 1"),
        ("dapo", {"delta": 0.5}, "must exceed 1"),
        ("dapo", {"importance_sampling_level": "word"}, "unknown to dapo"),
        ("vespo", {"importance_sampling_level": "sequence"}, "it takes token"),
        ("cispo", {"epsilon_high": 0.2}, "at least 1"),
        ("sapo", {"sapo_temperature_neg": 0.0}, "above 0"),
        ("vespo", {"vespo_lambda_pos": 0.0}, "above 0"),
        ("gmpo", {"epsilon_high": -1.0}, "negative"),
    ],
)
def test_options_without_meaning_are_refused_without_data(name, options, message):
    with pytest.raises(ValueError, match=message):
        check_policy_loss(name, {**NEEDED, **options})


def test_options_come_from_a_config_too():
    @dataclass
    class Config:
        epsilon: float = 0.1
        beta: float = 0.0
        max_completion_length: int = 16

    tokens, _ = random_tokens(15, COUNTS)
    for name in POLICY_LOSSES:
        by_config = policy_loss(name, tokens, Config()).local(tokens.batch)
        assert by_config.item() == loss_and_gradient(name, tokens, {"epsilon": 0.1})[0]
