"""Gives a model and its tokenizer the chat template of another one, with the tokens it needs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AddedToken

from posttrain.models.load.vocabulary import copy_chat_template


def clone_chat_template(
    model: nn.Module, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[nn.Module, Any, list[int]]:
    """Copies template, missing special tokens and EOS of the tokenizer at `source_tokenizer_path`; resizes embeddings.

    The embedding gets as many rows as there are tokens, rounded up to `resize_to_multiple_of`, and never fewer than it has.
    Rows beyond the vocabulary get tokens named `<extra_id_i>`, so that the tokenizer and the model speak of the same ids.
    Returns the model, the tokenizer and the ids of all added tokens (to be trained under PEFT).
    """
    added = copy_chat_template(tokenizer, source_tokenizer_path)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
        rows = model.get_input_embeddings().num_embeddings
    first_free = len(tokenizer)
    names = _unused_names(tokenizer, rows - first_free)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    _set_end_token(model, tokenizer.eos_token_id)
    return model, tokenizer, [*added, *range(first_free, len(tokenizer))]


def _unused_names(tokenizer: Any, count: int) -> list[str]:
    known, names, number = tokenizer.get_vocab(), [], 0
    while len(names) < count:
        if f"<extra_id_{number}>" not in known:
            names.append(f"<extra_id_{number}>")
        number += 1
    return names


def _set_end_token(model: nn.Module, eos_token_id: int) -> None:
    model.config.eos_token_id = eos_token_id
    model.config.get_text_config().eos_token_id = eos_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = eos_token_id
