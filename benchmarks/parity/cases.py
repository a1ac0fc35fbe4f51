"""The table of cases: what is trained, on which rows, with which options, and which numbers may differ and why.

Every entry of TABLE becomes two cases: `NAME@1x4` (four rows in one micro-batch) and `NAME@2x2` (two micro-batches of two rows,
accumulated). A difference of the kind "TRL averages over micro-batches, we over the step" must vanish when TRL gets the step as one
micro-batch: the numbers of our 2x2 run are then compared with those of TRL's 1x4 run, the case's witness.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.differences import DIFFERENCES
from benchmarks.parity.policy_cases import POLICY_CASES
from benchmarks.parity.teacher_cases import TEACHER_CASES
from benchmarks.parity.vision_cases import TOKEN_NUMBERS, VISION_CASES

SHARED_OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 5,
    "logging_steps": 1,
    "seed": 3,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
}
SPLITS = {
    "1x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "2x2": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "1x8": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "2x4": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
ONE_MICRO_BATCH = {"2x2": "1x4", "2x4": "1x8"}
"""A step in two micro-batches -> the same step in one."""
STEP_MEANS = dict.fromkeys(("entropy", "mean_token_accuracy", "logits/*"), "step-means")
"""Means over tokens: they depend on the split in TRL, never here."""
EVERYTHING = ("loss", "grad_norm", "rewards/*", "logps/*", "*reward", "accuracy", "margin", "weights:*")
EVALUATION = {"eval_num_tokens": "eval-num-tokens"}
UNEVEN_EVALUATION = {**EVALUATION, "eval_*": "evaluation-whole"}


def question_and_answer(row: dict[str, Any]) -> str:
    return f"Q: {row.get('question', row.get('prompt'))}\nA:{row.get('answer', row.get('completion'))}"


def dpo(name: str, rows: str = "pair", **options: Any) -> Case:
    return Case(f"dpo-{name}", "dpo", rows, options)


def sft(name: str, rows: str = "text", **options: Any) -> Case:
    return Case(f"sft-{name}", "sft", rows, options)


def reward(name: str, rows: str = "implicit_chat_pair", **options: Any) -> Case:
    return Case(f"reward-{name}", "reward", rows, options, model="reward")


def from_flat(case: Case) -> Case:
    """Start from a model that finds all tokens about as likely: losses that saturate, and WPO's weights, stay away from 0."""
    return replace(case, model="flat")


def over_the_step(case: Case, key: str) -> Case:
    """A loss that TRL normalises within each micro-batch."""
    return replace(case, differs_when_split=dict.fromkeys(EVERYTHING, key))


def one_sided(case: Case, key: str) -> Case:
    """One of the libraries refuses, or fails."""
    return replace(case, differs={"error": key}, splits=("2x2",))


SFT_CASES = [
    sft("text"),
    sft("even-text", "even_text"),
    sft("messages", "messages"),
    sft("system-and-turns", "long_chat"),
    sft("sharegpt", "share_gpt"),
    sft("tools", "with_tools"),
    sft("json-tools", "with_json_tools"),
    replace(sft("assistant-only", "messages", assistant_only_loss=True), tokenizer="marked_tokenizer"),
    replace(sft("assistant-only-turns", "long_chat", assistant_only_loss=True), tokenizer="marked_tokenizer"),
    replace(
        sft("control-text", "messages_with_control_text"),
        differs=dict.fromkeys(("num_tokens", *TOKEN_NUMBERS), "control-tokens"),
        splits=("1x4",),
    ),
    replace(sft("template-arguments", "messages_with_arguments"), tokenizer="marked_tokenizer"),
    sft("prompt-completion", "prompt_completion"),
    sft("prompt-completion-whole", "prompt_completion", completion_only_loss=False),
    sft("prompt-completion-chat", "prompt_completion_chat"),
    sft("prompt-completion-chat-whole", "prompt_completion_chat", completion_only_loss=False),
    sft("input-ids", "input_ids"),
    sft("labelled-ids", "labelled_ids"),
    replace(sft("masked-ids", "masked_ids"), trl={"completion_only_loss": True}),
    sft("masked-ids-whole", "masked_ids", completion_only_loss=False),
    replace(
        sft("masked-ids-default", "masked_ids"),
        differs=dict.fromkeys(TOKEN_NUMBERS, "mask-columns"),
        witness="sft-masked-ids",
        splits=("1x4",),
    ),
    replace(sft("formatting-func", "question_answer"), formatting_func=question_and_answer),
    one_sided(
        replace(sft("formatting-func-refused", "prompt_completion"), formatting_func=question_and_answer),
        "formatting-func-columns",
    ),
    replace(
        sft("formatting-func-ignored", "prompt_completion", completion_only_loss=False),
        formatting_func=question_and_answer,
        differs=dict.fromkeys(("num_tokens", *TOKEN_NUMBERS), "formatting-func-columns"),
        witness="sft-formatting-func",
        splits=("1x4",),
    ),
    sft("eos-token", eos_token="<|im_start|>"),
    sft("dft", "prompt_completion", loss_type="dft"),
    sft("label-smoothing", label_smoothing_factor=0.1),
    sft("truncated", max_length=24),
    sft("truncated-end", max_length=24, truncation_mode="keep_end"),
    sft("truncated-completions", "prompt_completion", max_length=24),
    sft("pad-multiple", pad_to_multiple_of=16),
    sft("packed", packing=True, max_length=64),
    sft("packed-split", packing=True, packing_strategy="bfd_split", max_length=32),
    sft("packed-wrapped", packing=True, packing_strategy="wrapped", max_length=32),
    sft("packed-completions", "prompt_completion", packing=True, max_length=64),
    sft("shuffled", shuffle_dataset=True),
    replace(sft("streamed", max_steps=4), streamed=True),
    replace(
        sft("grouped-by-length", train_sampling_strategy="group_by_length"),
        differs=dict.fromkeys(("num_tokens", *TOKEN_NUMBERS), "grouped-order"),
        splits=("1x4",),
    ),
    sft("three-epochs", max_steps=13),
    replace(sft("lone-last-batch", max_steps=8), first_rows=17),
    replace(sft("short-last-batch", max_steps=8), first_rows=19),
    replace(sft("evaluation"), evaluation=True, differs=EVALUATION),
    replace(
        sft("evaluation-uneven", per_device_eval_batch_size=4),
        evaluation=True,
        differs=UNEVEN_EVALUATION,
        witness="sft-evaluation",
        splits=("1x4",),
    ),
    replace(sft("lora", "messages"), adapter="new"),
    replace(sft("lora-loaded", "messages"), adapter="loaded"),
    replace(sft("llama"), model="llama"),
    replace(sft("mixture-of-experts", "even_text"), model="moe"),
    replace(sft("mixture-of-experts-weight", "even_text", router_aux_loss_coef=0.5), model="moe"),
    sft("sgd-momentum", optim="sgd", optim_args="momentum=0.9", learning_rate=0.05),
    sft("schedule-and-decay", lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1, max_grad_norm=0.3),
]

PLAIN_LOSSES = ("sigmoid", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
PLAIN_LOSSES += ("sigmoid_norm", "robust", "aot")
DIVERGENT_LOSSES = ("hinge", "ipo", "robust", "exo_pair", "discopop", "sigmoid_norm")
SMOOTHED = {"robust": {"label_smoothing": 0.1}, "exo_pair": {"label_smoothing": 0.1}}
SGD = {"optim": "sgd", "learning_rate": 0.02}
MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}

DPO_LOSS_CASES = [
    *(dpo(f"loss-{name}", loss_type=[name]) for name in PLAIN_LOSSES),
    # d = log-ratio difference of sums of about 150, which float32 rounds by 3e-5; with beta / tau = 2 the gradient changes by
    # about twice that, relatively. What is left of 1e-4 is rounding: either side lands above it with another summation order.
    replace(dpo("loss-discopop", loss_type=["discopop"]), rounding=3.0),
    from_flat(dpo("loss-hinge", loss_type=["hinge"])),
    dpo("loss-exo_pair", loss_type=["exo_pair"], label_smoothing=0.1),
    over_the_step(dpo("loss-aot_unpaired", loss_type=["aot_unpaired"]), "sorted-step"),
    over_the_step(replace(dpo("loss-aot-reference", "even_pair", loss_type=["aot"]), reference="other"), "sorted-step"),
    over_the_step(dpo("loss-sft", loss_type=["sft"]), "sft-term"),
    dpo("loss-sft-even", "even_pair", loss_type=["sft"]),
    *(dpo(f"smoothed-{name}", loss_type=[name], label_smoothing=0.2) for name in ("robust", "aot")),
    over_the_step(dpo("smoothed-aot_unpaired", loss_type=["aot_unpaired"], label_smoothing=0.2), "sorted-step"),
    dpo("divergence-js_divergence", f_divergence_type="js_divergence"),
    from_flat(dpo("divergence-forward_kl", f_divergence_type="forward_kl")),
    from_flat(dpo("divergence-alpha_divergence", f_divergence_type="alpha_divergence")),
    from_flat(dpo("divergence-alpha-0.3", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3)),
    *(
        from_flat(dpo(f"js-{name}", loss_type=[name], f_divergence_type="js_divergence", **SMOOTHED.get(name, {})))
        for name in DIVERGENT_LOSSES
    ),
    dpo("ld-alpha", ld_alpha=0.5),
    from_flat(dpo("weighting", use_weighting=True)),
    over_the_step(dpo("mpo", **MPO), "sft-term"),
    dpo("mpo-even", "even_pair", **MPO),
    from_flat(dpo("weighted-mix", loss_type=["sigmoid", "apo_zero"], use_weighting=True)),
    one_sided(dpo("weighted-hinge", loss_type=["hinge"], use_weighting=True), "weighted-hinge"),
    from_flat(dpo("beta", beta=0.5)),
]

DPO_CASES = [
    dpo("even-pairs", "even_pair"),
    dpo("implicit-prompt", "implicit_pair"),
    dpo("explicit-shared-letters", "pair_with_shared_letters", **SGD),  # the shared letters' gradient cancels
    replace(
        dpo("shared-letters", "implicit_pair_with_shared_letters", **SGD),
        differs=dict.fromkeys((*EVERYTHING, *STEP_MEANS), "shared-letters"),
        witness="dpo-explicit-shared-letters",
        splits=("1x4",),
    ),
    dpo("chat", "chat_pair"),
    dpo("chat-implicit", "implicit_chat_pair"),
    dpo("tools", "tool_pair"),
    one_sided(dpo("tokenised", "tokenised_pair"), "tokenised-pairs"),
    dpo("truncated", max_length=32),
    dpo("truncated-end", max_length=32, truncation_mode="keep_end"),
    dpo("pad-multiple", pad_to_multiple_of=16),
    replace(dpo("precomputed", precompute_ref_log_probs=True), reference="other"),
    dpo("tr-dpo", sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6),
    replace(dpo("reference"), reference="other"),
    replace(dpo("lora"), adapter="new"),
    replace(dpo("lora-loaded"), adapter="loaded"),
    replace(dpo("streamed", max_steps=4), streamed=True),
    replace(dpo("evaluation"), evaluation=True, differs=EVALUATION),
    replace(
        dpo("evaluation-uneven", per_device_eval_batch_size=4),
        evaluation=True,
        differs=UNEVEN_EVALUATION,
        witness="dpo-evaluation",
        splits=("1x4",),
    ),
    replace(dpo("lone-last-batch", max_steps=8), first_rows=17),
    over_the_step(replace(dpo("short-last-batch", max_steps=8), first_rows=19), "pairs-of-the-step"),
    replace(dpo("mixture-of-experts", "even_pair"), model="moe"),
]

REWARD_CASES = [
    reward("implicit-chat"),
    reward("explicit-chat", "chat_pair"),
    reward("implicit", "implicit_pair"),
    reward("explicit", "pair"),
    reward("tokenised", "tokenised_reward_pair"),
    reward("tools", "tool_pair"),
    reward("margin", "margin_pair"),
    reward("centred", center_rewards_coefficient=0.1),
    reward("margin-centred", "margin_pair", center_rewards_coefficient=0.1),
    reward("over-long", "pair", max_length=56),
    replace(reward("streamed", max_steps=4), streamed=True),
    replace(reward("lone-last-batch", max_steps=8), first_rows=17),
    over_the_step(replace(reward("short-last-batch", max_steps=5), first_rows=19), "pairs-of-the-step"),
    replace(reward("evaluation"), evaluation=True, differs=EVALUATION),
    replace(
        reward("evaluation-uneven", per_device_eval_batch_size=4),
        evaluation=True,
        differs=UNEVEN_EVALUATION,
        witness="reward-evaluation",
        splits=("1x4",),
    ),
    replace(reward("lora"), adapter="new"),
    replace(reward("lora-loaded"), adapter="loaded"),
]

LOGITS = {"logits/*": "answer-logits"}
WITH_NLL = dict.fromkeys((*EVERYTHING, "nll_loss", "log_odds_*"), "nll-of-the-step")
ALL_OF_A_CHAT = dict.fromkeys((*EVERYTHING, "nll_loss", "log_odds_*", *STEP_MEANS), "one-end-token")


def unreferenced(method: str, name: str, rows: str = "pair", **options: Any) -> Case:
    """CPO and ORPO, whose nll TRL divides by the tokens of a micro-batch."""
    return Case(f"{method}-{name}", method, rows, options, differs=LOGITS, differs_when_split=WITH_NLL)


def triple(name: str, **options: Any) -> Case:
    return Case(f"tpo-{name}", "tpo", "triple", options, differs_when_split=WITH_NLL)


def kto(name: str, **options: Any) -> Case:
    """TRL reads rows in their order, and cannot do otherwise."""
    ours = {"train_sampling_strategy": "sequential"}
    split = dict.fromkeys((*EVERYTHING, "kl"), "kto-kl-of-the-step")
    return Case(f"kto-{name}", "kto", "rated", options, ours, differs_when_split=split)


def bco(name: str, **options: Any) -> Case:
    """TRL reads rows in their order here, too. 1.10 is the last version that has BCO and PRM."""
    ours = {"train_sampling_strategy": "sequential"}
    return Case(f"bco-{name}", "bco", "rated", options, ours, trl_version="1.10.0", reference="other")


def prm(name: str, **options: Any) -> Case:
    split = dict.fromkeys(("loss", "grad_norm", "eval_loss", "weights:*"), "prm-mean-of-the-step")
    return Case(
        f"prm-{name}", "prm", "stepwise", options, model="steps", trl_version="1.10.0", differs_when_split=split
    )


DELTA = dict.fromkeys((*EVERYTHING, "delta"), "bco-delta-before-the-step")
OFFLINE_CASES = [
    *(unreferenced("cpo", f"loss-{name}", loss_type=name) for name in ("sigmoid", "hinge", "ipo", "simpo")),
    unreferenced("cpo", "smoothed", label_smoothing=0.2),
    replace(
        from_flat(unreferenced("cpo", "alphapo", loss_type="alphapo", alpha=0.25, beta=2.0)),
        differs={**LOGITS, "nll_loss": "nll-shown"},
        differs_when_split={},
    ),
    replace(unreferenced("cpo", "chat", "chat_pair"), differs=ALL_OF_A_CHAT, splits=("1x4",)),
    unreferenced("orpo", "plain"),
    unreferenced("orpo", "beta", beta=1.0),
    replace(unreferenced("orpo", "chat", "chat_pair"), differs=ALL_OF_A_CHAT, splits=("1x4",)),
    *(triple(f"loss-{name}", loss_type=name) for name in ("sigmoid", "hinge", "ipo", "tpo-l")),
    one_sided(Case("tpo-without-gold", "tpo", "pair", {"tpo_alpha": 0.0}), "gold-unneeded"),
    replace(bco("plain"), differs={**LOGITS, **DELTA}, witness="bco-delta-first", splits=("1x4",)),
    replace(bco("delta-first"), corrected="delta_first", differs=LOGITS, differs_when_split=DELTA),
    replace(bco("delta-first-beta", beta=0.5), corrected="delta_first", differs=LOGITS, differs_when_split=DELTA),
    prm("plain"),
    prm("last-step", train_on_last_step_only=True),
    prm("separator", step_separator=" ;\n"),
    prm("truncated", max_length=48),
    prm("completion-length", max_completion_length=24),
    replace(prm("evaluation"), evaluation=True),
    kto("plain"),
    kto("weighted", desirable_weight=0.7, undesirable_weight=1.4),
    replace(
        kto("apo", loss_type="apo_zero_unpaired"),
        differs={"kl": "apo-kl"},
        differs_when_split=dict.fromkeys(("rewards/*", "logps/*", "logits/*"), "kto-rows-of-the-step"),
    ),
]

REFUSED_CASES = [
    one_sided(dpo("refused-unread-smoothing", label_smoothing=0.1), "unread-options"),
    one_sided(dpo("refused-unread-tau", discopop_tau=0.1), "unread-options"),
    one_sided(dpo("refused-robust", loss_type=["robust"], label_smoothing=0.7), "option-ranges"),
    one_sided(dpo("refused-aot", loss_type=["aot"], label_smoothing=0.7), "option-ranges"),
    one_sided(dpo("refused-exo", loss_type=["exo_pair"], label_smoothing=1.5), "option-ranges"),
    one_sided(dpo("refused-tau", loss_type=["discopop"], discopop_tau=2.0), "option-ranges"),
    one_sided(dpo("refused-beta", beta=-0.1), "option-ranges"),
    one_sided(sft("refused-empty-row", "text_with_empty"), "bad-rows"),
    one_sided(dpo("refused-equal-pair", "pair_with_equal_answers"), "bad-rows"),
]

TABLE = [*SFT_CASES, *DPO_LOSS_CASES, *DPO_CASES, *REWARD_CASES, *REFUSED_CASES, *OFFLINE_CASES]
TABLE += [*POLICY_CASES, *TEACHER_CASES, *VISION_CASES]


def expanded(table: Iterable[Case]) -> list[Case]:
    return [_split(case, split) for case in table for split in case.splits]


def _split(case: Case, split: str) -> Case:
    """One of the two cases of an entry. A 2x2 case is witnessed by TRL's 1x4 run unless the entry names a case."""
    accumulated = split in ONE_MICRO_BATCH
    witness = f"{case.name}@{ONE_MICRO_BATCH[split]}" if accumulated else None
    if case.witness:
        witness = f"{case.witness}@{split}"
    return replace(
        case,
        name=f"{case.name}@{split}",
        options={**SPLITS[split], **case.options},
        differs={**case.differs, **(case.differs_when_split if accumulated else {})},
        witness=witness,
    )


CASES = expanded(TABLE)
UNKNOWN = {key for case in CASES for key in case.differs.values()} - set(DIFFERENCES)
if UNKNOWN:
    raise KeyError(f"Differences that differences.py does not describe: {', '.join(sorted(UNKNOWN))}.")


def chosen(cases: Iterable[Case], patterns: list[str]) -> list[Case]:
    """Cases whose name matches one of the patterns, all of them without a pattern."""
    return [case for case in cases if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)]
