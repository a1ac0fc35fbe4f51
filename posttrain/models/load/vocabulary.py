"""A model whose embedding has a row for every token of its tokenizer."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from torch import nn
from transformers import AddedToken, AutoTokenizer

logger = logging.getLogger(__name__)


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer itself, or that of a processor of images and text."""
    return getattr(processing_class, "tokenizer", processing_class)


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


def fit_embeddings(model: nn.Module, tokenizer: Any, multiple: int | None = 64) -> None:
    """Give the model rows for tokens it has none for. A larger embedding than vocabulary is left as it is."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=multiple)
        logger.info(
            f"The embedding grew from {rows} to {model.get_input_embeddings().num_embeddings} rows for new tokens."
        )


def clone_chat_template(
    model: nn.Module, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[nn.Module, Any, list[int]]:
    """Copies template, missing special tokens and EOS of the tokenizer at `source_tokenizer_path`; resizes embeddings.

    The embedding gets as many rows as there are tokens, rounded up to `resize_to_multiple_of`, and never fewer than it has.
    Rows beyond the vocabulary get tokens named `<extra_id_i>`, so that the tokenizer and the model have the same ids.
    Returns the model, the tokenizer and the ids of all added tokens (to be trained under PEFT).
    """
    added = copy_chat_template(tokenizer, source_tokenizer_path)
    fit_embeddings(model, tokenizer, resize_to_multiple_of)
    known, first_free = tokenizer.get_vocab(), len(tokenizer)
    unused = (name for number in itertools.count() if (name := f"<extra_id_{number}>") not in known)
    names = itertools.islice(unused, max(0, model.get_input_embeddings().num_embeddings - first_free))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    for config in (model.config, model.config.get_text_config(), getattr(model, "generation_config", None)):
        if config is not None:
            config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer, [*added, *range(first_free, len(tokenizer))]
