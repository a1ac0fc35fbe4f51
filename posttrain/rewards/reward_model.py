"""ModelReward: a sequence classifier as a reward, with its own tokenizer, scored in micro-batches by tokens.

As in TRL a sample is the text of prompt and completion, through the chat template of the reward model's tokenizer where they are
conversations, without further special tokens; the reward is the classifier's one output. Unlike TRL, control tokens that are
typed into a message are ordinary text, and no round needs more memory than `max_tokens` tokens at a time.

Decoders are scored by our own ragged pass at each sequence's last token. A probe compares it with the model's own forward;
where they differ, as in encoders, which read their first token, the model's own padded forward is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import PADDED, TokenBatch
from posttrain.core.sample import Sample
from posttrain.data.collate import collate, split_by_tokens
from posttrain.data.render.conversation import Conversation, RenderError, is_assistant, join_completion
from posttrain.data.render.renderer import Renderer
from posttrain.models.load.model import (
    SEQUENCE_REWARD,
    LoadOptions,
    innermost_model,
    load_model,
    load_pretrained,
    load_tokenizer,
)
from posttrain.models.scoring.heads import HEAD_NAMES, score_sequences
from posttrain.models.scoring.probe import TOLERANCE
from posttrain.rewards.runtime.invoke import ERROR, INVALID
from posttrain.rewards.runtime.results import Judged, Outcomes

ROLES = ("text",)
PROBE_TEXTS = ("Is this so?", "It is, and it has been so for a long time.")


class ModelReward:
    """One reward model. `model` is an id, a path or a module; a module stays on its device, an id is loaded to `device`."""

    task = SEQUENCE_REWARD

    def __init__(
        self,
        model: str | Path | nn.Module,
        tokenizer: Any = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str = "auto",
        max_tokens: int = 16_384,
        model_init_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        device = None if device is None else torch.device(device)
        options = LoadOptions(dtype, self.task, model_init_kwargs or {}, trust_remote_code, device=device)
        self.name = _name(model)
        if tokenizer is None:
            tokenizer = load_tokenizer(model, model_init_kwargs, trust_remote_code)
        self.renderer = Renderer(tokenizer)
        self.max_tokens = max_tokens
        if not isinstance(model, nn.Module):
            model = load_pretrained(model, options)
        self.notes: list[str] = []
        self.model, self.layout = self._prepared(model, LoadOptions(task=self.task, device=device))
        self.model.eval().requires_grad_(False)
        if self.layout is not None and not self._agrees_with_itself():
            self.notes.append(
                f"Reward model {self.name} is scored by its own padded forward: it does not read the last token."
            )
            self.layout = None

    def _prepared(self, model: nn.Module, options: LoadOptions) -> tuple[nn.Module, str | None]:
        """The model and the layout of its batches; None: its own forward."""
        innermost = innermost_model(model)
        if not hasattr(innermost, "config") or not any(hasattr(innermost, name) for name in HEAD_NAMES):
            self.notes.append(
                f"Reward model {self.name} is scored by its own padded forward: its head has no known name."
            )
            return model if options.device is None else model.to(options.device), None
        loaded = load_model(model, options)
        return loaded.model, loaded.layout

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def to(self, device: torch.device | str) -> ModelReward:
        self.model.to(device)
        return self

    # -------------------------------------------------------------------------------------------------- judging

    def judge(self, key: int, samples: list[Judged], outcomes: Outcomes) -> None:
        """Give every sample of a round an outcome. Runs on the caller's thread: a device is not shared with generation."""
        started = time.perf_counter()
        longest = getattr(getattr(innermost_model(self.model), "config", None), "max_position_embeddings", None)
        fitting: dict[int, Sample] = {}
        for number, sample in enumerate(self.samples_of(samples)):
            if sample is None:
                outcomes.settle(key, number, None, {})
            elif isinstance(sample, str):
                outcomes.fail(key, number, ERROR, sample)
            elif longest is not None and len(sample) > longest:
                outcomes.fail(
                    key, number, ERROR, f"it has {len(sample)} tokens, more than the {longest} of the reward model."
                )
            else:
                fitting[number] = sample
        judgements = self.judgements([*fitting.values()], [samples[number] for number in fitting])
        for number, (value, extras) in zip(fitting, judgements):
            if math.isfinite(value):
                outcomes.settle(key, number, value, extras)
            else:
                outcomes.fail(key, number, INVALID, f"the model's score is {value}.")
        outcomes.spent(key, time.perf_counter() - started)

    def samples_of(self, judged: list[Judged]) -> list[Sample | str | None]:
        """What is scored; a text says why there is none, None that the model has no opinion."""
        found: list[Sample | str | None] = []
        for ids in self.encode(judged):
            if isinstance(ids, RenderError):
                found.append(ids.reason)
            else:
                found.append(_unlabelled(ids) if len(ids) else "prompt and completion are empty.")
        return found

    def judgements(self, samples: list[Sample], judged: list[Judged]) -> list[tuple[float, dict[str, Any]]]:
        """(value, columns of `log_extra`) of each sample."""
        return [(value, {}) for value in self.score(samples)]

    def encode(self, samples: list[Judged]) -> list[np.ndarray | RenderError]:
        """Token ids of prompt and completion."""
        chats = {n: s for n, s in enumerate(samples) if not isinstance(s.completion, str)}
        if chats and not self.renderer.has_template:
            raise ValueError(
                f"The tokenizer of reward model {self.name} has no chat template, and the completions are conversations: give one "
                "with a template in `reward_processing_classes`."
            )
        texts = {n: s.prompt + s.completion for n, s in enumerate(samples) if n not in chats}
        found: dict[int, Any] = dict(
            zip(texts, self.renderer.encode_texts(list(texts.values()), add_special_tokens=False) if texts else [])
        )
        rendered = self.renderer.encode_chats([_conversation(sample) for sample in chats.values()], "everything")
        found |= {n: item.input_ids if isinstance(item, Sample) else item for n, item in zip(chats, rendered)}
        return [found[n] for n in range(len(samples))]

    @torch.no_grad()
    def score(self, samples: list[Sample]) -> list[float]:
        """One number for each sample, in their order."""
        scores = [0.0] * len(samples)
        for places, part in self._micro_batches(samples):
            values = self._own_scores(part) if self.layout is None else self._scores(part)
            for place, value in zip(places, values.tolist()):
                scores[place] = value
        return scores

    def _micro_batches(self, samples: list[Sample]) -> Iterator[tuple[list[int], list[Sample]]]:
        """Parts of at most `max_tokens` tokens; alike lengths together, so that little of a padded batch is padding."""
        order = sorted(range(len(samples)), key=lambda place: len(samples[place]))
        units = [(samples[place],) for place in order]
        start = 0
        for part in split_by_tokens(units, self.layout or PADDED, self.max_tokens):
            if part:
                yield order[start : start + len(part)], [unit[0] for unit in part]
                start += len(part)

    def _scores(self, samples: list[Sample]) -> Tensor:
        batch = self._batch(samples, self.layout)
        return score_sequences(self.model, batch).rewards

    def _own_scores(self, samples: list[Sample]) -> Tensor:
        """One row at a time where the model knows no padding token: its forward could not tell where a row ends."""
        config = getattr(innermost_model(self.model), "config", None)
        if config is None or getattr(config, "pad_token_id", None) is None:
            return torch.cat([self._own_forward([sample]) for sample in samples])
        return self._own_forward(samples)

    def _own_forward(self, samples: list[Sample]) -> Tensor:
        batch = self._batch(samples, PADDED)
        answer = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        logits = (
            answer if isinstance(answer, Tensor) else answer["logits"] if isinstance(answer, dict) else answer.logits
        )
        return logits.reshape(len(samples), -1)[:, 0].float()

    def _batch(self, samples: list[Sample], layout: str) -> TokenBatch:
        pad = getattr(getattr(innermost_model(self.model), "config", None), "pad_token_id", None)
        units = [(sample,) for sample in samples]
        return collate(units, ROLES, layout, 0 if pad is None else pad).to(self.device)

    @torch.no_grad()
    def _agrees_with_itself(self) -> bool:
        """Do our scores equal those of the model's own forward, one row at a time?"""
        texts = self.renderer.encode_texts(list(PROBE_TEXTS), add_special_tokens=False)
        probes = [_unlabelled(ids) for ids in texts]
        own = torch.cat([self._own_forward([probe]) for probe in probes])
        tolerance = TOLERANCE.get(next(self.model.parameters()).dtype, 1e-3)
        return bool(((self._scores(probes) - own).abs() <= tolerance * own.abs().clamp(min=1)).all())


def _unlabelled(ids: np.ndarray) -> Sample:
    return Sample(ids, np.zeros(len(ids), dtype=bool))


def _conversation(sample: Judged) -> Conversation:
    """Prompt and completion as one chat; a completion that continues the prompt's last message is joined to it."""
    prompt, completion = list(sample.prompt), list(sample.completion)
    chat = Conversation([*prompt, *completion], num_prompt_messages=len(prompt))
    if prompt and completion and is_assistant(prompt[-1]) and is_assistant(completion[0]):
        return join_completion(chat)[0]
    return chat


def _name(model: str | Path | nn.Module) -> str:
    """As in TRL the last part of the id."""
    if isinstance(model, nn.Module):
        known = getattr(getattr(innermost_model(model), "config", None), "_name_or_path", "")
        return (known.rstrip("/").split("/")[-1]) or type(model).__name__
    return str(model).rstrip("/").split("/")[-1]
