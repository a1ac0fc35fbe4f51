"""A byte-level BPE tokenizer (GPT-2's kind: Llama 3, Qwen, SmolLM) as the metadata of a GGUF file."""

from __future__ import annotations

import json
from typing import Any

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of tokens in a GGUF file."""

PRE_TOKENIZERS = {
    "smollm": ("Digits",),
    "llama-bpe": (r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    "qwen2": (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",),
}
"""llama.cpp's name of a way to cut text into words -> texts in the tokenizer's own description of it, in order of trial."""
PLAIN = "gpt-2"


def write_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """`rows`: of the embedding; those without a token are filled with names that no text has."""
    description = described(tokenizer)
    tokens, types = _tokens(tokenizer, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(description))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in description["model"]["merges"]]
    )
    for kind in ("bos", "eos", "pad", "unk"):
        number = getattr(tokenizer, f"{kind}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(_adds_bos(tokenizer))
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def described(tokenizer: Any) -> dict[str, Any]:
    """tokenizer.json; ValueError for a tokenizer of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    description = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    byte_level = "ByteLevel" in json.dumps(description.get("decoder"))
    if description["model"].get("type") != "BPE" or not byte_level or not description["model"].get("merges"):
        raise ValueError(
            f"GGUF files are written with byte-level BPE tokenizers (as those of Llama 3, Qwen and SmolLM); this is a "
            f"{type(tokenizer).__name__} of another kind. Export the model as merged, and convert that with llama.cpp's "
            "convert_hf_to_gguf.py."
        )
    return description


def pre_tokenizer_name(description: dict[str, Any]) -> str:
    """llama.cpp knows ways of cutting text by name."""
    cuts = json.dumps(description.get("pre_tokenizer"), ensure_ascii=False)
    for name, marks in PRE_TOKENIZERS.items():
        if all(mark.replace("\\", "\\\\") in cuts for mark in marks):
            return name
    return PLAIN


def _tokens(tokenizer: Any, rows: int) -> tuple[list[str], list[int]]:
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(rows):
        token = known.get(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            types.append(UNUSED)
            continue
        tokens.append(token)
        types.append(NORMAL if number not in added else CONTROL if added[number].special else USER_DEFINED)
    return tokens, types


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
