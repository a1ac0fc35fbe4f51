"""The four f-divergences: worked numbers, limits, bounds, and where they are clamped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.divergences import (
    F_DIVERGENCES,
    alpha_divergence,
    forward_kl,
    js_divergence,
    largest_score,
    reverse_kl,
)
from posttrain.losses.named_options import call


def at(*log_ratios: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(log_ratios, dtype=dtype)


def test_golden_scores():
    """With u = e^l: forward_kl 1 - 1/u is 1/2 at u = 2 and -3 at u = 1/4.
    js log(2u / (1 + u)) is ln 1.5 at u = 3 and ln 0.5 at u = 1/3.
    alpha (u^(a-1) - 1) / (a - 1): a = 0.5 at u = 4 is (1/2 - 1) / (-1/2) = 1; a = 2 at u = 4 is 3; a = 3 at u = 2 is 3/2.
    """
    ln = math.log
    assert reverse_kl(at(ln(3))).tolist() == [ln(3)]
    assert forward_kl(at(ln(2), ln(0.25))).tolist() == pytest.approx([0.5, -3], abs=1e-12)
    assert js_divergence(at(ln(3), ln(1 / 3))).tolist() == pytest.approx([ln(1.5), ln(0.5)], abs=1e-12)
    assert alpha_divergence(at(ln(4)), f_alpha=0.5).item() == pytest.approx(1, abs=1e-12)
    assert alpha_divergence(at(ln(4)), f_alpha=2.0).item() == pytest.approx(3, abs=1e-12)
    assert alpha_divergence(at(ln(2)), f_alpha=3.0).item() == pytest.approx(1.5, abs=1e-12)


@pytest.mark.parametrize(("name", "slope"), [("reverse_kl", 1), ("forward_kl", 1), ("js_divergence", 0.5)])
def test_slope_where_policy_and_reference_agree(name, slope):
    """d/dl at l = 0: 1, e^0 = 1, S(0) = 1/2."""
    log_ratio = at(0.0).requires_grad_()
    F_DIVERGENCES[name](log_ratio).sum().backward()
    assert log_ratio.grad.item() == slope


@settings(max_examples=100, deadline=None)
@given(x=st.floats(-20, 20))
def test_limits_of_the_alpha_divergence(x):
    """To first order in h, alpha = 1 + h gives x + h x^2 / 2: the limit at 1 is reverse_kl; at 0 it is forward_kl."""
    h = 1e-9
    near_one = alpha_divergence(at(x), f_alpha=1 + h).item()
    assert near_one == pytest.approx(x + h * x * x / 2, rel=1e-6, abs=1e-9)
    assert alpha_divergence(at(x), f_alpha=1.0).item() == x
    assert alpha_divergence(at(x), f_alpha=0.0).item() == forward_kl(at(x)).item()


@settings(max_examples=100, deadline=None)
@given(x=st.floats(-1e4, 1e4))
def test_bounds_of_js_and_forward_kl(x):
    """js lies below log 2 and below log 2 + x; forward_kl below 1 and below x (1 - e^-x <= x)."""
    assert js_divergence(at(x)).item() <= math.log(2) + min(0.0, x) + 1e-12
    assert forward_kl(at(x)).item() <= min(1.0, x) + 1e-12


@pytest.mark.parametrize("name", F_DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=50, deadline=None)
@given(a=st.floats(-1e4, 1e4), b=st.floats(-1e4, 1e4), alpha=st.floats(-1, 3))
def test_scores_keep_the_order_of_log_ratios(name, dtype, a, b, alpha):
    low, high = call(F_DIVERGENCES[name], at(min(a, b), max(a, b), dtype=dtype), options={"f_alpha": alpha}).tolist()
    assert low <= high + 4 * torch.finfo(dtype).eps * (1 + abs(high))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("f_alpha", [-1.0, 0.0, 0.5, 2.0, 3.0])
def test_the_clamp_bites_only_beyond_the_largest_score(dtype, f_alpha):
    """e^|l| grows to a tenth of the root of the largest number: l = -41.9 in float32 for forward_kl, -352.6 in float64."""
    sign = 1 if f_alpha > 1 else -1
    edge = sign * math.log1p(largest_score(dtype) * abs(f_alpha - 1)) / abs(f_alpha - 1)
    for inside, grows in ((0.99, True), (1.01, False)):
        log_ratio = at(edge * inside, dtype=dtype).requires_grad_()
        score = alpha_divergence(log_ratio, f_alpha=f_alpha)
        score.sum().backward()
        assert (log_ratio.grad.item() != 0) is grows
        assert abs(score.item()) <= 1.001 * largest_score(dtype)
        assert torch.isfinite((2 * score) ** 2).all()


def test_precision_near_zero_in_float32():
    """1 - e^-l at l = 1e-6 is 9.999995e-7; exp alone would leave one digit of it in float32."""
    assert forward_kl(at(1e-6, dtype=torch.float32)).item() == pytest.approx(9.999995e-7, rel=1e-6)
