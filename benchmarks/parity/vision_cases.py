"""Cases of models that read images: tiny ones of several families, on rows with one image, two images and none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.parity import policy_cases
from benchmarks.parity.case import Case

TOKEN_NUMBERS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "weights:*")
PAIR_NUMBERS = (*TOKEN_NUMBERS, "rewards/*", "logps/*", "logits/*")
FAMILIES = ("llava", "llava_next", "qwen2_5_vl", "gemma3", "internvl")
ADAPTED = ("llava", "qwen2_5_vl", "gemma3")
"""Those that LoRA is compared for: the tower's modules have names of the language model's, too."""
AS_TRL = {"loss_on_image_tokens": True}
EVALUATION = {"eval_num_tokens": "eval-num-tokens"}
OF_TOKENS = (*TOKEN_NUMBERS, "num_tokens")


def seeing(method: str, name: str, family: str, rows: str, **options: Any) -> Case:
    """The gradient of a tower's key biases is 0 but for rounding, of which Adam would make steps of full size: hence SGD."""
    options = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.02, **options}
    return Case(f"{method}-images-{family}-{name}", method, rows, options, model=family, sees=True)


def sft(name: str, family: str, rows: str, **options: Any) -> Case:
    """transformers gives some classes, Qwen2.5-VL's among them, no count of the step's tokens."""
    split = dict.fromkeys(TOKEN_NUMBERS, "image-tokens-of-the-step") if family == "qwen2_5_vl" else {}
    return replace(seeing("sft", name, family, rows, **options), differs_when_split=split)


def chats(family: str, name: str = "chats", rows: str = "shown_messages", **options: Any) -> Case:
    """TRL trains everything of a conversation, placeholders too."""
    return replace(sft(name, family, rows, **options), ours=AS_TRL)


def one_split(case: Case, **changes: Any) -> Case:
    return replace(case, splits=("1x4",), **changes)


def adapted(case: Case, **changes: Any) -> Case:
    """LoRA on the language model: no bias of a tower is trained, so that it can be Adam."""
    options = case.options | {"optim": "adamw_torch", "learning_rate": 1e-3}
    return replace(case, options=options, **{"adapter": "new", **changes})


def on_tower(case: Case) -> Case:
    """With SGD again: of an adapter's weights, too, some have hardly a gradient here."""
    return replace(case, adapter="new", saved_adapter="wide_adapter", ours={"lora_vision": True})


def by_names(case: Case, numbers: tuple[str, ...]) -> Case:
    """`target_modules` that the tower has, too. TRL's run with a pattern of the language model's is the witness."""
    differs, witness = dict.fromkeys(numbers, "image-lora-targets"), case.name.removesuffix("-names")
    return one_split(adapted(case, saved_adapter="wide_adapter"), differs=differs, witness=witness)


def written(method: str, name: str, family: str, **options: Any) -> Case:
    """Completions are scripted, as in `policy_cases.py`; a group shows one image."""
    options = {**policy_cases.SHARED, **options}
    made = seeing(method, name, family, "shown_prompt", **options)
    splits = (policy_cases.WHOLE, policy_cases.HALVES)
    return replace(
        made,
        ours=policy_cases.OURS,
        rewards=("brevity",),
        written_by="engine",
        splits=splits,
        differs_when_split=policy_cases.POLICY_MEANS,
    )


def in_one_batch(case: Case) -> Case:
    return replace(case, splits=(policy_cases.WHOLE,), differs_when_split={})


VISION_CASES = [
    *(
        written(method, f"beta-{beta:g}", family, beta=beta)
        for method in ("grpo", "rloo")
        for family in ("llava", "internvl")
        for beta in (0.0, 0.04)
    ),
    *(in_one_batch(written(method, "beta-0.04", "llava_next", beta=0.04)) for method in ("grpo", "rloo")),
    *(
        replace(in_one_batch(written(method, "uneven", "qwen2_5_vl")), differs={"error": "image-uneven-prompts"})
        for method in ("grpo", "rloo")
    ),
    *(chats(family) for family in FAMILIES),
    *(chats(family, "two", "two_shown") for family in FAMILIES),
    *(sft("completions", family, "shown_prompt_completion") for family in FAMILIES),
    *(seeing("dpo", "sigmoid", family, "shown_pair") for family in FAMILIES),
    seeing("dpo", "ipo", "llava_next", "shown_pair", loss_type=["ipo"]),
    *(chats(family, "mixed", "sometimes_shown") for family in ("llava", "qwen2_5_vl", "internvl")),
    one_split(sft("masked", "llava", "shown_messages"), corrected="mask_placeholders"),
    one_split(
        sft("unmasked", "llava", "shown_messages"),
        differs=dict.fromkeys(TOKEN_NUMBERS, "image-tokens"),
        witness="sft-images-llava-masked",
    ),
    one_split(chats("llava", "long", "long_shown", max_length=None)),
    one_split(
        chats("llava", "long-default", "long_shown"),
        differs=dict.fromkeys(OF_TOKENS, "image-length"),
        witness="sft-images-llava-long",
    ),
    one_split(chats("llava", "cut", "shown_late", max_length=90), differs={"error": "image-truncation"}),
    one_split(chats("llava", "on-white", "shown_on_white")),
    one_split(
        chats("llava", "transparent", "shown_transparent"),
        differs=dict.fromkeys(TOKEN_NUMBERS, "image-alpha"),
        witness="sft-images-llava-on-white",
    ),
    one_split(sft("text-only", "llava", "messages")),
    *(one_split(chats(family, "evaluation"), evaluation=True, differs=EVALUATION) for family in FAMILIES),
    *(
        one_split(seeing("dpo", "evaluation", family, "shown_pair"), evaluation=True, differs=EVALUATION)
        for family in ADAPTED
    ),
    *(adapted(sft("lora", family, "shown_prompt_completion")) for family in ADAPTED),
    *(adapted(seeing("dpo", "lora", family, "shown_pair")) for family in ADAPTED),
    *(adapted(chats(family, "lora-mixed", "sometimes_shown")) for family in ADAPTED[:2]),
    adapted(sft("lora-loaded", "llava", "shown_prompt_completion"), adapter="loaded"),
    adapted(seeing("dpo", "lora-loaded", "llava", "shown_pair"), adapter="loaded"),
    *(on_tower(sft("lora-vision", family, "shown_prompt_completion")) for family in ADAPTED),
    *(on_tower(seeing("dpo", "lora-vision", family, "shown_pair")) for family in ADAPTED),
    *(by_names(sft("lora-names", family, "shown_prompt_completion"), TOKEN_NUMBERS) for family in ADAPTED),
    *(by_names(seeing("dpo", "lora-names", family, "shown_pair"), PAIR_NUMBERS) for family in ADAPTED),
]
