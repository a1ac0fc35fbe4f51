"""Distillation in the gradient matrix: the options of each variant, its teacher, and the naive loss of a whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import ACTIVE
from posttrain.core.sample import Sample, Unit
from posttrain.methods.gold import BOUNDARY
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, TEACHER_LOGPS
from posttrain.trainer.distilling_trainer import ON_POLICY
from posttrain.trainer.online.served_teacher import TEACHER_TOP_IDS, TEACHER_TOP_LOGPS
from tests import tiny

SHARED = {"max_completion_length": 9, "rollout_engine": "transformers"}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "gkd": {
        "jsd": {"beta": 0.3},
        "forward": {"beta": 0.0},
        "reverse": {"beta": 1.0},
        "tempered": {"beta": 0.3, "loss_temperature": 0.7},
        "more_words": {"beta": 0.3},
    },
    "distillation": {"tempered": {"beta": 1.0, "temperature": 0.7}},
    "iw_opd": {
        "iw_opd": {"temperature": 0.7, "lmbda": 0.5, "iw_opd_gamma": 0.8},
        "top_2": {"distillation_objective": "jsd", "beta": 0.3, "loss_top_k": 2},
        "realised": {"distillation_objective": "jsd", "beta": 0.3},
    },
    "minillm": {"one_temperature": {}, "two_temperatures": {"temperature": 1.3, "kd_temperature": 0.7}},
    "gold": {
        "uld": {"use_uld_loss": True, "uld_crossentropy_weight": 0.3, "uld_distillation_weight": 2.0},
        "hybrid": {"use_uld_loss": True, "uld_use_hybrid_loss": True, "beta": 0.3},
    },
    "sdft": {
        "topk": {"distillation_alpha": 0.0, "distillation_topk": 5},
        "tail": {"distillation_topk": 5, "distillation_add_tail": True, "teacher_model_kind": "live"},
        "full": {"distillation_mode": "full_logits", "teacher_model_kind": "ema"},
        "sampled": {"distillation_mode": "sampled_token", "distillation_alpha": 1.0},
        "clipped": {"distillation_alpha": 1.0, "distillation_topk": 5, "distillation_is_clip": 1.05},
    },
    "sdpo": {
        "mixed": {
            "distillation_weight": 0.6,
            "distillation_mode": "topk_logits",
            "distillation_topk": 5,
            "distillation_add_tail": True,
            "distillation_alpha": 0.5,
        },
        "only": {"distillation_is_clip": 1.05, "teacher_model_kind": "live"},
    },
    "ssd": {"nll": {"temperature": 0.7}},
    "server_distillation": {
        "top_3": {"beta": 0.0, "loss_top_k": 3},
        "top_1": {"beta": 0.0},
        "renormalised": {"beta": 0.0, "loss_top_k": 3, "loss_add_tail": False},
        "between": {"beta": 0.3},
        "between_renormalised": {"beta": 0.3, "loss_add_tail": False},
        "written": {"beta": 1.0},
    },
    "async_distillation": {"top_2_and_written": {"beta": 0.0, "teacher_top_k": 2}},
}
for _variant in (*OPTIONS["sdft"].values(), *OPTIONS["sdpo"].values()):
    _variant.setdefault("distillation_is_clip", None)
for _variant in OPTIONS["sdpo"].values():
    _variant.setdefault("distillation_mode", "sampled_token")
    _variant.setdefault("distillation_alpha", 1.0)
"""Method -> variant -> its options."""
SELF_TAUGHT = ("sdft", "sdpo")
SERVED = ("server_distillation", "async_distillation")
TEMPERATURE = {"tempered": 0.7, "iw_opd": 0.7}
MORE_WORDS = 3


def resembles_others(method: str, loss: str) -> bool:
    """Distillation is GKD on other completions, and SSD's loss is SFT's."""
    return (method, loss) not in (
        ("gkd", "jsd"),
        ("gold", "hybrid"),
        ("iw_opd", "iw_opd"),
        ("minillm", "two_temperatures"),
        ("sdft", "clipped"),
        ("sdpo", "mixed"),
        ("server_distillation", "top_3"),
    )


def arguments(method: str, loss: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the constructor of the trainer wants besides."""
    if method in SERVED:
        return {"teacher": NotAsked()}
    if method == "sdpo":
        return {"reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
    if method in ("ssd", "sdft"):
        return {}
    return {"teacher_model": teacher(loss, dtype), "teacher_processing_class": tiny.tokenizer()}


class NotAsked:
    """Where samples bring what a server has said."""

    name, words = "none", None

    def check(self, tokenizer: Any) -> None:
        pass


def teacher(loss: str, dtype: torch.dtype) -> Any:
    """Other weights than the student's; of one variant, with words that the student has not."""
    model = tiny.causal_lm(1)
    if loss in ("more_words", *OPTIONS["gold"]):
        torch.manual_seed(5)
        model.resize_token_embeddings(model.config.vocab_size + MORE_WORDS, mean_resizing=False)
    model = model.to(dtype)  # afterwards: of another dtype the new words would be others
    return tiny.with_exact_norms(model) if dtype == torch.float64 else model


def units(method: str, texts: list[Unit]) -> list[Unit]:
    """Every other completion is the student's own. GOLD: with the teacher's tokens, of which as many begin a group."""
    if method in SELF_TAUGHT:
        return [(with_teachers_prompt(sample, method == "sdpo"),) for (sample,) in texts]
    made = [replace(sample, scalars={ON_POLICY: float(sample.row % 2)}) for (sample,) in texts]
    more = {"gold": with_teachers_tokens, "iw_opd": with_logps, "minillm": with_logps}
    more |= dict.fromkeys(SERVED, with_likeliest_tokens)
    return [(more.get(method, lambda sample: sample)(sample),) for sample in made]


def with_logps(sample: Sample) -> Sample:
    """Numbers as the teacher and the student that wrote might have said them, and advantages of tokens."""
    rng = np.random.default_rng(sample.row)
    columns = {name: -5 + rng.normal(size=len(sample)) for name in (TEACHER_LOGPS, OLD_LOGPS)}
    columns[ADVANTAGES] = rng.normal(size=len(sample))
    return replace(sample, per_token={**sample.per_token, **columns})


def with_teachers_prompt(sample: Sample, is_rewarded: bool) -> Sample:
    """The same tokens behind some more, and log-probs of before the step near those of now; with rewards, of some samples only."""
    rng = np.random.default_rng(sample.row)
    more, first = 2 + sample.row % 3, np.arange(len(sample)) > 0
    twin = Sample(
        np.concatenate([rng.integers(0, 256, more), sample.input_ids]),
        np.concatenate([np.zeros(more, dtype=bool), sample.trained & first]),
        row=sample.row,
    )
    old = -5.5 + rng.integers(-4, 5, len(sample)).astype(np.float32) / 16
    if not is_rewarded:
        return replace(sample, per_token={OLD_LOGPS: old}, twin=twin)
    advantages = np.full(len(sample), (sample.row - 3.5) / 4, np.float32)
    scalars = {ACTIVE: float(sample.row % 3 != 1)}
    return replace(sample, per_token={OLD_LOGPS: old, ADVANTAGES: advantages}, scalars=scalars, twin=twin)


@torch.no_grad()
def with_likeliest_tokens(sample: Sample) -> Sample:
    """What a server would say of it; at every third place the teacher's first choice is the token that stands there."""
    model = tiny.with_exact_norms(tiny.causal_lm(1, torch.float64))
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0]
    logits[::3][torch.arange(len(logits[::3])), ids.roll(-1)[::3]] += 9.0
    logps = logits.log_softmax(-1)[:-1]
    own, top = logps.gather(1, ids[1:, None])[:, 0], logps.topk(3, -1)
    columns = {TEACHER_LOGPS: own, TEACHER_TOP_IDS: top.indices, TEACHER_TOP_LOGPS: top.values}
    at = sample.trained[1:]
    sample = replace(sample, per_token=dict(sample.per_token))
    for name, values in columns.items():
        sample.write_trained(name, values.numpy()[at])
    return sample


def with_teachers_tokens(sample: Sample) -> Sample:
    rng = np.random.default_rng(sample.row)
    twin = Sample.of_text(
        rng.integers(0, 256, 3), rng.integers(0, 256, sample.num_trained + sample.row), row=sample.row
    )
    groups = max(sample.num_trained // 2, 1)
    for one in (sample, twin):
        chosen = rng.permutation(np.arange(1, len(one))[one.trained[1:]])[:groups]
        one.per_token = {**one.per_token, BOUNDARY: np.isin(np.arange(len(one)), chosen).astype(np.float32)}
    return replace(sample, twin=twin)


def step_loss(
    method: str, loss: str, rows: list[Unit], own: Callable[..., Any], theirs: Callable[..., Any]
) -> torch.Tensor:
    """Sum over tokens of the divergence / tokens; `own` and `theirs` map a sample to ((n, V) log-probs, tokens)."""
    if method == "gold":
        return gold_loss(loss, rows, own, theirs)
    if method in SELF_TAUGHT:
        options = OPTIONS[method][loss]
        values = [mean_of_completion(options, one, own) for (one,) in rows if one.scalars.get(ACTIVE, 1)]
        weight = options.get("distillation_weight", 1.0)
        taught = weight * sum(values) / len(values)
        return taught + (1 - weight) * clipped_policy(rows, own) if weight < 1 else taught
    if method == "minillm":
        return minillm_loss(OPTIONS[method][loss], rows, own, theirs)
    if method in SERVED:
        return served_loss(OPTIONS[method][loss], rows, own)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    heat, options = TEMPERATURE.get(loss, 1.0), OPTIONS[method][loss]
    for (sample,) in rows:
        logps, targets = own(sample)
        tokens += len(targets)
        if method == "ssd":
            total = total - sum(row[target] for row, target in zip(logps, targets))
            continue
        if loss == "iw_opd":
            total = total + iw_opd_loss(sample, (logps / heat).log_softmax(-1), targets, options["iw_opd_gamma"])
            continue
        with torch.no_grad():
            wanted = theirs(sample)[0][:, : logps.shape[-1]]
        for p_row, q_row, target in zip(logps / heat, wanted / heat, targets):
            p, q = p_row.exp() / p_row.exp().sum(), q_row.exp() / q_row.exp().sum()
            if method == "iw_opd":
                p, q = with_tail(p, q, target, options.get("loss_top_k"))
            total = total + divergence(p, q, options["beta"])
    return total / tokens


def clipped_policy(rows: list[Unit], own: Callable[..., Any]) -> torch.Tensor:
    """Sum over tokens of -min(rho A, clip(rho) A) / tokens."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for (sample,) in rows:
        known = sample.read_trained(OLD_LOGPS), sample.read_trained(ADVANTAGES)
        for row, target, old, advantage in zip(*own(sample), *known, strict=True):
            rho = (row[target] - float(old)).exp()
            total = total - torch.minimum(rho * float(advantage), rho.clamp(0.8, 1.2) * float(advantage))
            tokens += 1
    return total / tokens


def mean_of_completion(options: dict[str, Any], sample: Sample, own: Callable[..., Any]) -> torch.Tensor:
    """The policy is its own teacher, behind another prompt."""
    logps, targets = own(sample)
    with torch.no_grad():
        wanted = own(sample.twin)[0]
    total = torch.zeros((), dtype=torch.float64)
    for p, q, target, old in zip(logps, wanted, targets, sample.read_trained(OLD_LOGPS), strict=True):
        value = own_divergence(options, p, q, target)
        cap = options["distillation_is_clip"]
        total = total + value * (1 if cap is None else min(float((p[target].detach() - float(old)).exp()), cap))
    return total / len(targets)


def own_divergence(options: dict[str, Any], p: torch.Tensor, q: torch.Tensor, target: int) -> torch.Tensor:
    """From log-probs of a row."""
    if options.get("distillation_mode") == "sampled_token":
        return (p[target] - q[target]).detach() * p[target]
    p, q = p.exp(), q.exp()
    if options.get("distillation_mode") != "full_logits":
        chosen = p.topk(options["distillation_topk"]).indices
        p, q = p[chosen], q[chosen]
        if options.get("distillation_add_tail"):
            p, q = (torch.cat([one, 1 - one.sum(0, keepdim=True)]) for one in (p, q))
        p, q = p / p.sum(), q / q.sum()
    return divergence(p, q, options.get("distillation_alpha", 0.5))


def minillm_loss(
    options: dict[str, float], rows: list[Unit], own: Callable[..., Any], theirs: Callable[..., Any]
) -> torch.Tensor:
    """Sum over tokens of the clipped surrogate, with an advantage of each, and of KL(p, q) / tokens."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for (sample,) in rows:
        logps, targets = own(sample)
        tokens += len(targets)
        with torch.no_grad():
            wanted = (theirs(sample)[0] / options.get("kd_temperature", 1.0)).log_softmax(-1)
        written = (logps / options.get("temperature", 1.0)).log_softmax(-1)
        compared = (logps / options.get("kd_temperature", 1.0)).log_softmax(-1)
        columns = zip(sample.read_trained(OLD_LOGPS).tolist(), sample.read_trained(ADVANTAGES).tolist())
        for place, (old, advantage) in enumerate(columns):
            ratio = (written[place][targets[place]] - old).exp()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total + divergence(compared[place].exp(), wanted[place].exp(), 1.0)
    return total / tokens


def iw_opd_loss(sample: Sample, logps: torch.Tensor, targets: torch.Tensor, gamma: float) -> torch.Tensor:
    """-sum_t w_t a_t log p(y_t) of one completion."""
    own = [row[target] for row, target in zip(logps, targets)]
    then = sample.read_trained(OLD_LOGPS).tolist() if sample.scalars[ON_POLICY] else [one.item() for one in own]
    gaps = [q - mu for q, mu in zip(sample.read_trained(TEACHER_LOGPS).tolist(), then)]
    whole = sum(abs(a) for a in gaps)
    weights = [1 + gamma * (1 - sum(abs(a) for a in gaps[:t]) / whole) for t in range(len(gaps))]
    return -sum(w * a * lp for w, a, lp in zip(weights, gaps, own))


def with_tail(
    p: torch.Tensor, q: torch.Tensor, target: torch.Tensor, top_k: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of both, of the student the one that follows where no number is given, and the rest."""
    ours = [target.item()] if top_k is None else p.topk(top_k).indices.tolist()
    chosen = sorted({*ours, *q.topk(top_k or 1).indices.tolist()})
    return tuple(torch.cat([one[chosen], 1 - one[chosen].sum()[None]]) for one in (p, q))


def served_loss(options: dict[str, Any], rows: list[Unit], own: Callable[..., Any]) -> torch.Tensor:
    """Sum over tokens of the divergence on a few of them, by names of tokens / tokens."""
    total, tokens, beta = torch.zeros((), dtype=torch.float64), 0, options["beta"]
    for (sample,) in rows:
        columns = [sample.read_trained(name) for name in (TEACHER_LOGPS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPS)]
        for row, target, written, ids, top in zip(*own(sample), *columns, strict=True):
            named = dict(zip(ids.tolist(), top.tolist()))
            k = options.get("teacher_top_k", options.get("loss_top_k", 1))
            likeliest = dict(list(named.items())[:k]) if beta < 1 else {}
            compared = likeliest | ({int(target): float(written)} if beta > 0 or "teacher_top_k" in options else {})
            p = torch.stack([row[token].exp() for token in compared])
            q = torch.tensor(list(compared.values()), dtype=torch.float64).exp()
            if options.get("loss_add_tail", True):
                p, q = (torch.cat([one, 1 - one.sum()[None]]) for one in (p, q))
            total, tokens = total + divergence(p / p.sum(), q / q.sum(), beta), tokens + 1
    return total / tokens


def divergence(p: torch.Tensor, q: torch.Tensor, beta: float) -> torch.Tensor:
    if beta in (0, 1):
        first, second = (q, p) if beta == 0 else (p, q)
        return (first * torch.log(first / second)).sum()
    m = (1 - beta) * p + beta * q
    return beta * (q * torch.log(q / m)).sum() + (1 - beta) * (p * torch.log(p / m)).sum()


def gold_loss(loss: str, rows: list[Unit], own: Callable[..., Any], theirs: Callable[..., Any]) -> torch.Tensor:
    """Mean over completions of the mean over places; the likelihood of all tokens besides."""
    options, total, nll, tokens = OPTIONS["gold"][loss], torch.zeros((), dtype=torch.float64), 0.0, 0
    for (sample,) in rows:
        logps, targets = own(sample)
        nll, tokens = nll - sum(row[target] for row, target in zip(logps, targets)), tokens + len(targets)
        with torch.no_grad():
            wanted = theirs(sample.twin)[0]
        places = [np.flatnonzero(one.read_trained(BOUNDARY)) for one in (sample, sample.twin)]
        values = [gold_value(loss, logps[a].exp(), wanted[b].exp()) for a, b in zip(*places, strict=True)]
        total = total + sum(values) / len(values) / len(rows)
    weights = options.get("uld_distillation_weight", 1.0), options.get("uld_crossentropy_weight", 0.0)
    return weights[0] * total + weights[1] * nll / tokens


def gold_value(loss: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if loss == "uld":
        return sorted_distance(p, q)
    shared = 257  # bytes and the end of text; control tokens have none, and the teacher has further words
    rest = [one[shared:] for one in (p, q)]
    matched = divergence(*(torch.cat([one[:shared], more.sum()[None]]) for one, more in zip((p, q), rest)), 0.3)
    share = shared / len(tiny.tokenizer())
    return share * matched + (1 - share) * sorted_distance(*rest)


def sorted_distance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    p, q = (torch.cat([one, one.new_zeros(max(len(p), len(q)) - len(one))]).sort().values for one in (p, q))
    return (p - q).abs().sum()
