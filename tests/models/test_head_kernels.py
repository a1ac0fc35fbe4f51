"""What is read off a chunk of logits: torch's way against float64, and Triton's way against torch's.

Triton's kernels run on a CPU too where triton is installed: TRITON_INTERPRET=1 python -m pytest tests/models/test_head_kernels.py
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from posttrain.models.scoring import head_kernels
from posttrain.models.scoring.head_kernels import STATISTICS, Rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
WAYS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton and TRITON_INTERPRET=1")),
]
ROWS = {"torch": "_torch_rows", "triton": "_triton_rows"}
SLOPES = {"torch": "_torch_slopes", "triton": "_triton_slopes"}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(head_kernels, "BLOCK", 64)


def made(rows=5, width=203):
    return 3 * torch.randn(rows, width), torch.randint(0, width, (rows,))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("scale", "smoothing"), [(1.0, 0.0), (0.7, 0.0), (1.3, 0.2)])
def test_rows_and_slopes_are_those_of_float64_autograd(way, scale, smoothing):
    logits, targets = made()
    exact = logits.double().requires_grad_()
    logps = torch.log_softmax(exact * scale, -1)
    picked = logps.gather(-1, targets[:, None]).squeeze(-1)
    (-(1 - smoothing) * picked.sum() - smoothing * logps.mean(-1).sum()).backward()

    rows = Rows(len(logits), logits.device, torch.float32, STATISTICS)
    part = slice(0, len(logits))
    slopes = getattr(head_kernels, ROWS[way])(logits.clone(), targets, rows, part, scale, smoothing, True)
    assert torch.allclose(rows.logps.double(), picked, atol=1e-5)
    assert torch.allclose(rows.log_z.double(), torch.logsumexp(exact * scale, -1), atol=1e-5)
    assert torch.allclose(rows.entropy.double(), -(logps.exp() * logps).sum(-1), atol=1e-5)
    assert torch.equal(rows.is_most_likely, (logits.argmax(-1) == targets).float())
    assert torch.allclose(slopes.double(), exact.grad, atol=1e-6)
    assert torch.allclose(rows.mean_logps.double(), logps.mean(-1), atol=1e-5)
    assert torch.allclose(rows.answers()["mean_logit"].double(), (exact * scale).mean(-1), atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_slopes_from_a_known_normaliser(way):
    logits, targets = made()
    factors = torch.randn(len(logits))
    exact = logits.double().requires_grad_()
    picked = torch.log_softmax(0.7 * exact, -1).gather(-1, targets[:, None]).squeeze(-1)
    (-(factors.double() * picked)).sum().backward()
    log_z = torch.logsumexp(0.7 * logits, -1)
    found = getattr(head_kernels, SLOPES[way])(logits.clone(), targets, log_z, factors, 0.7)
    assert torch.allclose(found.double(), exact.grad, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_of_equal_logits_is_the_choice_and_extremes_are_no_trouble(way):
    logits = torch.full((3, 203), -5e4)
    logits[0, [70, 130]] = 5e4  # a tie across blocks: argmax takes the first
    logits[2, 202] = 3.0  # everything else underflows
    targets = torch.tensor([70, 0, 202])
    rows = Rows(3, logits.device, torch.float32, STATISTICS)
    getattr(head_kernels, ROWS[way])(logits, targets, rows, slice(0, 3), 1.0, 0.0, False)
    assert rows.is_most_likely.tolist() == [1, 1, 1]
    expected = torch.tensor([-0.6931, -5.3132, 0.0])
    assert torch.allclose(rows.logps, expected, atol=0.02)  # 5e4 + log 2 has its last bit at 0.004


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_is_passed_on(way):
    logits, targets = made(rows=2)
    logits[1, 100] = float("nan")
    rows = Rows(2, logits.device, torch.float32)
    getattr(head_kernels, ROWS[way])(logits, targets, rows, slice(0, 2), 1.0, 0.0, False)
    assert torch.isfinite(rows.logps[0])
    assert torch.isnan(rows.logps[1])
