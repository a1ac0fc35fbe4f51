"""Cells of the gradient matrix: what they are, how a cell's gradient is computed, and the oracle it is held against."""

from __future__ import annotations

import itertools
import random
import tempfile
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from posttrain.core.batch import PADDED, RAGGED, SHARED, passes_of
from posttrain.core.sample import Sample
from posttrain.data.collate import Collator
from posttrain.losses.pair import Pair
from posttrain.losses.preference import PREFERENCE_LOSSES
from posttrain.methods.table import METHODS
from posttrain.models.load.reference import PRECOMPUTED
from posttrain.models.scoring.heads import CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS
from posttrain.rollout.rollout import ADVANTAGES
from posttrain.trainer.online_trainer import OnlineTrainer
from tests import tiny
from tests.losses.test_preference_oracle import naive_total
from tests.trainer import distilling_cells, offline_cells, policy_cells, ppo_cells

PACKED = "packed"
CHUNKS = (1, 7, None)
SPLITS = {"1x8": (8,), "2x4": (4, 4), "8x1": (1,) * 8, "partial": (3, 3, 2), "passes": (8,)}
TOKENS_PER_PASS = {"passes": 25}
DTYPES = (torch.float64, torch.float32)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
SMOOTHING = {"exo_pair": 0.1, "robust": 0.1, "aot": 0.1, "aot_unpaired": 0.1}
SFT_LOSSES = ("nll", "dft", "smoothed")
REWARD_LOSSES = ("plain", "margin", "centred")
POLICY_METHODS = ("grpo", "rloo", "nash_md", "async_grpo")
ONLINE_PAIRS = {"online_dpo": ("sigmoid", "ipo", "aot"), "xpo": ("sigmoid",)}
"""Method of pairs that the policy writes -> losses; the reference's log-probs travel with the samples."""
XPO_ALPHA = 0.03
A2PO_BETA2 = 0.2  # the default is so small that the log-ratio would hardly show
WHOLE_PRODUCT = (("sft", "nll"), ("dpo", "sigmoid"))
BETWEEN_PROCESSES = (
    ("sft", "nll"),  # divided by tokens
    ("dpo", "sigmoid"),  # by pairs
    ("dpo", "sft"),  # by the tokens of one side
    ("dpo", "aot"),  # coupled: the value of a pair depends on the pairs of all processes
    ("dpo", "aot_unpaired"),
    ("reward", "plain"),  # by pairs, with a head
    ("kto", "kto"),  # coupled: the reference point is that of all processes
    ("orpo", "prompt"),  # two denominators, and flags of tokens
    ("prm", "steps"),  # by judged tokens, with a head at them
    ("grpo", "bnpo"),  # by the tokens of each micro-batch of each process
    ("sdpo", "mixed"),  # by tokens, and by the samples that have a part in a term
    ("grpo", "top_entropy"),  # a threshold over the micro-batches of all processes
)
"""What a process has to know of the others is different for these, and for no other loss."""
OF_ANY_MODEL = (("dpo", "sft"), ("dpo", "aot_unpaired"), ("sdpo", "mixed"), ("grpo", "top_entropy"))
"""Of those, losses that a neighbour of the same coupling covers for every adapter and dtype: by day they take one of each."""
SHUFFLED_FOR_THE_FEWEST = (
    84  # 15 rows with every pair of the axes of two processes, the fewest there can be; unshuffled they are 18
)
OF_THE_FIRST = (("reward", "margin"), ("reward", "centred"), ("online_dpo", "ipo"), ("online_dpo", "aot"))
"""Losses that differ from the first one of their method by a formula of the same numbers about pairs; DPO has the last two too."""
DEFAULT = "default"
"""The loss of a method of which nothing is known here but its entry of METHODS: with its default options, held against itself."""
DPO_EXTRAS = ("ld", "wpo", "mpo", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True)
class Cell:
    method: str
    loss: str
    layout: str = RAGGED
    chunk: int | None = None
    split: str = "1x8"
    lora: bool = False
    dtype: torch.dtype = torch.float64
    shares: tuple[int, ...] = (1,)  # rows of each micro-batch's window that go to each process, relative; 0: none

    def __str__(self) -> str:
        parts = [self.method, self.loss, self.layout, f"chunk{self.chunk or 'all'}", self.split]
        parts += ["lora" if self.lora else "full", str(self.dtype).removeprefix("torch.")]
        return "-".join(parts) + ("" if self.shares == (1,) else f"-{'+'.join(map(str, self.shares))}")


# ---- which cells ---------------------------------------------------------------------------------------------------------


def variants() -> list[tuple[str, str]]:
    """(method, loss) of everything that has a gradient."""
    return [
        *(("sft", loss) for loss in SFT_LOSSES),
        *(("dpo", loss) for loss in (*PREFERENCE_LOSSES, *DPO_EXTRAS)),
        *(("reward", loss) for loss in REWARD_LOSSES),
        ("prm", "steps"),
        *(("grpo", loss) for loss in policy_cells.GRPO_VARIANTS),
        ("rloo", "rloo"),
        ("async_grpo", "sampler"),
        ("a2po", "regression"),
        *((method, loss) for method, losses in ONLINE_PAIRS.items() for loss in losses),
        *(("nash_md", level) for level in policy_cells.NASH_LEVELS),
        *(("ppo", loss) for loss in ppo_cells.OPTIONS),
        *((method, loss) for method, losses in offline_cells.OPTIONS.items() for loss in losses),
        *((method, loss) for method, losses in distilling_cells.OPTIONS.items() for loss in losses),
        *((method, DEFAULT) for method in METHODS if method not in ORACLES),
    ]


def layouts(method: str) -> tuple[str, ...]:
    return (RAGGED, PADDED, PACKED if method == "sft" else SHARED)


def is_online(method: str) -> bool:
    return issubclass(METHODS[method].trainer_class, OnlineTrainer)


@lru_cache
def single_process(nightly: bool = False) -> list[Cell]:
    """Every pair of values of two axes for each loss that no other resembles, a share of them for the others, and for the losses of
    WHOLE_PRODUCT all layouts, chunks and splits, each with an adapter and a dtype in turn. Nightly: the rest of both.
    """
    found = []
    for number, (method, loss) in enumerate(variants()):
        axes = [layouts(method), CHUNKS, tuple(SPLITS), (False, True), DTYPES]
        if (method, loss) in WHOLE_PRODUCT:
            rows = list(itertools.product(*axes))
            now = [row for row in rows if _in_turn(row, axes)]
        else:
            rows = pairwise(tuple(axes))
            now = _of_one_model(rows, number) if _resembles_others(method, loss) else rows
        found += [Cell(method, loss, *row) for row in rows if (row in now) != nightly]
    return found


def _of_one_model(rows: list[tuple[Any, ...]], number: int) -> list[tuple[Any, ...]]:
    """The rows with one adapter and one dtype, which need one trainer: the next loss takes the next, and four take all rows."""
    return [row for row in rows if 2 * row[3] + DTYPES.index(row[4]) == number % 4]


def _resembles_others(method: str, loss: str) -> bool:
    """Policy losses are presets of one objective, and most preference losses are formulas of the same margins."""
    if method in POLICY_METHODS or loss == "value_model" or (method, loss) in OF_THE_FIRST:
        return True
    if method in offline_cells.OPTIONS:  # the first loss of each method stands for the others
        return loss != next(iter(offline_cells.OPTIONS[method]))
    if method in distilling_cells.OPTIONS:
        return distilling_cells.resembles_others(method, loss)
    preference = PREFERENCE_LOSSES.get(loss)
    of_margins = preference is not None and not preference.coupled and preference.per == "unit"
    return method == "dpo" and (of_margins or loss.endswith(("_kl", "_divergence")))


def _in_turn(row: tuple[Any, ...], axes: list[tuple[Any, ...]]) -> bool:
    """Whether these are the adapter and the dtype for this layout, chunk and split."""
    layout, chunk, split, lora, dtype = (axis.index(value) for axis, value in zip(axes, row))
    return (layout + chunk + split) % 4 == 2 * lora + dtype


@lru_cache
def two_processes(nightly: bool = False) -> list[Cell]:
    """Every pair of values for each denominator and coupling, those of one model where another loss takes the other models, and one
    cell of each other loss. Nightly: the rest."""
    found = []
    for number, (method, loss) in enumerate(variants()):
        axes = [layouts(method), CHUNKS, tuple(SPLITS), (False, True), DTYPES, ((5, 3), (1, 0), (0, 1))]
        rows = pairwise(tuple(axes), SHUFFLED_FOR_THE_FEWEST)
        now = rows
        if (method, loss) in OF_ANY_MODEL or (method, loss) not in BETWEEN_PROCESSES:
            now = _of_one_model(rows, number)
        if (method, loss) not in BETWEEN_PROCESSES:
            now = now[number // 4 % 2 :][:1]
        found += [Cell(method, loss, *row) for row in rows if (row in now) != nightly]
    return found


@lru_cache
def pairwise(axes: tuple[tuple[Any, ...], ...], seed: int | None = None) -> list[tuple[Any, ...]]:
    """A small set of rows in which every pair of values of two axes occurs together (greedy cover, of rows shuffled by `seed`)."""
    todo = {(i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]}
    rows = []
    candidates = list(itertools.product(*axes))
    if seed is not None:
        random.Random(seed).shuffle(candidates)
    while todo:
        best = max(candidates, key=lambda row: len(_pairs_of(row) & todo))
        todo -= _pairs_of(best)
        rows.append(best)
    return rows


def _pairs_of(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


# ---- the rows ------------------------------------------------------------------------------------------------------------


@lru_cache
def units(method: str, lora: bool = False) -> list[tuple[Sample, ...]]:
    """Eight units of different lengths; some tokens of the texts are context, one text trains a single token.

    The two samples of a pair begin with the same prompt, but for those of row 5, which have nothing in common.
    """
    if method in ONLINE_PAIRS:
        return [tuple(_with_reference(s, place) for place, s in enumerate(pair)) for pair in units("dpo")]
    if method in distilling_cells.OPTIONS:
        return distilling_cells.units(method, units("sft"))
    if is_online(method):  # what a policy said before is near what it says now: this depends on its adapter
        policy, reference = oracle_models(method, lora)[0], oracle_models("dpo", False)[1]
        with torch.no_grad():
            groups = policy_cells.groups(partial(_log_probs, policy), partial(_log_probs, reference))
        if method == "a2po":
            return [tuple(_with_advantage(sample) for sample in group) for group in groups]
        return ppo_cells.with_values(groups) if method == "ppo" else groups
    if method in offline_cells.OPTIONS:
        return offline_cells.units(method)
    rng = np.random.default_rng(7)
    made = []
    for row in range(8):
        if len(METHODS[method].trainer_class.roles) == 1:
            length = int(rng.integers(2, 14))
            trained = rng.random(length) < 0.7
            trained[-1] = True
            labels = {"labels": rng.integers(0, 2, length).astype(np.float32)} if method == "prm" else {}
            made.append((Sample(rng.integers(0, 250, length), trained, labels, row=row),))
        else:
            prompt = rng.integers(0, 250, int(rng.integers(1, 6)))
            answers = [rng.integers(0, 250, int(rng.integers(1, 8))) for _ in METHODS[method].trainer_class.roles]
            margin = {"margin": float(np.float32(rng.normal()))}  # scalars travel in float32
            prompts = (prompt, *[prompt[::-1] + 1 if row == 5 else prompt] * (len(answers) - 1))
            made.append(tuple(Sample.of_text(*texts, row=row, **margin) for texts in zip(prompts, answers)))
    return made


@torch.no_grad()
def _with_reference(sample: Sample, place: int) -> Sample:
    """A copy with log-probs near those of DPO's reference, on a grid on which float32, in which they travel, adds without rounding.

    Of every other pair the reference wrote the second.
    """
    rows, targets = _log_probs(oracle_models("dpo", False)[1], sample)
    column = np.zeros(len(sample), dtype=np.float32)
    column[1:][sample.trained[1:]] = [round(row[target].item() * 1024) / 1024 for row, target in zip(rows, targets)]
    scalars = {"score": 0.0, "ended": 1.0, "by_reference": float((sample.row + place) % 2)}
    return replace(sample, per_token={PRECOMPUTED: column}, scalars=scalars)


def _with_advantage(sample: Sample) -> Sample:
    """A copy whose advantage is a number about the sample; such numbers travel in float32."""
    advantage = float(np.float32(sample.per_token[ADVANTAGES][-1]))
    kept = {PRECOMPUTED: sample.per_token[PRECOMPUTED]}
    return replace(sample, per_token=kept, scalars={"advantage": advantage, "v_star": 0.5})


def packed(samples: list[tuple[Sample, ...]]) -> list[tuple[Sample, ...]]:
    """Two neighbouring samples share a block; the rows of a micro-batch stay the same."""
    flat = [sample for unit in samples for sample in unit]
    return [tuple(flat[start : start + 2]) for start in range(0, len(flat), 2)]


# ---- the trainer's gradient ----------------------------------------------------------------------------------------------


def options(cell: Cell) -> dict[str, Any]:
    if cell.loss == DEFAULT or cell.method == "prm":
        return {}
    if cell.method == "sft":
        return {"nll": {}, "dft": {"loss_type": "dft"}, "smoothed": {"label_smoothing_factor": 0.2}}[cell.loss]
    if cell.method in POLICY_METHODS:
        return policy_cells.options(cell.method, cell.loss)
    if cell.method in distilling_cells.OPTIONS:
        return {**distilling_cells.SHARED, **distilling_cells.OPTIONS[cell.method][cell.loss]}
    if cell.method == "ppo":
        return {**policy_cells.SHARED_OPTIONS, **ppo_cells.OPTIONS[cell.loss]}
    if cell.method in offline_cells.OPTIONS:
        return offline_cells.OPTIONS[cell.method][cell.loss]
    if cell.method == "reward":
        return {"centred": {"center_rewards_coefficient": 0.3}}.get(cell.loss, {})
    if cell.method == "a2po":
        return {**policy_cells.SHARED_OPTIONS, "beta2": A2PO_BETA2}
    if cell.method == "xpo":
        return {"loss_type": [cell.loss], "alpha": XPO_ALPHA}
    special = {
        "ld": {"ld_alpha": 0.4},
        "wpo": {"use_weighting": True},
        "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        "forward_kl": {"f_divergence_type": "forward_kl"},
        "js_divergence": {"f_divergence_type": "js_divergence"},
        "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
    }
    if cell.loss in special:
        return special[cell.loss]
    smoothing = {"label_smoothing": SMOOTHING[cell.loss]} if cell.loss in SMOOTHING else {}
    return {"loss_type": [cell.loss], **smoothing}


def models(method: str, dtype: torch.dtype, lora: bool) -> tuple[Any, Any]:
    """(policy, reference): different weights, so that log-ratios are not 0; equal in every process."""
    make = MODELS[_task(method)]
    policy = make(0, dtype)
    reference = make(1, dtype) if method in ("dpo", *offline_cells.WITH_REFERENCE) else None
    if dtype == torch.float64:
        policy = tiny.with_exact_norms(policy)
        reference = tiny.with_exact_norms(reference) if reference else None
    return (with_adapter(policy, method) if lora else policy), reference


MODELS = {
    CAUSAL_LM: tiny.causal_lm,
    SEQUENCE_REWARD: tiny.reward_model,
    TOKEN_LABELS: tiny.process_reward_model,
}
PEFT_TASKS = {CAUSAL_LM: "CAUSAL_LM", SEQUENCE_REWARD: "SEQ_CLS", TOKEN_LABELS: "TOKEN_CLS"}


def _task(method: str) -> str:
    return METHODS[method].trainer_class.task


def with_adapter(model: Any, method: str) -> Any:
    """A LoRA whose B is not 0: at its initialisation half of the gradients would be."""
    torch.manual_seed(2)
    task = PEFT_TASKS[_task(method)]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type=task))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # drawn in float64 whatever the dtype, so that float32 cells have the oracle's adapter
            parameter.data = (0.3 * torch.randn(parameter.shape, dtype=torch.float64)).to(parameter.dtype)
    return adapted.to(next(model.parameters()).dtype)


@lru_cache(maxsize=12)
def trainer(method: str, loss: str, lora: bool, dtype: torch.dtype) -> Any:
    policy, reference = models(method, dtype, lora)
    if loss == "clamped":  # the policy is below its reference on mismatched rows
        reference = (
            tiny.with_exact_norms(tiny.causal_lm(3, dtype)) if dtype == torch.float64 else tiny.causal_lm(3, dtype)
        )
    cell = Cell(method, loss)
    args = METHODS[method].config_class(
        output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, gradient_checkpointing=False, **options(cell)
    )
    extra = {"ref_model": reference} if reference is not None else {}
    if method in distilling_cells.OPTIONS:
        extra |= distilling_cells.arguments(method, loss, dtype)
    else:
        extra |= policy_cells.arguments() if is_online(method) else {}
    extra |= {"value_model": ppo_cells.critic(loss, dtype)} if loss == "value_model" else {}
    made = METHODS[method].trainer_class(model=policy, args=args, processing_class=tiny.tokenizer(), **extra)
    if loss == "value_head":  # at its initialisation the body would have no gradient of the values
        made.critic.load_state_dict(ppo_cells.critic(loss, dtype).state_dict())
    return made


def gradient(cell: Cell, rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
    """One optimizer step's gradient, as the trainer accumulates it."""
    made = trainer(cell.method, cell.loss, cell.lora, cell.dtype)
    made.args.chunk_tokens = cell.chunk
    made.args.max_tokens_per_pass = TOKENS_PER_PASS.get(cell.split)
    made.args.gradient_accumulation_steps = len(SPLITS[cell.split])
    batches = micro_batches(cell, made, rank)
    if cell.method in offline_cells.STATES:
        made.load_method_state(offline_cells.STATES[cell.method])
    totals = made._get_num_items_in_batch(batches, made.args.device)
    made.model.zero_grad()
    made.is_in_train = True
    model = made.model_wrapped
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        made.accelerator.gradient_state._set_sync_gradients(last)
        with made.accelerator.no_sync(model) if not last and world_size > 1 else _nothing():
            made.training_step(model, batch, totals)
    return {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def micro_batches(cell: Cell, made: Any, rank: int) -> list[Any]:
    return [_collated(cell, made, window[rank]) for window in windows(cell)]


def windows(cell: Cell) -> list[list[list[tuple[Sample, ...]]]]:
    """The units of each micro-batch, for each process."""
    rows, place, found = units(cell.method, cell.lora and is_online(cell.method)), 0, []
    rows = offline_cells.rows_of(cell.method, cell.loss) if cell.method in offline_cells.OPTIONS else rows
    rows = policy_cells.rows_of(cell.loss, rows) if cell.method in POLICY_METHODS else rows
    bounds = np.concatenate([[0], np.cumsum(cell.shares)]) / sum(cell.shares)
    for size in SPLITS[cell.split]:
        window = rows[place : place + size]
        place += size
        edges = [round(bound * size) for bound in bounds]
        found.append([window[start:stop] for start, stop in itertools.pairwise(edges)])
    return found


def _collated(cell: Cell, made: Any, mine: list[tuple[Sample, ...]]) -> Any:
    layout = RAGGED if cell.layout == PACKED else cell.layout
    chosen = packed(mine) if cell.layout == PACKED else mine
    collator = Collator(made.roles, made.processing_class.pad_token_id, layout, None, TOKENS_PER_PASS.get(cell.split))
    batch = collator(chosen)
    for part in passes_of(batch):
        if cell.method == "reward" and cell.loss != "margin":
            part.scalars.pop("margin", None)
        if cell.method == "bco" and cell.loss != "weighted":
            part.scalars.pop("density_ratio", None)
        # Numbers about samples arrive in float32; in a float64 cell they must not be what limits the comparison.
        part.scalars = {name: value.to(cell.dtype) for name, value in part.scalars.items()}
        part.per_token = {name: value.to(cell.dtype) for name, value in part.per_token.items()}
    return batch


# ---- the oracle ----------------------------------------------------------------------------------------------------------


def expected_gradient(cell: Cell) -> dict[str, torch.Tensor]:
    """The oracle's, or, of a method without one, that of all rows in one padded batch of one process. It does not depend on how a
    step is cut up, but for two policy losses that do by their definition."""
    if cell.method not in ORACLES:
        return own(cell.method, cell.loss, cell.lora)
    if cell.loss not in policy_cells.DEPEND_ON_THE_CUT:
        return oracle(Cell(cell.method, cell.loss, lora=cell.lora))
    return oracle(Cell(cell.method, cell.loss, cell.layout, None, cell.split, cell.lora, shares=cell.shares))


@lru_cache
def own(method: str, loss: str, lora: bool) -> dict[str, torch.Tensor]:
    return gradient(Cell(method, loss, PADDED, lora=lora))


@lru_cache
def oracle(cell: Cell) -> dict[str, torch.Tensor]:
    policy, reference = oracle_models(cell.method, cell.lora)
    if cell.method == "ppo":
        ppo_cells.attach(policy, cell.loss)
    named = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    # The graph stays: what the policy says of the rows is computed once for all losses.
    found = torch.autograd.grad(
        ORACLES[cell.method](cell, policy, reference), list(named.values()), retain_graph=True, allow_unused=True
    )
    return {name: gradient for name, gradient in zip(named, found) if gradient is not None}


@lru_cache
def oracle_models(method: str, lora: bool) -> tuple[Any, Any]:
    return models(method, torch.float64, lora)


def _log_probs(model: Any, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    return _scored(model, tuple(sample.input_ids.tolist()), tuple(sample.trained.tolist()), torch.is_grad_enabled())


@cache
def _scored(
    model: Any, tokens: tuple[int, ...], trained: tuple[bool, ...], with_graph: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """((n, V) log-probs at the positions of the trained tokens, the tokens), one sequence, full logits, no padding."""
    ids = torch.tensor(tokens)
    logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    at = torch.tensor(trained[1:]).nonzero()[:, 0]
    return logps[at], ids[at + 1]


def _sft_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    total, tokens = 0, 0
    for (sample,) in units("sft"):
        logps, targets = _log_probs(policy, sample)
        for row, target in zip(logps, targets):
            tokens += 1
            if cell.loss == "nll":
                total = total - row[target]
            elif cell.loss == "dft":
                total = total - row[target].detach().exp() * row[target]
            else:
                total = total - 0.8 * row[target] - 0.2 * row.mean()
    return total / tokens


def _dpo_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    fields: dict[str, list[Any]] = {
        name: [] for name in ("c", "r", "ref_c", "ref_r", "len_c", "len_r", "nll", "weight")
    }
    chosen_tokens = 0
    bonus = 0.0
    for pair in units(cell.method):
        own = [_log_probs(policy, sample) for sample in pair]
        shorter = min(len(targets) for _, targets in own)
        picked = [[row[t] for row, t in zip(*side)] for side in own]
        ref_picked = [_reference_logps(reference, sample) for sample in pair]
        bonus = bonus + sum(s.scalars.get("by_reference", 0.0) * sum(side) for s, side in zip(pair, picked))
        weigh = [1.0 if cell.loss != "ld" or i < shorter else 0.4 for i in range(20)]
        fields["c"].append(sum(w * x for w, x in zip(weigh, picked[0])))
        fields["r"].append(sum(w * x for w, x in zip(weigh, picked[1])))
        fields["ref_c"].append(sum(w * x for w, x in zip(weigh, ref_picked[0])))
        fields["ref_r"].append(sum(w * x for w, x in zip(weigh, ref_picked[1])))
        fields["len_c"].append(len(picked[0]))
        fields["len_r"].append(len(picked[1]))
        fields["nll"].append(-sum(picked[0]))
        chosen_tokens += len(picked[0])
        means = [
            sum((x - (row.exp() ** 2).sum().log()).detach() for x, row in zip(side, rows)) / len(side)
            for side, (rows, _) in zip(picked, own)
        ]
        fields["weight"].append((means[0] + means[1]).exp())
    divergence = cell.loss if cell.loss in ("forward_kl", "js_divergence", "alpha_divergence") else "reverse_kl"
    stacked = {name: torch.stack(fields[name]) for name in ("c", "r", "ref_c", "ref_r", "nll")}
    made = Pair(
        stacked["c"], stacked["r"], stacked["ref_c"], stacked["ref_r"], torch.tensor(fields["len_c"]),
        torch.tensor(fields["len_r"]), stacked["nll"], f_divergence=divergence, f_alpha=0.7,
    )  # fmt: skip

    def one(name: str) -> torch.Tensor:
        summed = naive_total(made, name, 0.1, SMOOTHING.get(name, 0.0), 0.05)
        return summed / (chosen_tokens if name == "sft" else len(made))

    if cell.loss == "mpo":
        return 0.8 * one("sigmoid") + 0.2 * one("bco_pair") + one("sft")
    if cell.loss == "wpo":
        single = [naive_total(made.units(i, i + 1), "sigmoid", 0.1, 0.0, 0.05) for i in range(len(made))]
        return sum(weight * value for weight, value in zip(fields["weight"], single)) / len(made)
    explored = XPO_ALPHA * bonus / len(made) if cell.method == "xpo" else 0.0
    return one(cell.loss if cell.loss in PREFERENCE_LOSSES else "sigmoid") + explored


@torch.no_grad()
def _reference_logps(reference: Any, sample: Sample) -> list[torch.Tensor]:
    """Of the trained tokens: those that the sample carries, or of the model."""
    if PRECOMPUTED in sample.per_token:
        return list(torch.from_numpy(sample.per_token[PRECOMPUTED].astype(np.float64))[1:][sample.trained[1:]])
    return [row[target] for row, target in zip(*_log_probs(reference, sample))]


def _reward_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    total = 0
    for pair in units("reward"):
        scores = []
        for sample in pair:
            ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
            classifier = policy.base_model.model if hasattr(policy, "peft_config") else policy
            hidden = classifier.model(input_ids=ids).last_hidden_state
            scores.append(classifier.score(hidden[0, -1]).squeeze())
        margin = pair[0].scalars["margin"] if cell.loss == "margin" else 0.0
        total = total - torch.log(1 / (1 + torch.exp(-(scores[0] - scores[1] - margin))))
        if cell.loss == "centred":
            total = total + 0.3 * (scores[0] + scores[1]) ** 2
    return total / len(units("reward"))


def _prm_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    """The hidden state of the judged token itself: no shift."""
    total, judged = 0, 0
    for (sample,) in units("prm"):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        classifier = policy.base_model.model if hasattr(policy, "peft_config") else policy
        hidden = classifier.model(input_ids=ids).last_hidden_state[0]
        for place in range(1, len(sample)):
            if sample.trained[place]:
                z = classifier.score(hidden[place])
                total = total - torch.log(torch.exp(z) / torch.exp(z).sum())[int(sample.per_token["labels"][place])]
                judged += 1
    return total / judged


def _policy_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    return policy_cells.step_loss(cell.method, cell.loss, windows(cell), partial(_log_probs, policy))


def _ppo_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    return ppo_cells.step_loss(cell.loss, units("ppo", cell.lora), partial(_log_probs, policy), policy)


def _a2po_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    """sum over completions of (beta2 l - A)^2 / completions."""
    samples = [sample for unit in units("a2po", cell.lora) for sample in unit]
    total = 0
    for sample in samples:
        picked = [row[target] for row, target in zip(*_log_probs(policy, sample))]
        ratio = sum(own - ref for own, ref in zip(picked, _reference_logps(None, sample)))
        total = total + (A2PO_BETA2 * ratio - sample.scalars["advantage"]) ** 2
    return total / len(samples)


def _offline_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    if cell.loss == "clamped":
        reference = tiny.with_exact_norms(tiny.causal_lm(3, torch.float64))

    def picked(model: Any, sample: Sample) -> list[torch.Tensor]:
        return [row[target] for row, target in zip(*_log_probs(model, sample))]

    return offline_cells.step_loss(cell.method, cell.loss, partial(picked, policy), partial(picked, reference))


def _nash_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    samples = [sample for unit in units("nash_md", cell.lora) for sample in unit]
    return policy_cells.nash_step_loss(cell.loss, samples, partial(_log_probs, policy))


def _distilling_oracle(cell: Cell, policy: Any, reference: Any) -> torch.Tensor:
    own = partial(_log_probs, policy)
    theirs = partial(_log_probs, _taught_by(cell.loss))
    return distilling_cells.step_loss(cell.method, cell.loss, units(cell.method), own, theirs)


@cache
def _taught_by(loss: str) -> Any:
    return distilling_cells.teacher(loss, torch.float64)


ORACLES = {
    "sft": _sft_oracle,
    "dpo": _dpo_oracle,
    "reward": _reward_oracle,
    "prm": _prm_oracle,
    "grpo": _policy_oracle,
    "rloo": _policy_oracle,
    "async_grpo": _policy_oracle,
    "a2po": _a2po_oracle,
    **dict.fromkeys(ONLINE_PAIRS, _dpo_oracle),
    "nash_md": _nash_oracle,
    "ppo": _ppo_oracle,
    **dict.fromkeys(offline_cells.OPTIONS, _offline_oracle),
    **dict.fromkeys(distilling_cells.OPTIONS, _distilling_oracle),
}


def check(cell: Cell, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor] | None = None) -> None:
    """Relative to the norm of the whole gradient, and of each tensor that matters in it."""
    expected = expected or expected_gradient(cell)
    assert found.keys() == expected.keys(), f"tensors with a gradient differ: {found.keys() ^ expected.keys()}"
    whole = torch.sqrt(sum((g.double() ** 2).sum() for g in expected.values()))
    assert whole > 0
    for name, gradient in expected.items():
        error = (found[name].double() - gradient).norm() / whole
        assert error <= TOLERANCE[cell.dtype], f"{name} is off by {error:.2e} of the gradient's norm"
