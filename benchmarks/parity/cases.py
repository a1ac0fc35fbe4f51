"""The table of cases: what is trained, on which rows, with which options, and which numbers may differ and why.

Every entry of TABLE becomes two cases: `NAME@1x4` (four rows in one micro-batch) and `NAME@2x2` (two micro-batches of two rows,
accumulated). Where the two libraries differ only in how they average over micro-batches, the first is equal and the second is not.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

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
}


@dataclass(frozen=True)
class Case:
    """One run of both libraries."""

    name: str
    method: str  # sft, dpo, reward
    rows: str  # a kind of row in rows.py
    options: dict[str, Any] = field(default_factory=dict)  # of the config, for both libraries
    ours: dict[str, Any] = field(default_factory=dict)  # on our side only, to restore TRL's behaviour
    trl: dict[str, Any] = field(default_factory=dict)  # on TRL's side only
    model: str = "causal"
    tokenizer: str = "tokenizer"
    adapter: str | None = None  # "loaded": a PeftModel is given; "new": a peft_config, then the saved initialisation
    reference: str | None = None  # explicit `ref_model`
    evaluation: bool = False
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    differs: dict[str, str] = field(default_factory=dict)  # pattern of numbers that may differ -> key of DIFFERENCES
    splits: tuple[str, ...] = ("1x4", "2x2")


DIFFERENCES: dict[str, str] = {}


def question_and_answer(row: dict[str, Any]) -> str:
    return f"Q: {row['prompt']}\nA:{row['completion']}"


def dpo(name: str, rows: str = "pair", **options: Any) -> Case:
    return Case(f"dpo-{name}", "dpo", rows, options)


def sft(name: str, rows: str, **options: Any) -> Case:
    return Case(f"sft-{name}", "sft", rows, options)


def reward(name: str, rows: str = "implicit_chat_pair", **options: Any) -> Case:
    return Case(f"reward-{name}", "reward", rows, options, model="reward")


SFT_CASES = [
    sft("text", "text"),
    sft("even-text", "even_text"),
    sft("messages", "messages"),
    sft("system-and-turns", "long_chat"),
    sft("sharegpt", "share_gpt"),
    sft("tools", "with_tools"),
    replace(
        sft("assistant-only", "messages", assistant_only_loss=True), tokenizer="marked_tokenizer"
    ),
    replace(
        sft("assistant-only-turns", "long_chat", assistant_only_loss=True), tokenizer="marked_tokenizer"
    ),
    sft("prompt-completion", "prompt_completion"),
    sft("prompt-completion-whole", "prompt_completion", completion_only_loss=False),
    sft("prompt-completion-chat", "prompt_completion_chat"),
    sft("prompt-completion-chat-whole", "prompt_completion_chat", completion_only_loss=False),
    sft("input-ids", "input_ids"),
    sft("labelled-ids", "labelled_ids"),
    sft("masked-ids", "masked_ids"),
    replace(sft("formatting-func", "prompt_completion"), formatting_func=question_and_answer),
    sft("eos-token", "text", eos_token="<|im_start|>"),
    sft("dft", "prompt_completion", loss_type="dft"),
    sft("label-smoothing", "text", label_smoothing_factor=0.1),
    sft("truncated", "text", max_length=24),
    sft("truncated-end", "text", max_length=24, truncation_mode="keep_end"),
    sft("truncated-completions", "prompt_completion", max_length=24),
    sft("pad-multiple", "text", pad_to_multiple_of=16),
    sft("packed", "text", packing=True, max_length=64),
    sft("packed-split", "text", packing=True, packing_strategy="bfd_split", max_length=32),
    sft("packed-wrapped", "text", packing=True, packing_strategy="wrapped", max_length=32),
    sft("shuffled", "text", shuffle_dataset=True),
    replace(sft("evaluation", "text"), evaluation=True),
    replace(sft("evaluation-one-batch", "text", per_device_eval_batch_size=6), evaluation=True),
    replace(sft("lora", "messages"), adapter="new"),
    replace(sft("lora-loaded", "messages"), adapter="loaded"),
    replace(sft("llama", "text"), model="llama"),
    replace(sft("mixture-of-experts", "text"), model="moe"),
    replace(sft("mixture-of-experts-weight", "even_text", router_aux_loss_coef=0.5), model="moe"),
    sft("sgd-momentum", "text", optim="sgd", optim_args="momentum=0.9", learning_rate=0.05),
]

PLAIN_LOSSES = ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero")
PLAIN_LOSSES += ("apo_down", "discopop", "sft", "sigmoid_norm", "robust")
DIVERGENT_LOSSES = ("hinge", "ipo", "robust", "exo_pair", "discopop", "sigmoid_norm")

DPO_CASES = [
    *(dpo(f"loss-{name}", loss_type=[name]) for name in PLAIN_LOSSES),
    dpo("loss-exo_pair", loss_type=["exo_pair"], label_smoothing=0.1),
    *(dpo(f"smoothed-{n}", loss_type=[n], label_smoothing=0.2) for n in ("robust", "aot", "aot_unpaired")),
    *(dpo(f"divergence-{n}", f_divergence_type=n) for n in ("forward_kl", "js_divergence", "alpha_divergence")),
    dpo("divergence-alpha-0.3", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3),
    *(
        dpo(
            f"js-{n}",
            loss_type=[n],
            f_divergence_type="js_divergence",
            **({"label_smoothing": 0.1} if n in ("robust", "exo_pair") else {}),
        )
        for n in DIVERGENT_LOSSES
    ),
    dpo("ld-alpha", ld_alpha=0.5),
    dpo("weighting", use_weighting=True),
    dpo("mpo", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    dpo("mpo-even", "even_pair", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    dpo("weighted-mix", loss_type=["sigmoid", "hinge"], use_weighting=True),
    dpo("beta", beta=0.5),
    dpo("even-pairs", "even_pair"),
    dpo("implicit-prompt", "implicit_pair"),
    dpo("chat", "chat_pair"),
    dpo("chat-implicit", "implicit_chat_pair"),
    dpo("tools", "tool_pair"),
    dpo("tokenised", "tokenised_pair"),
    dpo("truncated", max_length=32),
    dpo("truncated-end", max_length=32, truncation_mode="keep_end"),
    dpo("pad-multiple", pad_to_multiple_of=16),
    dpo("precomputed", precompute_ref_log_probs=True),
    dpo("tr-dpo", sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.6),
    replace(dpo("reference"), reference="other"),
    replace(dpo("lora"), adapter="new"),
    replace(dpo("lora-loaded"), adapter="loaded"),
    replace(dpo("evaluation"), evaluation=True),
    replace(dpo("mixture-of-experts"), model="moe"),
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
    replace(reward("evaluation"), evaluation=True),
    replace(reward("lora"), adapter="new"),
    replace(reward("lora-loaded"), adapter="loaded"),
]

TABLE = [*SFT_CASES, *DPO_CASES, *REWARD_CASES]


def expanded(table: Iterable[Case]) -> list[Case]:
    return [
        replace(case, name=f"{case.name}@{split}", options={**SPLITS[split], **case.options})
        for case in table
        for split in case.splits
    ]


CASES = expanded(TABLE)


def chosen(cases: Iterable[Case], patterns: list[str]) -> list[Case]:
    """Cases whose name matches one of the patterns, all of them without a pattern."""
    return [case for case in cases if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)]
