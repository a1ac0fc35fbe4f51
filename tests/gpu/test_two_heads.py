"""Divergences of two heads on a CUDA device: the Triton kernels against float64, and time and memory beside log-probs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.distillation_head import WAYS, Heads, answers, made, measured, positions
from benchmarks.speed.head_side import Identity
from posttrain.losses.distributions import Divergence
from posttrain.models.scoring.two_heads import DivergenceQuestion, TeacherRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FAMILY = {
    "forward": Divergence(0),
    "reverse": Divergence(1),
    "beta 0.1": Divergence(0.1),
    "beta 0.5": Divergence(0.5),
    "beta 0.9": Divergence(0.9),
    "skew_forward": Divergence(kind="skew_forward"),
    "skew_reverse": Divergence(kind="skew_reverse"),
}


def heads_of(dtype: torch.dtype, tokens=193, width=64, vocabulary=10_007) -> Heads:
    """Sizes that fill neither blocks nor chunks; logits with a spread of about 3."""
    torch.manual_seed(0)

    def head() -> nn.Linear:
        linear = nn.Linear(width, vocabulary, device="cuda", dtype=dtype)
        nn.init.normal_(linear.weight, std=3 / width**0.5)
        return linear

    rows, taught = torch.randn(2, tokens, width, device="cuda").to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    return Heads(rows.clone().requires_grad_(), head(), targets, taught, Identity(taught, head().requires_grad_(False)))


def exact(
    heads: Heads, divergence: Divergence, words: int | None
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Full logits in float64 on the CPU: divergences, log-probs, and the leaves, whose gradients are to be asked for."""
    leaves = [one.detach().cpu().double().requires_grad_() for one in (heads.hidden, *heads.student.parameters())]
    theirs = [one.detach().cpu().double() for one in (heads.taught, *heads.teacher.lm_head.parameters())]
    ours, teacher = (
        (0.7 * nn.functional.linear(*leaves))[:, :words].log_softmax(-1),
        (1.3 * nn.functional.linear(*theirs))[:, :words].log_softmax(-1),
    )
    return divergence(ours, teacher), ours.gather(-1, heads.targets.cpu()[:, None])[:, 0], leaves


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    found = found.detach().cpu().double()
    assert (found - expected.detach()).norm() <= bound * expected.detach().norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("loss", ["sum", "any"])
@pytest.mark.parametrize("name", FAMILY)
def test_divergences_and_gradients_are_those_of_float64(name, loss, dtype, bound):
    heads = heads_of(dtype)
    heads.targets.clamp_(max=9_999)
    question = DivergenceQuestion(
        positions(heads),
        heads.targets,
        temperature=1 / 0.7,
        chunk_tokens=50,
        vocabulary=10_000,
        teacher=TeacherRows(heads.taught, heads.teacher, 1 / 1.3),
        divergence=FAMILY[name],
    )
    found = answers(heads, question)
    right, logps, leaves = exact(heads, FAMILY[name], 10_000)
    assert_near(found["divergences"], right, bound)
    assert_near(found["logps"], logps, bound)
    if loss == "sum":  # slopes while the chunks exist
        found["divergences"].sum().backward()
        right.sum().backward()
    else:  # computed again
        (found["divergences"].square().sum() - found["logps"].sum()).backward()
        (right.square().sum() - logps.sum()).backward()
    for parameter, leaf in zip((heads.hidden, *heads.student.parameters()), leaves):
        assert_near(parameter.grad, leaf.grad, bound)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_a_teacher_that_is_the_student_moves_nothing(beta):
    heads = heads_of(torch.bfloat16)
    teacher = TeacherRows(heads.hidden.detach(), Identity(heads.hidden, heads.student))
    question = DivergenceQuestion(positions(heads), heads.targets, teacher=teacher, divergence=Divergence(beta))
    found = answers(heads, question)["divergences"]
    found.sum().backward()
    assert found.abs().max() < 1e-5
    assert heads.hidden.grad.float().abs().max() < 1e-4


@pytest.mark.parametrize("way", ["forward KL", "reverse KL", "Jensen-Shannon, beta 0.5"])
def test_time_and_memory_beside_log_probs(way):
    """16,384 tokens, 151,936 words: at most 2.2 times the time and 1.2 times the memory of the log-probs of one head."""
    heads = made(16_384, 896, 151_936, "cuda")
    base, found = (measured(WAYS[name], heads, "cuda", repeats=5) for name in ("log-probs", way))
    assert found["milliseconds"] <= 2.2 * base["milliseconds"]
    assert found["gib"] <= 1.2 * base["gib"]
