"""Completions that match a regular expression: which tokens may come next, by outlines-core.

Engines know no tokenizer, so the text of each token is read off the detokeniser: what `decode` says of a known token followed by
it, less what it says of the known token alone. Tokens that are not whole characters are never used inside of an expression.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from posttrain.rollout.engines.protocol import Decode, SamplingParams

BROKEN = "\ufffd"


class Grammar:
    """The automaton of one expression over one vocabulary."""

    def __init__(self, params: SamplingParams, decode: Decode | None, vocabulary: int) -> None:
        if decode is None:
            raise ValueError(
                "Sampling: `regex` needs an engine with a detokeniser. Hand it one: `decode=tokenizer.decode`."
            )
        if not params.stop_ids:
            raise ValueError("Sampling: `regex` needs a stop id, for the end of what matches. Give `stop_ids`.")
        self._outlines = _outlines_core()
        self._stop_ids = list(params.stop_ids)
        self._vocabulary = vocabulary
        texts = token_texts(decode, vocabulary, frozenset(params.stop_ids))
        self._index = self._outlines.Index(params.regex, self._outlines.Vocabulary(params.stop_ids[0], texts))

    def reader(self) -> GrammarReader:
        """One for each completion."""
        return GrammarReader(self._outlines.Guide(self._index), self._stop_ids, self._vocabulary)


class GrammarReader:
    """Where one completion stands in the expression."""

    def __init__(self, guide: Any, stop_ids: list[int], vocabulary: int) -> None:
        self._guide, self._stop_ids, self._vocabulary = guide, stop_ids, vocabulary

    def allowed(self) -> Tensor:
        """(V,) bool: what may come next; the stop ids where the text matches, or where nothing else is left."""
        mask = torch.zeros(self._vocabulary, dtype=torch.bool)
        mask[self._guide.get_tokens()] = True
        if self._guide.is_finished() or not mask.any():
            mask[self._stop_ids] = True
        return mask

    def take(self, token: int) -> None:
        if token not in self._stop_ids:
            self._guide.advance(token)


def _outlines_core() -> Any:
    try:
        import outlines_core
    except ImportError as error:
        raise ValueError(
            "Sampling: `regex` needs the package outlines-core, which is not installed. `pip install outlines-core`, or "
            "leave `regex` out."
        ) from error
    return outlines_core


@functools.lru_cache(maxsize=4)
def token_texts(decode: Decode, vocabulary: int, without: frozenset[int]) -> dict[str, list[int]]:
    """Text -> the tokens that stand for it. Words keep their leading space, which a token decoded alone may lose."""
    known = next(token for token in range(vocabulary) if token not in without and decode([token]).isalnum())
    before = decode([known])
    texts: dict[str, list[int]] = {}
    for token in range(vocabulary):
        text = decode([known, token])[len(before) :]
        if token not in without and text and BROKEN not in text:
            texts.setdefault(text, []).append(token)
    return texts
