"""Texts -> token ids, each distinct word encoded once.

Most tokenizers cut a text into words before they look for merges, and a word's ids do not depend on its neighbours. Then
the ids of a text are those of its words, one after the other, and a word that was met before costs one look-up instead of
one pass through the tokenizer. Words are cut before a space, and after the end of a line, where a visible character
follows; an empty line belongs to the word around it.

Whether a tokenizer is of this kind is not believed but tried: its parts must be of types that work word by word, and cuts
between all pairs of characters of many classes, with all sorts of white space between them, must not change the ids.
Otherwise (and for few texts) the tokenizer encodes whole texts itself. The ids are the same in either case.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import processors
from tokenizers.models import BPE

logger = logging.getLogger(__name__)

Span = tuple[int, int]
ITEM = 4  # bytes of an id
FEW_TEXTS = 64  # not worth the trial
MOST_WORDS = 400_000  # some 60 MB; then it starts anew
ENDS_ONLY = (type(None), processors.ByteLevel, processors.TemplateProcessing)
WORD_BY_WORD = ("ByteLevel", "Digits", "Split")
LONE_SPACE = r"(?<=\S) \S"
ENDS = (*"aZ5.'_<é中½😀", "\u0301", "'s", "'LL", "12345", "...", "!?")
SPACES = ("", " ", "  ", "\n", "\n\n", "\n  ", "\t", "\r\n")


class WordEncoder:
    """Encodes with one tokenizer's backend (see `special_tokens.whole_texts`), remembering words."""

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}  # word -> its ids as int32
        self._cut: Callable[[str], list[str]] = list  # a text's words
        self._made_for: Any = None
        self._can_cut = False

    def encode(self, backend: Any, texts: list[str], add_special_tokens: bool = False) -> list[np.ndarray]:
        """Ids of each text, with what the tokenizer puts around a text where that is asked for."""
        if not self.can_cut(backend, len(texts)):
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
        before, after = _around(backend) if add_special_tokens else (b"", b"")
        cut = list(map(self._cut, texts))
        self._learn(backend, cut)
        word = self._words.__getitem__
        ids = [np.frombuffer(before + b"".join(map(word, words)) + after, dtype=np.int32) for words in cut]
        if self._is_right(backend, texts, ids, add_special_tokens):
            return ids
        self._can_cut = False  # the trial missed something that this dataset holds
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

    def _learn(self, backend: Any, cut: list[list[str]]) -> None:
        """Encode the words that were never met."""
        known = self._words
        if len(known) > MOST_WORDS:
            known.clear()
        unseen = list(set(itertools.chain.from_iterable(cut)) - known.keys())
        encodings = backend.encode_batch_fast(unseen, add_special_tokens=False)
        known.update(zip(unseen, (_packed(encoding.ids) for encoding in encodings)))

    def can_cut(self, backend: Any, num_texts: int) -> bool:
        """Tried once for a backend; tokens that were added to it, or another treatment of control tokens, count as another."""
        if num_texts < FEW_TEXTS:
            return False
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        state = (id(backend), backend.encode_special_tokens, added)
        if state != self._made_for:
            self._words.clear()
            self._made_for = state
            self._can_cut = works_word_by_word(backend) and self._find_cuts(backend, added)
        return self._can_cut

    def _find_cuts(self, backend: Any, added: list[str]) -> bool:
        """The finest way to cut that changes nothing: many cuts, or only at lone spaces."""
        for before_space in (after_any_space(added), LONE_SPACE):
            self._cut = words_between(before_space).findall
            if cuts_change_nothing(backend, self._cut, added):
                return True
        return False

    def trained(self, backend: Any, text: str, spans: list[Span]) -> np.ndarray:
        """The mask of tokens that hold a character of a span (see `trained_tokens`), for a text that was just encoded."""
        words = self._cut(text)
        tokens = list(itertools.accumulate((len(self._words[word]) // ITEM for word in words), initial=0))
        places = list(itertools.accumulate(map(len, words), initial=0))
        trained = np.zeros(tokens[-1], dtype=bool)
        for start, end in spans:
            first, last = bisect_right(places, start) - 1, bisect_left(places, end) - 1  # words of the two edges
            head = tail = 0  # tokens of these words that lie outside, and inside
            if places[first] < start < places[-1]:
                head = _before_span(backend.encode(words[first], add_special_tokens=False), start - places[first])
            if last >= 0:
                inside = end - places[last]
                if inside >= len(words[last]):
                    tail = tokens[last + 1] - tokens[last]
                else:
                    tail = _up_to_end(backend.encode(words[last], add_special_tokens=False), inside)
            trained[tokens[first] + head : tokens[max(last, 0)] + tail] = True
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


def works_word_by_word(backend: Any) -> bool:
    """Whether all parts of a tokenizer are of a kind whose result for a word is the word's alone."""
    splitters = _parts(backend.pre_tokenizer, "pretokenizers")
    return (
        isinstance(backend.model, BPE)
        and not backend.model.dropout
        and all(part["type"] == "NFC" for part in _parts(backend.normalizer, "normalizers"))
        and type(backend.post_processor) in ENDS_ONLY
        and bool(splitters)
        and all(part["type"] in WORD_BY_WORD and not part.get("add_prefix_space") for part in splitters)
        and not any(map(_reaches_out, backend.get_added_tokens_decoder().values()))
    )


def _packed(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def _around(backend: Any) -> tuple[bytes, bytes]:
    """Ids before and after a text, such as its beginning-of-sequence token."""
    bare, whole = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
    return _packed(whole[:start]), _packed(whole[start + len(bare) :])


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The state of a normaliser or splitter, or of each if it is a sequence of them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[key] if state["type"] == "Sequence" else [state]


def _reaches_out(token: Any) -> bool:
    """An added token that swallows the space beside it, wants to be a word of its own, or holds a space itself."""
    return token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content) is not None


def after_any_space(added_tokens: list[str]) -> str:
    """A space before anything visible. White space before an added token is the end of a text to the tokenizer: where one may
    begin, the space must stand alone."""
    firsts = re.escape("".join({token[0] for token in added_tokens if token}))
    return rf" [^\s{firsts}]|{LONE_SPACE}"


def words_between(before_space: str) -> re.Pattern[str]:
    r"""Matches words: a character, then all up to the next cut. Every character of a text is in one word.

    Cuts are where `before_space` matches, and between "x\n" and "x", where x is visible.
    """
    return re.compile(rf"(?s:.)\S*(?:(?!{before_space})\s(?!(?<=\S\n)\S)\S*)*\n?")


def cuts_change_nothing(backend: Any, cut: Callable[[str], list[str]], added_tokens: list[str]) -> bool:
    """Whether texts around every kind of cut have the ids of their words."""
    ends = (*ENDS, *added_tokens[:3])
    trials = [f"{a}{space} {b}" for a in ends for b in ends for space in SPACES]
    trials += [f"{a}\n{b}" for a in ends for b in ends]
    parts = list(map(cut, trials))
    words = sorted(set(itertools.chain.from_iterable(parts)))
    known = dict(zip(words, (one.ids for one in backend.encode_batch_fast(words, add_special_tokens=False))))
    wholes = backend.encode_batch_fast(trials, add_special_tokens=False)
    return all(
        whole.ids == list(itertools.chain.from_iterable(map(known.get, one))) for whole, one in zip(wholes, parts)
    )
