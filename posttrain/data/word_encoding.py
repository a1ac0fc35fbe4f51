"""Texts -> token ids, each distinct word encoded once.

Where a tokenizer works piece by piece (see word_cuts), the ids of a text are those of its words, one after the other, and a
word that was met before costs one look-up instead of one pass through the tokenizer. A new word is put together from its
parts, most of which were met in other words. Otherwise (and for few texts) the tokenizer encodes whole texts itself. The ids
are the same in either case.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from posttrain.data.word_cuts import BETWEEN_IDS, ITEM, TextCutter, packed_ids, trial_texts, ways_to_cut

logger = logging.getLogger(__name__)

Span = tuple[int, int]
FEW_TEXTS = 64  # not worth the trial
MOST_BYTES = 100_000_000  # of remembered words, roughly; then it starts anew
BYTES_PER_WORD = 150  # of an entry, beside its characters


class WordEncoder:
    """Encodes with one tokenizer's backend (see `special_tokens.whole_texts`), remembering words."""

    def __init__(self) -> None:
        self._firsts: dict[str, bytes] = {}  # first word of a text -> its ids as int32
        self._words: dict[str, bytes] = {}  # word after a space -> ids of both
        self._parts: dict[str, bytes] = {}
        self._num_bytes = 0
        self._cutter: TextCutter | None = None
        self._made_for: Any = None

    def encode(self, backend: Any, texts: list[str], add_special_tokens: bool = False) -> list[np.ndarray]:
        """Ids of each text, with what the tokenizer puts around a text where that is asked for."""
        if not self.can_cut(backend, len(texts)):
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        before, after = _around(backend) if add_special_tokens else (b"", b"")
        ids = [np.frombuffer(before + one + after, dtype=np.int32) for one in self._ids(backend, texts)]
        if self._is_right(backend, texts, ids, add_special_tokens):
            return ids
        self._cutter = None  # the trial missed something that this dataset holds
        logger.warning(
            "This tokenizer looks beyond words after all: whole texts are encoded from here on. Texts before this one were encoded "
            "word by word, the longest of every batch checked; delete the dataset cache to encode them again."
        )
        return self.encode(backend, texts, add_special_tokens)

    @staticmethod
    def _is_right(backend: Any, texts: list[str], ids: list[np.ndarray], add_special_tokens: bool) -> bool:
        """One text of every call, its longest, is also encoded whole: what a trial of made-up texts cannot show, real ones do."""
        longest = max(range(len(texts)), key=lambda place: len(texts[place]))
        return backend.encode(texts[longest], add_special_tokens=add_special_tokens).ids == ids[longest].tolist()

    def _ids(self, backend: Any, texts: list[str]) -> Iterator[bytes]:
        """The ids of the words of each text."""
        if self._num_bytes > MOST_BYTES:
            self._forget()
        cut = list(map(self._cutter.words, texts))
        first_words = {words[0] for words in cut}
        self._learn(backend, self._firsts, "", first_words - self._firsts.keys())
        self._learn(backend, self._words, " ", set(itertools.chain.from_iterable(cut)) - self._words.keys())
        firsts, word = self._firsts, self._words.__getitem__
        return (firsts[words[0]] + b"".join(map(word, itertools.islice(words, 1, None))) for words in cut)

    def _learn(self, backend: Any, known: dict[str, bytes], before: str, unseen: set[str]) -> None:
        """Words that were never met, from their parts; parts that were never met, by the tokenizer."""
        cut = list(filter(self._cutter.has_parts, unseen))
        parts = self._cutter.parts([before + word for word in cut])
        new = list(set(parts).difference(self._parts))
        self._parts.update(zip(new, self._cutter.encode(new)))
        # One join and one split for all words together: several times as fast as word by word.
        known.update(zip(cut, b"".join(map(self._parts.__getitem__, parts)).split(BETWEEN_IDS)))
        whole = list(unseen.difference(cut))
        known.update(zip(whole, packed_ids(backend, [before + word for word in whole])))
        self._num_bytes += BYTES_PER_WORD * (len(unseen) + len(new)) + sum(map(len, unseen)) + sum(map(len, new))

    def _forget(self) -> None:
        self._firsts.clear()
        self._words.clear()
        self._parts = self._cutter.known_parts()
        self._num_bytes = 0

    def can_cut(self, backend: Any, num_texts: int = FEW_TEXTS) -> bool:
        """Tried once for a backend; tokens that were added to it, or another treatment of control tokens, count as another."""
        if num_texts < FEW_TEXTS:
            return False
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        state = (id(backend), backend.encode_special_tokens, added)
        if state != self._made_for:
            self._made_for = state
            self._find_cuts(backend)
        return self._cutter is not None

    def _find_cuts(self, backend: Any) -> None:
        """Take the finest way to cut that does not change the ids of the trial texts, or none."""
        trials = trial_texts(backend)
        wholes = packed_ids(backend, trials)
        for self._cutter in ways_to_cut(backend):
            self._forget()
            if list(self._ids(backend, trials)) == wholes:
                return
        self._cutter = None

    def trained(self, backend: Any, text: str, spans: list[Span]) -> np.ndarray:
        """The mask of tokens that hold a character of a span (see `trained_tokens`), for a text that was just encoded."""
        first, *rest = self._cutter.words(text)
        sizes = [len(self._firsts[first]), *map(len, map(self._words.__getitem__, rest))]
        tokens = [size // ITEM for size in itertools.accumulate(sizes, initial=0)]
        places = list(itertools.accumulate((len(first), *(len(word) + 1 for word in rest)), initial=0))
        trained = np.zeros(tokens[-1], dtype=bool)
        for start, end in spans:
            begin, last = bisect_right(places, start) - 1, bisect_left(places, end) - 1  # words of the two edges
            head = tail = 0  # tokens of these words that lie outside, and inside
            if places[begin] < start < places[-1]:
                word = text[places[begin] : places[begin + 1]]
                head = _before_span(backend.encode(word, add_special_tokens=False), start - places[begin])
            if last >= 0:
                word = text[places[last] : places[last + 1]]
                inside = end - places[last]
                if inside >= len(word):
                    tail = tokens[last + 1] - tokens[last]
                else:
                    tail = _up_to_end(backend.encode(word, add_special_tokens=False), inside)
            trained[tokens[begin] + head : tokens[max(last, 0)] + tail] = True
        return trained


def trained_tokens(encoding: Any, spans: list[Span]) -> np.ndarray:
    """The mask of tokens that hold at least one character of a span.

    A token across the edge of a span counts: the model has to produce it as a whole, and the prompt alone ends in other ids.
    """
    trained = np.zeros(len(encoding.ids), dtype=bool)
    for start, end in spans:
        trained[_before_span(encoding, start) : _up_to_end(encoding, end)] = True
    return trained


def _before_span(encoding: Any, start: int) -> int:
    """How many tokens end before a span does begin."""
    return bisect_right(range(len(encoding.ids)), start, key=lambda token: encoding.token_to_chars(token)[1])


def _up_to_end(encoding: Any, end: int) -> int:
    """How many tokens begin before a span ends. Byte-level tokenizers that trim offsets leave nothing of a space but its end."""

    def first_character(token: int) -> int:
        start, stop = encoding.token_to_chars(token)
        return start if start < stop else start - 1

    return bisect_left(range(len(encoding.ids)), end, key=first_character)


def _around(backend: Any) -> tuple[bytes, bytes]:
    """Ids before and after a text, such as its beginning-of-sequence token."""
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return array("i", whole[:start]).tobytes(), array("i", whole[start + len(bare) :]).tobytes()
