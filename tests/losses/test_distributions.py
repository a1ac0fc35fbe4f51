"""Divergences of distributions: worked numbers, slopes, rules that hold for all inputs, and zeros."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.losses.distributions import (
    BOTH,
    LARGEST_LOG_MASS,
    SORTED_L1,
    STUDENT,
    Divergence,
    on_support,
    sorted_l1,
)

P, Q = (0.4, 0.3, 0.2, 0.1), (0.1, 0.5, 0.15, 0.25)
FAMILY = {
    "forward": Divergence(0),
    "reverse": Divergence(1),
    "jsd": Divergence(0.3),
    "skew_forward": Divergence(kind="skew_forward"),
    "skew_reverse": Divergence(kind="skew_reverse"),
}
SUPPORTS = {
    "teacher-tail": Divergence(0, top_k=2, tail=True),
    "student": Divergence(0.5, top_k=2, top_k_of=STUDENT),
    "both-tail": Divergence(1, top_k=2, top_k_of=BOTH, tail=True),
    "both": Divergence(0.3, top_k=2, top_k_of=BOTH),
}


def logs(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def value(divergence: Divergence, p=P, q=Q) -> float:
    return divergence(logs(p), logs(q)).item()


@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        (Divergence(0), 0.302704),
        (Divergence(1), 0.367177),
        (Divergence(0.1), 0.027328),
        (Divergence(0.5), 0.079215),
        (Divergence(0.9), 0.031663),
        (Divergence(kind="skew_forward", skew=0.1), 0.247088),
        (Divergence(kind="skew_reverse", skew=0.1), 0.274108),
        (Divergence(0, top_k=1, tail=True), 0.087177),
        (Divergence(0, top_k=2, tail=True), 0.265618),
        (Divergence(0, top_k=2), 0.017372),
        (Divergence(1, top_k=2, top_k_of=STUDENT), 0.419092),
        (Divergence(0.5, top_k=2, top_k_of=STUDENT), 0.091712),
        (Divergence(1, top_k=2, top_k_of=STUDENT, tail=True), 0.314965),
    ],
    ids=str,
)
def test_golden_numbers(divergence, expected):
    """p = (0.4, 0.3, 0.2, 0.1) of the student, q = (0.1, 0.5, 0.15, 0.25) of the teacher."""
    assert value(divergence) == pytest.approx(expected, abs=1e-6)


def test_golden_numbers_of_given_tokens():
    """What a served teacher says: the realised token 0 alone, and with the teacher's first choice, 1; both with a tail."""
    realised = on_support(logs(P)[:, :1], logs(Q)[:, :1], Divergence(1, top_k=1, tail=True))
    both = on_support(logs(P)[:, :2], logs(Q)[:, :2], Divergence(0.5, top_k=1, tail=True))
    assert [realised.item(), both.item()] == pytest.approx([0.311239, 0.064403], abs=1e-6)


def test_golden_numbers_at_temperature_two():
    tempered = [(logs(one) / 2).log_softmax(-1) for one in (P, Q)]
    found = [Divergence(beta)(*tempered).item() for beta in (0, 1)]
    assert found == pytest.approx([0.087657, 0.095013], abs=1e-6)


def test_golden_sorted_l1():
    """(0.6, 0.3, 0.1) and (0.5, 0.25, 0.15, 0.1): 0.1 + 0.05 + 0.05 + 0.1; of the two first 0.15, and 0.15 of the rests."""
    p, q = (0.3, 0.1, 0.6), (0.25, 0.1, 0.5, 0.15)
    assert value(Divergence(kind=SORTED_L1), p, q) == pytest.approx(0.3, abs=1e-12)
    assert value(Divergence(kind=SORTED_L1), q, p) == pytest.approx(0.3, abs=1e-12)
    assert sorted_l1(logs(p), logs(q), top_k=2).item() == pytest.approx(0.15, abs=1e-12)
    assert sorted_l1(logs(p), logs(q), top_k=2, tail=True).item() == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0, (0.3, -0.2, 0.05, -0.15)),
        (1, (0.407647, -0.263401, -0.015899, -0.128347)),
        (0.5, (0.079512, -0.054019, 0.006109, -0.031603)),
    ],
)
def test_golden_slopes_by_the_students_logits(beta, expected):
    assert slope(Divergence(beta), logs(P), logs(Q)).tolist()[0] == pytest.approx(expected, abs=1e-6)


def slope(divergence, student, teacher):
    student = student.clone().requires_grad_()
    divergence(student.log_softmax(-1), teacher.log_softmax(-1)).sum().backward()
    return student.grad


@pytest.mark.parametrize("name", FAMILY)
def test_slopes_are_those_of_the_formula(name):
    """p (g - sum p g), g = b (log(p/m) + 1 - (1-w) p/m) - a (1-w) q/m: what the fused heads compute."""
    logits = torch.randn(2, 5, 11, dtype=torch.float64) * 3
    p, q = logits.softmax(-1)
    a, b, w = FAMILY[name].shares
    m = (1 - w) * p + w * q
    g = b * ((p / m).log() + 1 - (1 - w) * p / m) - a * (1 - w) * q / m
    expected = p * (g - (p * g).sum(-1, keepdim=True))
    torch.testing.assert_close(slope(FAMILY[name], *logits), expected, rtol=1e-10, atol=1e-12)


# ---- rules ---------------------------------------------------------------------------------------------------------------

numbers = st.lists(st.floats(-30, 30), min_size=12, max_size=12)


def pair(values) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(values, dtype=torch.float64).view(2, 1, 6).log_softmax(-1).unbind()


@pytest.mark.parametrize("name", FAMILY | SUPPORTS)
@settings(max_examples=40, deadline=None)
@given(values=numbers)
def test_a_teacher_that_is_the_student_costs_nothing_and_moves_nothing(name, values):
    divergence = (FAMILY | SUPPORTS)[name]
    student, _ = pair(values)
    bound = -2 * LARGEST_LOG_MASS if divergence.tail else 1e-12  # a tail is never below that
    assert abs(divergence(student, student.clone()).item()) < bound
    assert slope(divergence, student, student.clone()).abs().max() < bound


@settings(max_examples=60, deadline=None)
@given(values=numbers, beta=st.floats(0.01, 0.99))
def test_jensen_shannon_is_bounded_and_swaps_its_sides(values, beta):
    """jsd(beta) of (p, q) is jsd(1 - beta) of (q, p), and at most the entropy of (beta, 1 - beta) <= ln 2."""
    student, teacher = pair(values)
    found = Divergence(beta)(student, teacher).item()
    assert found == pytest.approx(Divergence(1 - beta)(teacher, student).item(), abs=1e-12)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert -1e-12 <= found <= entropy + 1e-12
    assert entropy <= math.log(2) + 1e-12


@pytest.mark.parametrize("name", FAMILY | SUPPORTS)
@settings(max_examples=40, deadline=None)
@given(values=numbers)
def test_never_negative_and_the_slope_sums_to_nothing(name, values):
    """The slope by logits sums to 0: a constant added to all of them changes no distribution."""
    divergence = (FAMILY | SUPPORTS)[name]
    student, teacher = pair(values)
    assert divergence(student, teacher).item() >= (2 * LARGEST_LOG_MASS if divergence.tail else -1e-12)
    assert slope(divergence, student, teacher).sum().abs() < 1e-10


@settings(max_examples=60, deadline=None)
@given(values=numbers)
def test_sorted_l1_knows_no_names_of_tokens_and_is_at_most_two(values):
    student, teacher = pair(values)
    found = Divergence(kind=SORTED_L1)(student, teacher).item()
    assert found == pytest.approx(Divergence(kind=SORTED_L1)(student.flip(-1), teacher).item(), abs=1e-12)
    assert 0 <= found <= 2 + 1e-12
    shortened = sorted_l1(student, teacher, top_k=3, tail=True).item()
    rest = sum(1 - one.exp().topk(3).values.sum().item() for one in (student, teacher))
    assert found - rest - 1e-12 <= shortened <= found + 1e-12


# ---- zeros ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_words_without_mass_are_no_trouble_in_either_direction(name, dtype):
    """-inf in both, as in the padding of a support: 0 log 0 = 0, and gradients are finite."""
    logits = torch.tensor([[1.0, 2, 0, 1], [0.5, 1, 2, 1]], dtype=dtype)
    cut = logits.clone()
    cut[:, 3] = -torch.inf
    expected = FAMILY[name](*logits[:, :3].log_softmax(-1).split(1))
    torch.testing.assert_close(FAMILY[name](*cut.log_softmax(-1).split(1)), expected)
    found = slope(FAMILY[name], cut[:1], cut[1:])
    torch.testing.assert_close(found[:, :3], slope(FAMILY[name], logits[:1, :3], logits[1:, :3]))
    assert found[0, 3] == 0


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_entries_outside_of_a_support_do_not_count_whatever_they_are(beta, tail):
    student, teacher = torch.randn(2, 3, 6, dtype=torch.float64).log_softmax(-1)
    inside = torch.tensor([True, True, False, True, False, False]).expand(3, 6)
    divergence = Divergence(beta, top_k=6, tail=tail)
    expected = on_support(student[:, [0, 1, 3]], teacher[:, [0, 1, 3]], divergence)
    student = torch.where(inside, student, -torch.inf).requires_grad_()
    found = on_support(student, torch.where(inside, teacher, torch.nan), divergence, inside)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert student.grad.isfinite().all()
    assert (student.grad[~inside] == 0).all()


@pytest.mark.parametrize("beta", [0, 0.4, 1])
def test_a_support_with_all_of_the_mass_has_a_finite_tail(beta):
    """float32: 1 - sum is 0 or below it; the tail is kept at 1e-7."""
    sure = torch.tensor([[0.0, -40.0]]).requires_grad_()
    found = on_support(sure, torch.tensor([[-1e-3, -8.0]]), Divergence(beta, top_k=2, tail=True))
    found.sum().backward()
    assert 0 <= found.item() < 0.02
    assert sure.grad.isfinite().all()


def test_both_sides_likeliest_tokens_count_once_where_they_are_the_same():
    """p's first two are 0 and 1, q's 1 and 3: the support is 0, 1, 3."""
    found = value(Divergence(0, top_k=2, top_k_of=BOTH))
    assert found == pytest.approx(on_support(logs(P)[:, [0, 1, 3]], logs(Q)[:, [0, 1, 3]], Divergence(0)).item())


def test_a_support_of_the_whole_vocabulary_is_the_divergence_itself():
    assert value(Divergence(0.3, top_k=4)) == value(Divergence(0.3)) == value(Divergence(0.3, top_k=9, tail=True))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"beta": 1.5}, r"between 0 \(forward KL\) and 1"),
        ({"kind": "tv"}, "Unknown kind of divergence 'tv'"),
        ({"top_k": 1}, "the loss is always 0"),
        ({"tail": True}, "there is none"),
        ({"top_k": 2, "top_k_of": "none"}, "top_k_of is one of"),
        ({"kind": SORTED_L1, "top_k": 2}, "must be 'both'"),
        ({"skew": 1.0}, "from 0 to below 1"),
        ({"top_k": -1}, "a number of tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Divergence(**given)


def test_one_token_without_a_tail_is_refused():
    with pytest.raises(ValueError, match="the loss is always 0"):
        on_support(logs(P)[:, :1], logs(Q)[:, :1], Divergence(0))


def test_the_realised_token_stands_for_the_students_likeliest():
    """beta 1: KL of (p_y, 1 - p_y) from (q_y, 1 - q_y); in between the teacher's likeliest is there, too, once."""
    p, q = (torch.tensor([row] * 2, dtype=torch.float64) for row in ([0.5, 0.3, 0.2], [0.2, 0.1, 0.7]))
    reverse = Divergence(1.0, top_k=1, top_k_of=STUDENT, tail=True, realised=True)
    found = reverse(p.log(), q.log(), torch.tensor([1, 2]))
    wanted = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((0.3, 0.1), (0.2, 0.7))]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    both = Divergence(0.3, top_k=1, top_k_of=BOTH, tail=True, realised=True)
    found = both(p.log(), q.log(), torch.tensor([1, 2]))
    whole = Divergence(0.3)
    pair = whole(*(torch.tensor([row], dtype=torch.float64).log() for row in ([0.2, 0.8], [0.7, 0.3])))
    assert found.tolist() == pytest.approx([whole(p.log(), q.log())[0].item(), pair.item()], abs=1e-12)
    with pytest.raises(ValueError, match="realised is for a support of top_k 1"):
        Divergence(0.0, top_k=1, tail=True, realised=True)
