"""Case: one run of both libraries, and which of its numbers may differ and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One run of both libraries."""

    name: str
    method: str  # of METHODS
    rows: str  # a kind of row in rows.py
    options: dict[str, Any] = field(default_factory=dict)  # of the config, for both libraries
    ours: dict[str, Any] = field(default_factory=dict)  # on our side only, to restore TRL's behaviour
    trl: dict[str, Any] = field(default_factory=dict)  # on TRL's side only, to ask for ours
    model: str = "causal"
    tokenizer: str = "tokenizer"
    sees: bool = False  # it reads images; its processor lies beside it
    adapter: str | None = None  # "loaded": a PeftModel is given; "new": a peft_config, then the saved initialisation
    saved_adapter: str = "adapter"  # of the model; "wide_adapter": of one that sees, on its tower, too
    reference: str | None = None  # explicit `ref_model`
    teacher: str | None = None  # `teacher_model`
    teacher_tokenizer: str = "tokenizer"
    evaluation: bool = False
    streamed: bool = False
    first_rows: int | None = None  # take so many rows only
    rewards: tuple[str, ...] = ()  # online methods: names of functions in completions.py
    written_by: str = "function"  # and who hands the completions over: "function" (`rollout_func`) or "engine"
    trl_version: str = "1.16.0"
    corrected: str | None = None  # name of a function in corrections.py that changes TRL's trainer
    is_shuffled: bool = False  # TRL shuffles the samples of a generation, as it does by itself
    formatting_func: Callable[[dict[str, Any]], str] | None = None
    differs: dict[str, str] = field(default_factory=dict)  # pattern of numbers that differ -> key of DIFFERENCES
    differs_when_split: dict[str, str] = field(default_factory=dict)  # the same, at 2x2 only
    witness: str | None = None  # the case in which TRL's numbers must equal ours where they differ in this one
    splits: tuple[str, ...] = ("1x4", "2x2")
    rounding: float = (
        1.0  # factor on the tolerance, for a loss that amplifies rounding; the reason stands beside the case
    )
