"""KL estimators: worked numbers, and that they estimate what they should."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.reduce import k1, k2, k3


def test_golden_numbers():
    """log p - log q = ln 2 = 0.693147180560: k1 is that; k2 = 0.480453013918 / 2 = 0.240226506959;
    k3 = 1/2 - 1 + ln 2 = 0.193147180560. The other way round: k1 = -0.693147180560, k2 the same, k3 = 2 - 1 - ln 2
    = 0.306852819440.
    """
    p = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    q = p.flip(0)
    assert k1(p, q).tolist() == pytest.approx([0.693147180560, -0.693147180560], abs=1e-11)
    assert k2(p, q).tolist() == pytest.approx([0.240226506959, 0.240226506959], abs=1e-11)
    assert k3(p, q).tolist() == pytest.approx([0.193147180560, 0.306852819440], abs=1e-11)


def test_expectation_under_the_policy():
    """Over a vocabulary of 4 the mean of k1 and of k3 under p is KL(p || q) exactly; k2 is close when q is close."""
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    q = torch.tensor([0.11, 0.19, 0.32, 0.38], dtype=torch.float64)
    kl = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist()))
    for estimator, tolerance in ((k1, 1e-12), (k3, 1e-12), (k2, 0.05 * kl)):
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(kl, abs=tolerance)


@settings(max_examples=100, deadline=None)
@given(log_ratio=st.floats(-50, 50))
def test_k2_and_k3_are_never_negative(log_ratio):
    p, q = torch.tensor([log_ratio]), torch.tensor([0.0])
    assert k2(p, q).item() >= 0
    assert k3(p, q).item() >= 0
