"""PrepareOptions: what the preparation of a dataset depends on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from posttrain.core.sample import KEEP_END, KEEP_START
from posttrain.data.images.limits import ImageLimits
from posttrain.data.packing import packing_strategy

DROP, ERROR = "drop", "error"
TRUNCATION_MODES = (KEEP_START, KEEP_END, ERROR, DROP)


@dataclass
class PrepareOptions:
    """What the preparation of a dataset depends on, besides the rows, the format and the tokenizer."""

    max_length: int | None = 1024
    """Most tokens of a sample; the block size when packing. None: no limit."""
    truncation_mode: str = KEEP_START
    """What happens to longer samples: keep_start, keep_end (cut), drop (the whole row, counted), error (a bad row)."""
    on_bad_rows: str = ERROR
    """error: refuse the dataset and list what is wrong; drop: leave the rows out, count them and write them down."""
    completion_only_loss: bool | None = None
    """Train the completion only. None: yes where rows have prompt and completion."""
    assistant_only_loss: bool = False
    """Train the assistant's turns of conversations only."""
    dataset_text_field: str = "text"
    """Name of the text column."""
    packing: str | None = None
    """None, or the strategy by which samples share blocks of `max_length` tokens: bfd, bfd_split, wrapped."""
    shuffle_seed: int | None = None
    """Seed of the order of rows (before packing). None: the dataset's own order."""
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    """Row -> text to train on, in place of the row's columns."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template; those of a row's own `chat_template_kwargs` column come first."""
    tools: list[dict[str, Any]] | None = None
    """Schemas of tools that conversations are rendered with; those of a row's own `tools` column come first."""
    allow_blank_prompts: bool = False
    """A user's turn may be empty: an environment writes it when an episode begins."""
    append_eos: bool = True
    """Put the end-of-sequence text after plain texts and completions that do not end on it."""
    step_separator: str = "\n"
    """Written after each step of stepwise rows; its last token is where the step is judged."""
    train_on_last_step_only: bool = False
    """Judge only the last step of stepwise rows."""
    max_completion_length: int | None = None
    """Most tokens of the steps of stepwise rows."""
    train_chosen_prompt: bool = False
    """Train the prompt of preference pairs, too, once, before the chosen answer; `per_token["answer"]` marks the answers."""
    required_columns: tuple[str, ...] = ()
    """Further columns that must be there and not null, such as those a reward function reads."""
    allowed_values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Column -> the values it may have, such as the names of environments."""
    image_limits: ImageLimits | None = None
    """What images of rows may be. None: the model sees no images, and rows that have some are bad rows."""
    row_id_column: str | None = None
    """Column that names rows; a repeated name is then a bad row."""
    bad_rows_file: str | os.PathLike[str] | None = None
    """JSONL file to which every problem is written. None: beside the cached tokens."""
    cache_dir: str | os.PathLike[str] | None = None
    """Where tokens are kept. None: the folder `posttrain` in the cache of `datasets`."""

    ENCODING_FIELDS: ClassVar[tuple[str, ...]] = (
        "completion_only_loss", "assistant_only_loss", "chat_template_kwargs", "tools", "allow_blank_prompts",
        "append_eos", "step_separator", "train_on_last_step_only", "max_completion_length", "train_chosen_prompt",
        "required_columns",
        "allowed_values", "row_id_column", "image_limits",
    )  # fmt: skip
    """Options that change what is stored; the others apply to a stored dataset."""

    def __post_init__(self) -> None:
        if self.truncation_mode not in TRUNCATION_MODES:
            raise ValueError(
                f"truncation_mode={self.truncation_mode!r}; it must be one of {', '.join(TRUNCATION_MODES)}."
            )
        if self.on_bad_rows not in (ERROR, DROP):
            raise ValueError(f"on_bad_rows={self.on_bad_rows!r} is neither {ERROR!r} nor {DROP!r}.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}: a sample needs two tokens for one to be predicted.")
        if self.packing is not None:
            packing_strategy(self.packing)
            if self.max_length is None:
                raise ValueError("packing needs max_length, the size of a block.")
