"""EvalSpec: what is asked of a model, how often, and who judges it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.formats import PROMPT_ONLY
from posttrain.data.sources.named import DatasetSource, load_source
from posttrain.data.store.prepare import prepare_dataset
from posttrain.rewards.reward_set import reward_name
from posttrain.rewards.runtime.invoke import OURS, Wants
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.prompt_rows import PromptRows

NAME = re.compile(r"[\w.@+-]+")


@dataclass
class EvalSpec:
    """A task: prompts, sampling and rewards. Two evaluations of equal specs give a model's weights the same answers.

    Rewards have the signature of GRPO's: f(prompts, completions, completion_ids, **columns of the rows).
    """

    data: Any
    """Prompts: a file, a folder or a Hub id; in Python also a datasets.Dataset or a list of rows."""
    reward: Any
    """A reward function or several, or reward models."""
    name: str = ""
    """Under which the scores are logged, as evals/NAME/score. Empty: that of the data."""
    samples: int = 1
    """Answers to each prompt."""
    temperature: float = 1.0
    """Divides the logits. 0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    limit: int | None = None
    """Only the first so many rows. None: all."""
    seed: int = 0
    """Of the draws: answers are a function of weights, prompt, row, sample and seed, and of nothing else."""
    threshold: float | None = None
    """An answer passes from this reward on. None: from 1 on, where all rewards are 0 or 1; else no pass rate is reported."""
    reward_weights: Sequence[float] | None = None
    """One for each reward; the score is their weighted sum. None: 1 each."""
    best_of: int | None = None
    """Write so many answers to each prompt and also score the one that `select_by` likes best."""
    select_by: Any = None
    """The reward that picks: a function, a reward model or a process reward. It does not count in the scores itself."""
    subset: str | None = None
    """Configuration of a dataset from the Hub."""
    split: str = "test"
    """Of a folder or a dataset from the Hub."""
    columns: Mapping[str, str] | None = None
    """Their column -> the name that is read, such as {"question": "prompt"}."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template. None: those of the run."""
    every: int | None = None
    """In a run: steps between evaluations. None: whenever the run evaluates or saves. Always at its beginning and end, too."""
    patience: int | None = None
    """In a run: end it after so many evaluations in a row that were not better than the best before them."""
    max_drop: float | None = None
    """In a run: end it when the score is more than this below that of the first evaluation."""

    def __post_init__(self) -> None:
        self.reward = list(self.reward) if isinstance(self.reward, list | tuple) else [self.reward]
        if not self.name:
            named = Path(self.data).name.split(".")[0] if isinstance(self.data, str | Path) else ""
            self.name = re.sub(r"[^\w.@+-]", "_", named) or "eval"
        if self.best_of is not None and self.samples == 1:
            self.samples = self.best_of
        weights_fit = self.reward_weights is None or len(self.reward_weights) == len(self.reward)
        picks = self.select_by is not None
        for key, holds, wanted in (
            ("name", NAME.fullmatch(self.name) is not None, "a word of letters, digits and . @ + - _"),
            ("reward", len(self.reward) > 0, "at least one reward"),
            ("samples", self.samples >= 1, "at least 1"),
            ("samples", self.samples == 1 or self.temperature > 0, "1 at temperature 0, where all answers are equal"),
            ("best_of", self.best_of is None or self.best_of >= 2, "at least 2"),
            ("samples", self.best_of in (None, self.samples), "left out, or `best_of`"),
            ("select_by", picks == (self.best_of is not None), "given where `best_of` is, and only there"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("limit", self.limit is None or self.limit >= 1, "at least 1"),
            ("every", self.every is None or self.every >= 1, "at least 1"),
            ("patience", self.patience is None or self.patience >= 1, "at least 1"),
            ("max_drop", self.max_drop is None or self.max_drop >= 0, "0 or more"),
            ("reward_weights", weights_fit, f"as long as there are rewards, which are {len(self.reward)}"),
        ):
            if not holds:
                raise ValueError(f"`{key}` is {getattr(self, key)!r}; it must be {wanted}.")
        self.sampling(())

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(
            self.max_new_tokens, self.temperature, self.top_p, self.top_k, stop_ids=stop_ids, seed=self.seed
        )

    def rows(self, renderer: Renderer, defaults: dict[str, Any] | None = None) -> PromptRows:
        """The prompts as tokens, every row checked. `defaults`: chat template arguments where this spec has none."""
        dataset = self._dataset()
        self.check_rewards(dataset)
        kwargs = defaults if self.chat_template_kwargs is None else self.chat_template_kwargs
        options = PrepareOptions(max_length=None, chat_template_kwargs=kwargs)
        return PromptRows(prepare_dataset(dataset, (PROMPT_ONLY,), renderer, options, self.name), dataset)

    def _dataset(self) -> Any:
        if isinstance(self.data, str | Path):
            source = DatasetSource(
                str(self.data), subset=self.subset, split=self.split, columns=dict(self.columns or {})
            )
            dataset = load_source(source)
        elif self.columns:
            raise ValueError("`columns` is for data that is named; rename the columns of the dataset that is given.")
        else:
            dataset = self.data
        if self.limit is None or self.limit >= len(dataset):
            return dataset
        return dataset.select(range(self.limit)) if hasattr(dataset, "select") else dataset[: self.limit]

    def check_rewards(self, dataset: Any) -> None:
        """A reward that wants a column which is not there is refused before anything is loaded."""
        columns = set(dataset.column_names if hasattr(dataset, "column_names") else dataset[0])
        for reward in (*self.reward, self.select_by):
            if not callable(reward) or hasattr(reward, "parameters"):
                continue
            if missing := Wants(reward).missing(columns | set(OURS) - {"environments"}):
                raise ValueError(
                    f"`reward`: {reward_name(reward)} needs the column {missing[0]!r}, which the rows do not have; they have "
                    f"{', '.join(map(repr, sorted(columns)))}. Map one with `columns`, or give the argument a default."
                )
