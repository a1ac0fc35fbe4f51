"""What both libraries are given: the same weights, the same rows in the same order, the same tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from benchmarks.speed.rows import FIRST_TOKEN, Row

EOS, PAD = 0, 1
CONTROL_WORDS = {EOS: "<eos>", PAD: "<pad>", 2: "<unk>"}
LOADERS = {
    "sft": AutoModelForCausalLM,
    "dpo": AutoModelForCausalLM,
    "kto": AutoModelForCausalLM,
    "orpo": AutoModelForCausalLM,
    "reward": AutoModelForSequenceClassification,
    "grpo": AutoModelForCausalLM,
}


def tokenizer(row: Row) -> PreTrainedTokenizerFast:
    """A word for every id: a text has exactly the tokens it was made from. Decoded as the tokenizers of these families are."""
    words = {word_of(token): token for token in range(row.shape.vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token=word_of(2)))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=word_of(EOS), pad_token=word_of(PAD), unk_token=word_of(2)
    )


def word_of(token: int) -> str:
    return CONTROL_WORDS.get(token) or f"w{token}"


def config_of(row: Row) -> Qwen2Config | Qwen3MoeConfig:
    shape = row.shape
    given = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": max(4096, row.lengths.prompt + row.lengths.high),
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "num_labels": 1,
    }
    if shape.experts is None:
        return Qwen2Config(**given)
    count, active = shape.experts
    more = {"num_experts": count, "num_experts_per_tok": active, "moe_intermediate_size": shape.intermediate}
    return Qwen3MoeConfig(**given, **more, head_dim=shape.hidden // shape.heads[0], norm_topk_prob=True)


def build_model(row: Row, device: str, dtype: torch.dtype) -> Any:
    """Random weights from one seed, rounded to bfloat16 whatever the format: every setting starts from the same numbers."""
    config = config_of(row)
    torch.manual_seed(0)
    with torch.device(device):
        model = LOADERS[row.method].from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # not `model.to`, which would round the rotary frequencies too
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model


@torch.no_grad()
def checksum(model: Any) -> str:
    """Of all weights, as bfloat16 bits: the same for the same numbers in another format."""
    total = 0
    for place, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().to(torch.bfloat16).contiguous().view(torch.int16)
        total = (total * 1_000_003 + place + int(bits.sum(dtype=torch.int64))) % (1 << 61)
    return f"{total:x}"


def set_adapters(model: Any) -> int:
    """The same random A in every LoRA layer of both libraries (B starts at 0); how many were set."""
    count = 0
    for name, parameter in model.named_parameters():
        if "lora_A" not in name:
            continue
        rng = np.random.default_rng([ord(letter) for letter in plain_name(name)])
        bound = parameter.shape[1] ** -0.5
        values = rng.uniform(-bound, bound, tuple(parameter.shape)).astype(np.float32)
        parameter.data.copy_(torch.from_numpy(values).to(torch.bfloat16))
        count += 1
    return count


def plain_name(name: str) -> str:
    """The path of a layer, without what wrappers put around it."""
    return name[name.index("layers.") :] if "layers." in name else name


# ---- rows ---------------------------------------------------------------------------------------------------------------


def token_ids(rng: np.random.Generator, count: int, vocabulary: int, side: str = "text") -> list[int]:
    """Skewed to one end of the vocabulary, rejected answers to the other: there is something to learn, so losses have a trend."""
    ids = (rng.random(count) ** 4 * (vocabulary - FIRST_TOKEN)).astype(int)
    ids = vocabulary - 1 - ids if side == "rejected" else ids + FIRST_TOKEN
    return ids.tolist()


def text_of(ids: list[int]) -> str:
    return " ".join(map(word_of, ids))


def texts(row: Row, steps: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [{"input_ids": token_ids(rng, n, row.shape.vocabulary)} for n in row.sequence_lengths(steps)]


def pairs(row: Row, steps: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected) of each pair; answers end with the end-of-sequence token."""
    rng, made = np.random.default_rng(7), []
    answers = row.sequence_lengths(steps).reshape(-1, 2)
    for (chosen, rejected), asked in zip(answers, row.prompt_lengths(steps), strict=True):
        prompt = token_ids(rng, asked, row.shape.vocabulary)
        good = token_ids(rng, chosen - 1, row.shape.vocabulary)
        bad = token_ids(rng, rejected - 1, row.shape.vocabulary, "rejected")
        made.append((prompt, [*good, EOS], [*bad, EOS]))
    return made


def preferences(row: Row, steps: int) -> list[dict[str, Any]]:
    """As texts, since TRL's DPO tokenises whatever it is given; both libraries put the end-of-sequence token after answers."""
    return [
        {"prompt": text_of(prompt) + " ", "chosen": text_of(good[:-1]), "rejected": text_of(bad[:-1])}
        for prompt, good, bad in pairs(row, steps)
    ]


def rated(row: Row, steps: int) -> list[dict[str, Any]]:
    """A prompt of its own for every answer, wanted and unwanted in turn."""
    rng, made = np.random.default_rng(7), []
    for place, (length, asked) in enumerate(zip(row.sequence_lengths(steps), row.prompt_lengths(steps), strict=True)):
        side = "rejected" if place % 2 else "chosen"
        prompt = token_ids(rng, asked, row.shape.vocabulary)
        answer = token_ids(rng, length - 1, row.shape.vocabulary, side)
        made.append({"prompt": text_of(prompt) + " ", "completion": text_of(answer), "label": side == "chosen"})
    return made


def judged(row: Row, steps: int) -> list[dict[str, Any]]:
    """Ids with the prompt inside, as reward models read them."""
    return [{"chosen_ids": prompt + good, "rejected_ids": prompt + bad} for prompt, good, bad in pairs(row, steps)]


def groups(row: Row, steps: int) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, its completions) of each group; completions end with the end-of-sequence token."""
    rng, made = np.random.default_rng(7), []
    completions = row.sequence_lengths(steps).reshape(-1, row.group)
    for lengths, asked in zip(completions, row.prompt_lengths(steps), strict=True):
        prompt = token_ids(rng, asked, row.shape.vocabulary)
        made.append((prompt, [[*token_ids(rng, n - 1, row.shape.vocabulary), EOS] for n in lengths]))
    return made


def prompts(row: Row, steps: int) -> list[dict[str, Any]]:
    return [{"prompt": text_of(prompt)} for prompt, _ in groups(row, steps)]


MAKERS = {
    "sft": texts,
    "dpo": preferences,
    "kto": rated,
    "orpo": preferences,
    "reward": judged,
    "grpo": prompts,
}


def dataset(row: Row, steps: int, sort_within_steps: bool) -> Dataset:
    """The rows of `steps` optimizer steps; sorted by length (longest first) within each where padding would cost."""
    made = MAKERS[row.method](row, steps)
    if sort_within_steps and not row.is_online:
        parts = (made[start : start + row.rows] for start in range(0, len(made), row.rows))
        made = [one for part in parts for one in sorted(part, key=longest, reverse=True)]
    return Dataset.from_list(made)


def longest(one: dict[str, Any]) -> int:
    """Of what is padded to the longest of a batch, prompts included; in texts every word is a token."""
    sizes = {
        name: value.count(" ") if isinstance(value, str) else len(value)
        for name, value in one.items()
        if name != "label"
    }
    prompt = sizes.pop("prompt", 0)
    return prompt + max(sizes.values())


def step_tokens(row: Row, steps: int, written: list[int] | None = None) -> dict[str, list[int]]:
    """Real tokens of each step: `unique` counts a prompt once for all its answers, `as_fed` with each; padding never counts.

    `written` are the tokens of each step's completions, where the model wrote them.
    """
    sums = row.sequence_lengths(steps).reshape(steps, -1).sum(1) if written is None else np.asarray(written)
    prompts = row.prompt_lengths(steps).reshape(steps, -1).sum(1)
    answers = 2 if row.is_pairs else row.group or 1
    return {"unique": (sums + prompts).tolist(), "as_fed": (sums + answers * prompts).tolist()}
