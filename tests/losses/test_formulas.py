"""The lines that `posttrain explain` prints are the losses: each is computed from its text and compared with the function."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.core.batch import RAGGED, TokenBatch
from posttrain.losses import formulas, policy, reward
from posttrain.losses.divergences import F_DIVERGENCES
from posttrain.losses.formulas import filled, surrogate_line
from posttrain.losses.gae import value_loss
from posttrain.losses.importance import CORRECTION_MODES
from posttrain.losses.named_options import call
from posttrain.losses.pair import Pair
from posttrain.losses.perception import LARGEST_PERCEPTION, perception
from posttrain.losses.policy import POLICY_LOSSES, RATIOS, PolicyTokens
from posttrain.losses.preference import PREFERENCE_LOSSES
from posttrain.losses.reference_free import REFERENCE_FREE_LOSSES, Answers, log_odds_ratio, reference_free_loss
from posttrain.losses.supervised import SUPERVISED_LOSSES
from posttrain.losses.unpaired import UNPAIRED_LOSSES, Unpaired
from posttrain.methods.grpo import GRPOConfig
from posttrain.methods.ppo import PPOConfig, PPOTrainer
from posttrain.methods.table import METHODS
from posttrain.trainer.base import BaseTrainer

COUNTS = [3, 1, 4]
OPTIONS = {
    "beta": 0.3, "label_smoothing": 0.2, "label_smoothing_factor": 0.1, "discopop_tau": 0.05, "f_alpha_divergence_coef": 0.4,
}  # fmt: skip


def of_sequences(combine):
    """f over the tokens of each completion, given to each of them."""

    def combined(values):
        parts = np.split(values, np.cumsum(COUNTS)[:-1])
        return np.concatenate([np.full(len(part), combine(part)) for part in parts])

    return combined


KNOWN = {
    "log": np.log, "exp": np.exp, "max": np.maximum, "min": np.minimum, "sort": np.sort, "clip": np.clip, "choose": np.where,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sg": lambda x: x, "mean_t": of_sequences(np.mean),
    "sum_t": of_sequences(np.sum), "prod_t": of_sequences(np.prod), "abs": np.abs, "sum_k": lambda x: x.sum(-1),
}  # fmt: skip


def computed(line: str, **names):
    """The value of a formula's text."""
    expression, _, parts = line.partition(" where ")
    known = KNOWN | names
    for part in filter(None, parts.split("; ")):
        name, _, value = part.partition(" = ")
        known[name] = eval(value, {}, known)
    return eval(expression, {}, known)


def test_every_loss_has_a_formula_and_no_other():
    assert formulas.SUPERVISED_FORMULAS.keys() == SUPERVISED_LOSSES.keys()
    assert formulas.PREFERENCE_FORMULAS.keys() == PREFERENCE_LOSSES.keys()
    assert formulas.SCORE_FORMULAS.keys() == F_DIVERGENCES.keys()
    assert formulas.REFERENCE_FREE_FORMULAS.keys() == REFERENCE_FREE_LOSSES.keys()
    assert formulas.UNPAIRED_FORMULAS.keys() == UNPAIRED_LOSSES.keys()
    assert {name.removesuffix(" with delta") for name in formulas.SURROGATE_FORMULAS} == {
        loss.surrogate.__name__ for loss in POLICY_LOSSES.values()
    }
    assert formulas.NORMALISERS.keys() == {loss.normaliser.__name__ for loss in POLICY_LOSSES.values()}
    assert formulas.RATIO_FORMULAS.keys() == RATIOS.keys()
    assert formulas.TRUST_FORMULAS.keys() == policy.TRUST_DIVERGENCES.keys()
    for method in METHODS.values():
        written = method.trainer_class.formula.__func__ is not BaseTrainer.formula.__func__
        assert written, f"{method.trainer} has no formula of its own"
    assert CORRECTION_MODES


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@pytest.mark.parametrize("divergence", F_DIVERGENCES)
def test_preference(name, divergence):
    if divergence != "reverse_kl" and not PREFERENCE_LOSSES[name].f_divergences:
        return
    draw = torch.Generator().manual_seed(3)
    logps = [torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(4)]
    lengths = torch.tensor([3, 4, 1, 7, 2]), torch.tensor([2, 2, 5, 1, 3])
    pair = Pair(
        *logps, *lengths, chosen_nll=-logps[0], f_divergence=divergence, f_alpha=OPTIONS["f_alpha_divergence_coef"]
    )
    expected = call(PREFERENCE_LOSSES[name].function, pair, options=OPTIONS).sum().item()
    chosen, rejected, ref_chosen, ref_rejected = (part.numpy() for part in logps)
    score = filled(formulas.SCORE_FORMULAS[divergence], OPTIONS)
    l_c, l_r = chosen - ref_chosen, rejected - ref_rejected
    s_c, s_r = computed(score, l=l_c), computed(score, l=l_r)
    names = {
        "l_c": l_c, "l_r": l_r, "s_c": s_c, "s_r": s_r, "d": s_c - s_r, "len_c": lengths[0].numpy(), "len_r": lengths[1].numpy(),
        "logp_c": chosen, "logp_r": rejected, "ref_c": ref_chosen, "ref_r": ref_rejected,
    }  # fmt: skip
    assert computed(filled(formulas.PREFERENCE_FORMULAS[name], OPTIONS), **names).sum() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("name", SUPERVISED_LOSSES)
def test_supervised(name):
    table = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    logps, options = table[:, 2], {"label_smoothing": OPTIONS["label_smoothing_factor"]}
    given = (logps, table.mean(-1)) if name == "label_smoothed_nll" else (logps,)
    expected = call(SUPERVISED_LOSSES[name], *given, options=options).sum().item()
    line = filled(formulas.SUPERVISED_FORMULAS[name], OPTIONS)
    found = computed(line, p=logps.exp().numpy(), p_v=table.exp().numpy(), mean_v=lambda x: x.mean(-1))
    assert found.sum() == pytest.approx(expected, rel=1e-9)


def test_reward():
    chosen, rejected, margin = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0]), torch.tensor([0.0, 0.7])
    names = {"r_c": chosen.numpy(), "r_r": rejected.numpy(), "margin": margin.numpy()}
    logits, labels = torch.tensor([[0.2, 1.4], [1.0, -1.0]]), torch.tensor([1, 0])
    names |= {"p": logits.softmax(-1)[:, 1].numpy(), "label": labels.numpy()}
    given = {
        "bradley_terry": (chosen, rejected, margin), "centring": (chosen, rejected), "step_cross_entropy": (logits, labels)
    }  # fmt: skip
    for name, line in formulas.REWARD_FORMULAS.items():
        assert computed(line, **names) == pytest.approx(getattr(reward, name)(*given[name]).numpy(), rel=1e-6)


def tokens_of() -> PolicyTokens:
    size = sum(COUNTS)
    draw = torch.Generator().manual_seed(1)
    logps, old = (-torch.rand(size, generator=draw, dtype=torch.float64) * 0.8 for _ in range(2))
    zeros, counts = torch.zeros(size, dtype=torch.long), torch.tensor(COUNTS)
    batch = TokenBatch(
        RAGGED, zeros[None], zeros[None], zeros, zeros, counts=counts, lengths=counts, ends=counts, num_units=len(COUNTS),
        roles=("completion",), rows=tuple(range(len(COUNTS))), num_tokens=size, num_trained=size,
    )  # fmt: skip
    advantages = torch.repeat_interleave(torch.tensor([0.7, -1.3, -0.2], dtype=torch.float64), counts)
    return PolicyTokens(batch, logps, old, advantages)


@pytest.mark.parametrize("delta", [None, 1.2])
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "rloo"])
def test_policy(name, delta, tmp_path):
    loss = POLICY_LOSSES[name]
    if delta and "delta" not in loss.options:
        return
    args = GRPOConfig(output_dir=str(tmp_path), loss_type=name, delta=delta, use_cpu=True)
    tokens = tokens_of()
    for level in loss.levels:
        ratios = RATIOS[level](tokens)
        expected, _ = call(loss.surrogate, tokens, ratios, options=args)
        p, p_old = tokens.logps.exp().numpy(), tokens.old_logps.exp().numpy()
        rho = computed(formulas.RATIO_FORMULAS[level], p=p, p_old=p_old)
        assert rho == pytest.approx(ratios.tokens.numpy(), rel=1e-9)
        found = computed(surrogate_line(name, args), rho=rho, A=tokens.advantages.numpy(), p=p, mu=p_old)
        assert found == pytest.approx(expected.numpy(), rel=1e-6)


@pytest.mark.parametrize("kind", policy.TRUST_DIVERGENCES)
def test_how_far_the_policy_is_from_the_sampler(kind, tmp_path):
    """The last of the k + 1 tokens stands for all others."""
    args = GRPOConfig(output_dir=str(tmp_path), loss_type="dppo", divergence_type=kind, use_cpu=True)
    draw = torch.Generator().manual_seed(2)
    sides = [torch.randn(sum(COUNTS), 4, generator=draw, dtype=torch.float64).log_softmax(-1) for _ in range(2)]
    tokens = replace(tokens_of(), likeliest=(sides[0][:, :3], sides[1][:, :3]))
    expected, _ = call(policy.dppo, tokens, RATIOS["token"](tokens), options=args)
    names = {"p_k": sides[1].exp().numpy(), "mu_k": sides[0].exp().numpy(), "mu": tokens.old_logps.exp().numpy()}
    found = computed(surrogate_line("dppo", args), p=tokens.logps.exp().numpy(), A=tokens.advantages.numpy(), **names)
    assert found == pytest.approx(expected.numpy(), rel=1e-6)
    assert (found == 0).any()


def test_the_ratio_of_rloo_is_that_of_a_whole_completion():
    tokens = tokens_of()
    found = computed(
        formulas.RATIO_FORMULAS["sequence_sum"], p=tokens.logps.exp().numpy(), p_old=tokens.old_logps.exp().numpy()
    )
    assert found == pytest.approx(policy.summed_ratios(tokens).tokens.numpy(), rel=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", REFERENCE_FREE_LOSSES)
def test_losses_without_a_reference(name, smoothing):
    sides = np.array([-1.0, -3.0, -0.5]), np.array([-2.0, -2.5, -4.0])
    options = {"beta": 0.3, "label_smoothing": smoothing, "simpo_gamma": 0.4, "tpo_l_gamma": 0.6}
    if name in ("hinge", "ipo") and smoothing:
        pytest.skip("its labels are not smoothed")
    found = reference_free_loss(Answers(*map(torch.from_numpy, sides)), name, options)
    line = formulas.reference_free_line(name, SimpleNamespace(**options))
    assert computed(line, D=sides[0] - sides[1]).tolist() == pytest.approx(found.tolist(), abs=1e-9)


def test_odds_ratio():
    m_c, m_r = np.array([-1.0, -3.0]), np.array([-2.0, -0.2])
    found = -0.3 * torch.nn.functional.logsigmoid(log_odds_ratio(torch.from_numpy(m_c), torch.from_numpy(m_r)))
    line = filled(formulas.ODDS_RATIO_FORMULA, OPTIONS)
    assert computed(line, m_c=m_c, m_r=m_r).tolist() == pytest.approx(found.tolist(), abs=1e-9)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_losses_of_labelled_rows(name):
    ratios, signs = np.array([1.0, -2.0, 0.5]), np.array([1.0, -1.0, -1.0])
    rows = Unpaired(torch.from_numpy(ratios), torch.zeros(3, dtype=torch.float64), torch.from_numpy(signs > 0))
    found = call(UNPAIRED_LOSSES[name], rows, options={"beta": 0.3, "divergence": 0.7, "delta": 0.2})
    line = filled(formulas.UNPAIRED_FORMULAS[name], OPTIONS)
    assert computed(line, s=signs, l=ratios, z=0.7, delta=0.2).tolist() == pytest.approx(found.tolist(), abs=1e-9)


def test_ppo(tmp_path):
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, cliprange=0.1, vf_coef=0.3, cliprange_value=0.25)
    lines = PPOTrainer.formula(args, dict.fromkeys(("tokens", "sequences", "units", "batches"), "N")).terms
    tokens = tokens_of()
    expected, _ = policy.clipped(tokens, RATIOS["token"](tokens), epsilon=0.1)
    rho = (tokens.logps - tokens.old_logps).exp().numpy()
    assert computed(lines[0], rho=rho, A=tokens.advantages.numpy()) == pytest.approx(expected.numpy(), rel=1e-9)
    v, V, R = (np.random.default_rng(place).normal(size=20) for place in range(3))
    values, clips = value_loss(*map(torch.from_numpy, (v, V, R)), 0.25)
    assert 0 < clips.sum() < 20
    assert computed(lines[1], v=v, V=V, R=R) == pytest.approx(0.3 * values.numpy(), rel=1e-9)


def test_perception():
    tokens = tokens_of()
    numbers = {"perception_loss_weight": 0.1, "der_loss_weight1": 0.03, "der_loss_weight2": 0.05}
    entropies = (torch.rand_like(tokens.logps), torch.rand_like(tokens.logps))
    given = (tokens.batch, (tokens.logps, tokens.old_logps), entropies, torch.ones_like(tokens.logps))
    expected = perception(*given, SimpleNamespace(loss_type="dapo", **numbers)).terms[0].values
    line = filled(formulas.PERCEPTION_FORMULA, numbers | {"largest": LARGEST_PERCEPTION})
    names = {"p": tokens.logps.exp(), "p_m": tokens.old_logps.exp(), "H": entropies[0], "H_m": entropies[1]}
    found = computed(line, **{name: value.numpy() for name, value in names.items()})
    assert found == pytest.approx(expected.numpy(), rel=1e-9)
