"""A model whose embedding has a row for every token of its tokenizer."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoTokenizer

logger = logging.getLogger(__name__)


def copy_chat_template(tokenizer: Any, source: str) -> list[int]:
    """Take over the chat template, the end token and the missing special tokens of another tokenizer; ids of new tokens."""
    other = AutoTokenizer.from_pretrained(source)
    if other.chat_template is None:
        raise ValueError(f"The tokenizer at {source} has no chat template to clone.")
    before = len(tokenizer)
    known = tokenizer.get_vocab()
    wanted = [token for token in other.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(wanted)
    tokenizer.chat_template = other.chat_template
    tokenizer.eos_token = other.eos_token
    return list(range(before, len(tokenizer)))


def fit_embeddings(model: nn.Module, tokenizer: Any, multiple: int = 64) -> None:
    """Give the model rows for tokens it has none for. A larger embedding than vocabulary is left as it is."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple)
        logger.info(
            f"The embedding grew from {rows} to {model.get_input_embeddings().num_embeddings} rows for new tokens."
        )
