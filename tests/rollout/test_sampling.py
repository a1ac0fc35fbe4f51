"""Noise and draws: golden numbers, uniformity, the distribution that is drawn from, and what is said about it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollout.engines.noise import _mixed, gumbels, noise_base, uniforms, word_of, words
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.engines.sampling import FIRST_TOKEN, DrawRule, draw, drawn_from, nucleus_floor, truncated

# ---- noise -----------------------------------------------------------------------------------------------------------------

GOLDEN = [
    ((0, 0, 0), 0, 2558736989570252433, 0.44855777686828346),
    ((1, 2, 3), 4, 7702586659592502839, 0.06035810440677147),
    ((-1, 2**63, 7), 10**6, -8238959994935340331, 0.4187781670469021),
]


def test_the_mixer_is_splitmix64s():
    """First number of its published stream from seed 0."""
    assert _mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def reference_uniform(seed, key, sample, token, index):
    """Python's own integers, from the formula."""
    word, golden, full = 0, 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mixed(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
        return z ^ (z >> 31)

    for part in (seed, key, sample):
        word = mixed((word + part + golden) & full)
    for part in (token, index):
        word = mixed((word + (part + 1) * golden) & full)
    return ((word >> 12) + 0.5) / 2**52


@pytest.mark.parametrize(("who", "token", "base", "uniform"), GOLDEN)
def test_golden_noise(who, token, base, uniform):
    """These numbers are a promise: a completion can be drawn again with a later version of the library."""
    assert noise_base(*who) == base
    assert uniforms(words(torch.tensor([base]), torch.tensor([token])), torch.tensor([6])).item() == uniform


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(2**40), 2**70), st.integers(-(2**63), 2**64), st.integers(0, 2**32), st.integers(0, 2**40),
    st.integers(0, 2**33),
)  # fmt: skip
def test_torch_and_python_agree_on_the_noise(seed, key, sample, token, index):
    base = noise_base(seed, key, sample)
    wanted = reference_uniform(seed, key, sample, token, index)
    assert 0 < wanted < 1
    assert uniforms(words(torch.tensor([base]), torch.tensor([token])), torch.tensor([index])).item() == wanted
    assert words(torch.tensor([base]), torch.tensor([token])).item() % 2**64 == word_of(base, token)


def test_noise_is_uniform_and_neighbours_know_nothing_of_each_other():
    keys, samples, tokens, indices = 30, 4, 20, 40
    bases = torch.tensor([noise_base(3, key, sample) for key in range(keys) for sample in range(samples)])
    noise = uniforms(words(bases[:, None], torch.arange(tokens))[:, :, None], torch.arange(indices)).flatten()
    counts = torch.histc(noise, 100, 0, 1)
    expected = len(noise) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 150  # 99 degrees of freedom: 0.9993 of all cases
    table = noise.view(keys, samples, tokens, indices) - 0.5
    for one, other in (
        (table[..., 1:], table[..., :-1]),
        (table[:, :, 1:], table[:, :, :-1]),
        (table[:, 1:], table[:, :-1]),
        (table[1:], table[:-1]),
    ):
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / one.numel() ** 0.5


# ---- draws -----------------------------------------------------------------------------------------------------------------


def some_words(count, seed=0):
    return words(torch.full((count,), noise_base(seed, 1, 2)), torch.arange(count))


def test_draws_follow_the_softmax():
    """Chi-square over 25,000 draws, also beyond one block of the vocabulary."""
    torch.manual_seed(3)
    logits = 2 * torch.randn(1, 2500)
    count = 25_000
    ids = torch.cat([drawn_from(logits.expand(5000, -1), part)[0] for part in some_words(count).split(5000)])
    expected = count * logits[0].double().softmax(-1)
    counts = torch.bincount(ids, minlength=2500).double()
    likely = expected >= 5
    chi = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert abs(chi - degrees) < 4 * (2 * degrees) ** 0.5
    assert abs(counts[~likely].sum() - expected[~likely].sum()) < 4 * expected[~likely].sum() ** 0.5


def test_the_token_is_that_of_the_formula():
    torch.manual_seed(4)
    logits, word = 4 * torch.randn(20, 5000), some_words(20)
    ids, logps = drawn_from(logits, word)
    exact = logits.double()
    for row in range(20):
        log_sums = torch.stack([part.logsumexp(0) for part in exact[row].split(1024)])
        block = int((log_sums + gumbels(word[row], torch.arange(5))).argmax())
        inside = torch.arange(block * 1024, min(block * 1024 + 1024, 5000))
        assert ids[row] == inside[(exact[row, inside] + gumbels(word[row], FIRST_TOKEN + inside)).argmax()]
    assert torch.allclose(logps.double(), exact.log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1), atol=1e-5)


def test_rounding_changes_a_draw_in_ten_thousand_not_one_in_a_hundred():
    """A flat distribution over a large vocabulary, changed as another batch size would change it."""
    torch.manual_seed(5)
    count, changed = 1000, 0
    for word in some_words(count).split(200):
        logits = torch.randn(200, 30_000)
        moved = logits + 1e-5 * torch.randn(200, 30_000)
        changed += int((drawn_from(logits, word)[0] != drawn_from(moved, word)[0]).sum())
    assert changed <= 1


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((500, 2500), float("-inf"))
    logits[:, [700, 1500]] = 0.0
    ids, logps = drawn_from(logits, some_words(500))
    assert set(ids.tolist()) == {700, 1500}
    assert 180 < (ids == 700).sum() < 320
    assert torch.allclose(logps, torch.tensor(0.5).log())


def explicit_kept(scores, rule):
    """The tokens that are left, by sorting."""
    kept = np.ones(len(scores), bool)
    if rule.top_k:
        kept &= scores >= np.sort(scores)[-rule.top_k]
    probs = np.where(kept, np.exp(scores - scores.max()), 0)
    probs /= probs.sum()
    if rule.top_p < 1:
        order = np.argsort(-probs)
        needed = int(np.searchsorted(np.cumsum(probs[order]), rule.top_p)) + 1
        kept &= np.isin(np.arange(len(scores)), order[:needed])
    if rule.min_p:
        kept &= probs >= rule.min_p * probs.max()
    return kept


@pytest.mark.parametrize(
    "rule",
    [
        DrawRule(top_k=7),
        DrawRule(top_p=0.8),
        DrawRule(top_p=0.05),
        DrawRule(min_p=0.1),
        DrawRule(top_k=50, top_p=0.9, min_p=0.02),
    ],
)
def test_truncation_keeps_what_sorting_keeps(rule):
    rng = np.random.default_rng(5)
    scores = rng.normal(0, 3, (20, 400))
    found = torch.isfinite(truncated(torch.tensor(scores, dtype=torch.float32), rule)).numpy()
    assert np.array_equal(found, np.stack([explicit_kept(row, rule) for row in scores]))


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 0.999999), st.integers(0, 1000))
def test_the_nucleus_is_the_smallest_set_that_holds_its_mass(top_p, seed):
    probs = torch.softmax(4 * torch.randn(3, 300, generator=torch.Generator().manual_seed(seed)), -1)
    kept = probs >= nucleus_floor(probs, top_p)
    mass = torch.where(kept, probs, 0).sum(-1)
    smallest = torch.where(kept, probs, 2).amin(-1)
    assert kept.any(-1).all()
    assert (mass >= top_p - 1e-6).all()
    assert (mass - smallest < top_p + 1e-6).all()


def test_penalty_bias_and_temperature_come_in_this_order():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    seen = torch.tensor([[True, True, False, False]])
    rule = DrawRule(temperature=0.5, repetition_penalty=2.0, logit_bias={3: 1.5})
    drawn = draw(logits, some_words(1), rule, rule.bias(4, logits.device), seen)
    wanted = torch.log_softmax(torch.tensor([1.0, -4.0, 1.0, 1.5]) / 0.5, -1)
    assert torch.allclose(drawn.sampling_logps, wanted[drawn.ids])
    assert torch.allclose(drawn.policy_logps, torch.log_softmax(logits[0] / 0.5, -1)[drawn.ids])


def test_greedy_takes_the_first_of_the_most_likely():
    logits = torch.zeros(1, 2000)
    logits[0, [900, 1700]] = 3.0
    drawn = draw(logits, some_words(1), DrawRule(temperature=0.0))
    assert drawn.ids.tolist() == [900]
    assert drawn.sampling_logps.tolist() == [0.0]
    assert torch.allclose(drawn.policy_logps, torch.log_softmax(logits, -1)[0, 900])


def test_mean_ratio_on_the_support_of_a_truncated_draw_is_the_mass_that_was_kept():
    """E_q[p / q] over the support of q is the policy's mass on it: between top_p and 1, and known exactly."""
    torch.manual_seed(6)
    logits = 2 * torch.randn(1, 300)
    rule, count = DrawRule(top_p=0.8), 5_000
    drawn = draw(logits.expand(count, -1), some_words(count), rule)
    probs = torch.softmax(logits, -1)
    mass = torch.where(probs >= nucleus_floor(probs, 0.8), probs, 0).sum()
    ratio = (drawn.policy_logps - drawn.sampling_logps).exp()
    assert torch.allclose(ratio, mass, atol=1e-4)
    assert mass >= 0.8
    # The trainer's score, renormalised to the same support.
    on_support = truncated(logits, rule).log_softmax(-1)[0, drawn.ids]
    assert (on_support - drawn.sampling_logps).exp().mean().item() == pytest.approx(1.0, abs=1e-4)


def test_a_row_of_nan_gives_a_token_and_says_nan():
    drawn = draw(torch.full((1, 1500), float("nan")), some_words(1), DrawRule())
    assert 0 <= drawn.ids.item() < 1500
    assert torch.isnan(drawn.policy_logps).all()


@pytest.mark.parametrize(
    ("wrong", "name"),
    [({"max_tokens": 0}, "max_tokens"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": -1}, "top_k"),
     ({"min_p": 2}, "min_p"), ({"repetition_penalty": 0}, "repetition_penalty"), ({"stop": "x"}, "stop"),
     ({"stop": ("",)}, "stop")],
)  # fmt: skip
def test_wrong_params_are_refused_in_a_sentence(wrong, name):
    with pytest.raises(ValueError, match=f"Sampling: `{name}` is .* must be"):
        SamplingParams(**{"max_tokens": 5, **wrong})


def test_a_bias_for_a_token_that_does_not_exist():
    with pytest.raises(ValueError, match="names token 7"):
        DrawRule(logit_bias={7: 1.0}).bias(5, torch.device("cpu"))
