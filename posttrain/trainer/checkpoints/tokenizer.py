"""The tokenizer a run uses: its padding and end tokens, its chat template, and a model that knows its tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from posttrain.data.render.renderer import Renderer
from posttrain.data.render.template_checks import trained_stop_token
from posttrain.data.render.templates import BUILT_IN_FORMATS, use_chat_format
from posttrain.models.load.model import innermost_model, model_type_of
from posttrain.models.load.vocabulary import copy_chat_template, fit_embeddings
from posttrain.trainer.options.base import BaseConfig

logger = logging.getLogger(__name__)


def prepare_tokenizer(tokenizer: Any, args: BaseConfig) -> None:
    """Apply `chat_template_path`, `eos_token` and `pad_token`; a tokenizer without padding uses its end token."""
    if args.chat_template_path is not None:
        _set_template(tokenizer, args.chat_template_path)
    for name in ("eos_token", "pad_token"):
        wanted = getattr(args, name)
        if wanted is not None:
            if (
                tokenizer.convert_tokens_to_ids(wanted) in (None, tokenizer.unk_token_id)
                and wanted != tokenizer.unk_token
            ):
                raise ValueError(
                    f"`{name}` is {wanted!r}, which is not in the vocabulary of {type(tokenizer).__name__}."
                )
            setattr(tokenizer, name, wanted)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("The tokenizer has neither a padding nor an end token: set `pad_token` or `eos_token`.")
        tokenizer.pad_token = tokenizer.eos_token


def renderer_of(tokenizer: Any, model: str | Path | nn.Module, args: BaseConfig) -> Renderer:
    """What renders a run's rows. Where it has to find a chat format itself, it knows the type of the model."""
    renderer = Renderer(tokenizer)
    if not renderer.has_template:
        renderer.model_type = model_type_of(model, args.model_init_kwargs)
    return renderer


def _set_template(tokenizer: Any, source: str) -> None:
    path = Path(source)
    if path.suffix in (".jinja", ".j2"):
        if not path.is_file():
            raise FileNotFoundError(f"`chat_template_path` is {source}, but there is no such file.")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    elif source in BUILT_IN_FORMATS:
        for note in use_chat_format(tokenizer, source).notes:
            logger.warning(note)
    else:
        copy_chat_template(tokenizer, source)


def adopt_vocabulary(model: nn.Module, renderer: Renderer, args: BaseConfig) -> None:
    """Give the model rows for tokens that a cloned template added, and its configs the padding and end tokens."""
    innermost, tokenizer = innermost_model(model), renderer.tokenizer
    fit_embeddings(innermost, tokenizer)
    innermost.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    innermost.config.pad_token_id = tokenizer.pad_token_id
    if args.eos_token is not None:
        innermost.config.eos_token_id = tokenizer.eos_token_id
    generation = getattr(innermost, "generation_config", None)
    if generation is None:
        return
    generation.pad_token_id = tokenizer.pad_token_id
    known = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    known = [token for token in known if token is not None]
    closing = trained_stop_token(renderer) if renderer.has_template else None
    if closing is not None and closing not in known:
        logger.warning(
            f"Turns of this chat template end with {tokenizer.convert_ids_to_tokens(closing)!r} (token {closing}), which the "
            f"model's generation config does not stop at ({known or 'nothing'}): it is added there and to the stops of rollouts."
        )
    ends = [tokenizer.eos_token_id if args.eos_token is not None else None, closing, *known]
    ends = list(dict.fromkeys(token for token in ends if token is not None))
    if ends != known:
        generation.eos_token_id = ends
