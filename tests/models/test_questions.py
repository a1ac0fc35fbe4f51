"""One forward pass answers every kind of question: equal to full logits and hidden states, in value and in gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.heads import HeadQuestion
from posttrain.models.scoring.token_scores import LanguageHead, Measure, RowsQuestion, ask, score_tokens
from tests import tiny

K = 3


def units() -> list[tuple[Sample, ...]]:
    """Two pairs that begin alike, so that the layout with shared beginnings differs from the ragged one."""
    rng = np.random.default_rng(5)
    made = []
    for prompt, *lengths in ((4, 5, 7), (3, 2, 6)):
        ids = rng.integers(3, 250, prompt)
        answers = [rng.integers(3, 250, length) for length in lengths]
        made.append(tuple(Sample([*ids, *a], [False] * prompt + [True] * len(a)) for a in answers))
    return made


def model_with_heads() -> nn.Module:
    torch.manual_seed(1)
    model = tiny.with_exact_norms(tiny.causal_lm(dtype=torch.float64)).eval()
    model.v_head = nn.Linear(model.config.hidden_size, 1).double()
    model.label_head = nn.Linear(model.config.hidden_size, 2).double()
    return model


def candidates_of(batch) -> torch.Tensor:
    """(N, K) ids, the realised token first."""
    others = torch.arange(1, K) * 7
    return torch.cat([batch.targets[:, None], (batch.targets[:, None] + others) % 250], dim=1)


def log_probs_of_candidates(logits, log_z, targets, candidates):
    return logits.gather(-1, candidates) - log_z[:, None]


def forward_kl_from(head):
    def forward_kl(logits, log_z, targets, taught):
        wanted = head(taught).log_softmax(-1)
        return (wanted.exp() * (wanted - (logits - log_z[:, None]))).sum(-1)

    return forward_kl


def expected(model, teacher) -> dict[str, torch.Tensor]:
    """The same numbers, one sequence at a time, from whole logits and hidden states."""
    found: dict[str, list[torch.Tensor]] = {}
    for sample in [sample for unit in units() for sample in unit]:
        ids = torch.from_numpy(np.asarray(sample.input_ids, dtype=np.int64))
        hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
        logps = model.lm_head(hidden).log_softmax(-1)
        wanted = teacher(input_ids=ids[None]).logits[0].detach().log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(sample.trained))
        others = (ids[at][:, None] + torch.arange(1, K) * 7) % 250
        one = {
            "logps": logps[at - 1, ids[at]],
            "candidates": logps[at - 1].gather(-1, torch.cat([ids[at][:, None], others], dim=1)),
            "divergence": (wanted.exp() * (wanted - logps))[at - 1].sum(-1),
            "values": model.v_head(hidden[at - 1]).squeeze(-1),
            "labels": model.label_head(hidden[at]),
            "score": model.v_head(hidden[-1:]).squeeze(-1),
        }
        for name, tensor in one.items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("layout", [RAGGED, PADDED, SHARED])
def test_one_forward_answers_all_and_has_the_gradient_of_full_logits(layout, chunk):
    model, teacher = model_with_heads(), tiny.with_exact_norms(tiny.causal_lm(9, torch.float64)).eval()
    right = expected(model, teacher)
    weights = {name: torch.randn_like(value) for name, value in right.items()}
    sum((right[name] * weight).sum() for name, weight in weights.items()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    load_model(model, LoadOptions(share_prefixes=True))
    load_model(teacher, LoadOptions(share_prefixes=True))
    calls = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    batch = collate(units(), ("chosen", "rejected"), layout)
    with torch.no_grad():
        rows = ask(teacher, batch, RowsQuestion(batch.positions)).rows
    measures = {
        "candidates": Measure(log_probs_of_candidates, (candidates_of(batch),), differentiable=True),
        "divergence": Measure(forward_kl_from(LanguageHead.of(teacher)), (rows,), differentiable=True),
    }
    heads = (
        HeadQuestion("values", batch.positions, "v_head"),
        HeadQuestion("labels", batch.places, "label_head"),
        HeadQuestion("score", batch.ends, "v_head"),
    )
    found = score_tokens(model, batch, ("entropy",), measures=measures, also=heads, chunk_tokens=chunk)
    answers = {"logps": found.logps, "values": found.values, "labels": found.labels, **found.stats}
    assert len(calls) == 1
    assert answers.pop("entropy").shape == found.logps.shape
    assert answers.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(
            answers[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
    sum((answers[name] * weight).sum() for name, weight in weights.items()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
