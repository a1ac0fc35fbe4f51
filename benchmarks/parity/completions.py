"""What both libraries are told that the model has written, and how it is judged: a function of prompt and repetition alone.

A completion is of some letters and the end of text, or, where it was "cut off", of MAX_LENGTH letters without an end.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch

MAX_LENGTH = 16
LETTERS = "aeiou bcdfg.,"
CUT_OFF = 0.3  # share of completions that have no end


def completion_ids(prompt: str, repetition: int, tokenizer: Any) -> list[int]:
    draw = random.Random(zlib.crc32(f"{prompt}|{repetition}".encode()))
    length = MAX_LENGTH if draw.random() < CUT_OFF else draw.randrange(1, MAX_LENGTH - 1)
    ids = tokenizer.encode("".join(draw.choice(LETTERS) for _ in range(length)))
    return ids if length == MAX_LENGTH else [*ids, tokenizer.eos_token_id]


def sampling_logps(ids: Sequence[int]) -> list[float]:
    """Made up, around what a model that knows nothing thinks of one of 259 tokens."""
    return [-5.0 - 0.25 * ((3 * place + token) % 5) for place, token in enumerate(ids)]


def for_each(prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """A completion for each prompt; the same prompt a second time gets another one."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        found.append(completion_ids(prompt, seen[prompt], tokenizer))
        seen[prompt] += 1
    return found


def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """For `rollout_func` of either library."""
    tokenizer = trainer.processing_class
    found = for_each(prompts, tokenizer)
    return {
        "prompt_ids": [tokenizer.encode(prompt) for prompt in prompts],
        "completion_ids": found,
        "logprobs": [sampling_logps(ids) for ids in found],
    }


def scripted_engine(tokenizer: Any) -> Any:
    """For our `engine`: it sees the prompt's tokens and the number of the sample."""
    from tests.rollout.scripted_engine import ScriptedEngine

    engine = ScriptedEngine(lambda prompt: completion_ids(tokenizer.decode(prompt.ids), prompt.sample, tokenizer))
    engine.reads_images = True
    return engine


def script_generate(model: Any, tokenizer: Any) -> None:
    """For a trainer that calls `model.generate`: rows come padded on the left, and go out padded on the right."""

    def generate(self: Any, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        real = [row[mask.bool()] for row, mask in zip(input_ids, attention_mask)]
        found = for_each([tokenizer.decode(row) for row in real], tokenizer)
        width = max(map(len, found))
        said = torch.tensor([[*ids, *[tokenizer.pad_token_id] * (width - len(ids))] for ids in found])
        sequences = torch.cat([input_ids, said.to(input_ids.device)], dim=1)
        return SimpleNamespace(sequences=sequences) if options.get("return_dict_in_generate") else sequences

    model.generate = MethodType(generate, model)


# ---- rewards ---------------------------------------------------------------------------------------------------------------


def brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The first letter counts a little, so that no completion has exactly the mean reward of its group."""
    return [1.0 - len(ids) / 10 - 0.013 * (ids[0] % 11) for ids in completion_ids]


def tied_brevity(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Some completions have exactly the mean reward of their group."""
    return [1.0 - len(ids) / 10 for ids in completion_ids]


def vowels(completions: list[str], **columns: Any) -> list[float]:
    return [3.0 * sum(letter in "aeiou" for letter in said) / (1 + len(said)) for said in completions]


def of_the_short(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    """Has no opinion of long completions."""
    return [float(ids[0] % 7) if len(ids) < 12 else None for ids in completion_ids]


def near_answer(completions: list[str], answer: list[float], **columns: Any) -> list[float]:
    """Reads a column of the dataset."""
    return [-abs(value - len(said)) / 8 for said, value in zip(completions, answer)]


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    function.__name__: function for function in (brevity, tied_brevity, vowels, of_the_short, near_answer)
}
