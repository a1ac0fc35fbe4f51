"""ProcessReward: a process reward model as a reward. Each step of a completion is judged, and one number is made of the steps.

    ProcessReward("runs/prm", rule="blank_line", aggregate="mean")     # or, where a name is taken: runs/prm?rule=blank_line

Tokens are pasted as in training: prompt, then each step and the separator, encoded one by one. In the text as it was written a
newline may have merged with what follows, and the model has never been asked about such a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import nn

from posttrain.core.sample import Sample
from posttrain.data.options import PrepareOptions
from posttrain.data.render.conversation import is_assistant
from posttrain.data.rows.checks import Finding
from posttrain.data.rows.encoding import stepwise
from posttrain.data.steps import StepRule, split_steps
from posttrain.models.load.model import TOKEN_LABELS, LoadOptions, innermost_model, load_model
from posttrain.models.load.saved_model import classifier_task
from posttrain.models.scoring.heads import score_labels
from posttrain.rewards.reward_model import ModelReward
from posttrain.rewards.runtime.results import Judged

AGGREGATES: dict[str, Callable[[np.ndarray, float], float]] = {
    "min": lambda logps, threshold: math.exp(logps.min()),
    "product": lambda logps, threshold: math.exp(logps.sum()),
    "mean": lambda logps, threshold: float(np.exp(logps).mean()),
    "last": lambda logps, threshold: math.exp(logps[-1]),
    "sum_log": lambda logps, threshold: float(logps.sum()),
    "share_above": lambda logps, threshold: float((np.exp(logps) > threshold).mean()),
}
"""Name -> one number of the log-probabilities that each step is good. Products and sums punish length; min sees one step."""
NAMED_OPTIONS: dict[str, Callable[[str], Any]] = {
    "rule": str,
    "aggregate": str,
    "step_separator": str,
    "threshold": float,
    "max_steps": int,
}
"""Options that may follow the name of a model, as in runs/prm?aggregate=mean&rule=blank_line -> how their text is read."""


class ProcessReward(ModelReward):
    """A token classifier with two labels, such as PRMTrainer makes, as a reward of RewardSet, GRPO, RLOO and `posttrain eval`."""

    task = TOKEN_LABELS

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        rule: str | StepRule = "separator",
        aggregate: str = "min",
        step_separator: str | None = None,
        *,
        threshold: float | None = None,
        max_steps: int | None = None,
        **loading: Any,
    ) -> None:
        """`step_separator` None: the one that the model was trained with, else a newline. `threshold` is that of share_above
        (None: 0.5); `loading` are the arguments of ModelReward."""
        check_options(rule, aggregate, step_separator, threshold, max_steps)
        super().__init__(model, tokenizer, **loading)
        known = getattr(innermost_model(self.model).config, "step_separator", None)
        self.separator = step_separator or known or "\n"
        self.rule = rule if isinstance(rule, StepRule) else StepRule(rule, self.separator, max_steps)
        self.aggregate = partial(AGGREGATES[aggregate], threshold=0.5 if threshold is None else threshold)

    def _prepared(self, model: nn.Module, options: LoadOptions) -> tuple[nn.Module, str]:
        loaded = load_model(model, options)
        return loaded.model, loaded.layout

    def _agrees_with_itself(self) -> bool:
        return True  # `load_model` has compared a token classifier with its own forward

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        """As a reward function; None for a completion without a step."""
        judged = [Judged(prompt, completion, []) for prompt, completion in zip(prompts, completions)]
        samples = self.samples_of(judged)
        values = iter(self._log_probs([sample for sample in samples if sample is not None]))
        return [None if sample is None else self.aggregate(next(values)) for sample in samples]

    def step_scores(self, rows: list[tuple[Any, list[str]]]) -> list[list[float]]:
        """(prompt, steps) -> the probability that each step is good."""
        samples = self._encoded([{"prompt": prompt, "completions": steps} for prompt, steps in rows])
        return [np.exp(logps).tolist() for logps in self._log_probs(samples)]

    def steps_of(self, completion: Any) -> list[str]:
        """The steps of a completion, or of the assistant's messages in it, as the rule cuts them, without the space around them."""
        texts, ending = [completion], self.rule.separator.strip()
        if not isinstance(completion, str):
            texts = [message.get("content") or "" for message in completion if is_assistant(message)]
        pieces = [text[start:stop] for text in texts for start, stop in split_steps(text, self.rule)]
        steps = [piece.strip().removesuffix(ending).rstrip() for piece in pieces]
        return [step for step in steps if step]

    def samples_of(self, judged: list[Judged]) -> list[Sample | str | None]:
        rows = [{"prompt": one.prompt, "completions": self.steps_of(one.completion)} for one in judged]
        encoded = iter(self._encoded([row for row in rows if row["completions"]]))
        return [next(encoded) if row["completions"] else None for row in rows]

    def judgements(self, samples: list[Sample], judged: list[Judged]) -> list[tuple[float, dict[str, Any]]]:
        found = []
        for logps, one in zip(self._log_probs(samples), judged):
            steps = zip(np.exp(logps).round(4).tolist(), self.steps_of(one.completion))
            found.append((self.aggregate(logps), {f"{self.name} steps": [*map(list, steps)]}))
        return found

    def _encoded(self, rows: list[dict[str, Any]]) -> list[Sample | str]:
        options, found = PrepareOptions(step_separator=self.separator), [None] * len(rows)
        for is_plain in (True, False):
            places = [place for place, row in enumerate(rows) if isinstance(row["prompt"], str) == is_plain]
            if places and not is_plain and not self.renderer.has_template:
                raise ValueError(
                    f"The tokenizer of process reward {self.name} has no chat template, and the prompts are conversations: give "
                    "one with a template in `reward_processing_classes`."
                )
            part = [{**rows[place], "labels": [True] * len(rows[place]["completions"])} for place in places]
            for place, unit in zip(places, stepwise(part, self.renderer, options, Counter()) if part else ()):
                found[place] = f"{unit.column} {unit.reason}" if isinstance(unit, Finding) else unit[0]
        return found

    @torch.no_grad()
    def _log_probs(self, samples: list[Sample | str]) -> list[np.ndarray]:
        """Of each sample the log-probability that each of its steps is good; an error where a text stands in its place."""
        if refused := [reason for reason in samples if isinstance(reason, str)]:
            raise ValueError(f"Process reward {self.name}: {refused[0]}")
        found: list[Any] = [None] * len(samples)
        for places, part in self._micro_batches(samples):
            batch = self._batch(part, self.layout)
            good = score_labels(self.model, batch).labels.double().log_softmax(-1)[:, 1].cpu()
            for place, logps in zip(places, good.split(batch.counts.tolist())):
                found[place] = logps.numpy()
        return found


def model_reward(reward: Any, tokenizer: Any = None, **loading: Any) -> ModelReward:
    """A reward model by id, path or module, or as it is: a ProcessReward where it labels tokens. A name may bring NAMED_OPTIONS."""
    if isinstance(reward, ModelReward):
        return reward
    if isinstance(reward, nn.Module):
        judges_tokens = type(innermost_model(reward)).__name__.endswith("ForTokenClassification")
        return (ProcessReward if judges_tokens else ModelReward)(reward, tokenizer, **loading)
    name, options = named_reward(str(reward))
    if classifier_task(name) == TOKEN_LABELS:
        return ProcessReward(name, tokenizer, **options, **loading)
    if options:
        raise ValueError(
            f"{reward}: the option {next(iter(options))!r} needs a process reward model, and {name} is not one."
        )
    return ModelReward(name, tokenizer, **loading)


def check_options(
    rule: str | StepRule = "separator",
    aggregate: str = "min",
    step_separator: str | None = None,
    threshold: float | None = None,
    max_steps: int | None = None,
) -> None:
    """Those of ProcessReward, before a model is loaded."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"Unknown aggregate {aggregate!r}; known: {', '.join(AGGREGATES)}.")
    if threshold is not None and aggregate != "share_above":
        raise ValueError(f"`threshold` is {threshold}, and {aggregate} has none: leave it out, or take share_above.")
    if isinstance(rule, str):
        StepRule(rule, "\n" if step_separator is None else step_separator, max_steps)
    elif max_steps is not None:
        raise ValueError("`max_steps` is a field of the rule that is given: set it there.")


def named_reward(text: str) -> tuple[str, dict[str, Any]]:
    """runs/prm?aggregate=mean -> ("runs/prm", {"aggregate": "mean"}); a ValueError names what it cannot read."""
    name, _, query = text.partition("?")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        if unknown := [option for option in given if option not in NAMED_OPTIONS]:
            raise ValueError(f"Unknown option {unknown[0]!r}; known: {', '.join(NAMED_OPTIONS)}.")
        options = {option: NAMED_OPTIONS[option](value) for option, value in given.items()}
        check_options(**options)
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    return name, options
