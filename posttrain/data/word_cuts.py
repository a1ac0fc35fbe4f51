"""Where a text may be cut without changing its token ids: into words, and words into parts.

Most tokenizers cut a text into pieces before they look for merges, and a piece's ids do not depend on its neighbours. Words
are cut at a space before something visible, parts where letters end (and, if the tokenizer allows it, where they begin) and
around added tokens. Words are few and quick to find, parts are seldom new: a text is looked up by words, a new word by parts.

Whether a tokenizer is of this kind is not believed but tried: its components must be of types that work piece by piece, and
cuts between all pairs of characters of many classes, with all sorts of white space between them, must not change the ids
(see word_encoding, which tries the ways to cut that are listed here).
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tokenizers import processors
from tokenizers.models import BPE

ENDS_ONLY = (type(None), processors.ByteLevel, processors.TemplateProcessing)
PIECE_BY_PIECE = ("ByteLevel", "Digits", "Split")
LONE_SPACE = r" (?<=\S )(?=\S)"
ENDS = (*"aZ5.'_<é中½😀", "\u0301", "'s", "'LL", "12345", "...", "!?")
SPACES = ("", " ", "  ", "\n", "\n\n", "\n  ", "\t", "\r\n")
NOTHING = "(?!)"

BETWEEN = "\x00"  # between words that are cut into parts together; a part of its own
ITEM = 4  # bytes of an id
BETWEEN_IDS = b"\xff" * ITEM  # no id has a byte above 0x7f at its end, so these bytes are found nowhere else
PARTS_PER_TEXT = 100

# Parts of ASCII words. No cut touches an apostrophe: "'s" is a piece to some tokenizers, a part of the word before it to others.
SPACE = r"[ \t-\r]*"  # Python's \s has four characters more
RUN = r"[a-zA-Z]+|[^a-zA-Z' \t-\r\x00]+"
AROUND_LETTERS = rf"{SPACE}(?:{RUN})(?:'(?:{RUN})?)*|{SPACE}(?:'(?:{RUN})?)+|[ \t-\r]+|\x00"
AFTER_LETTERS = r"[^a-zA-Z\x00]*[a-zA-Z]+(?:'[^a-zA-Z\x00]*[a-zA-Z]*)*|[^a-zA-Z\x00]+|\x00"
WHOLE = r"[^\x00]+|\x00"


class TextCutter:
    """Cuts texts into words and words into parts, and encodes parts.

    `words` gives what stands between the spaces at which it cuts: each word but the first has such a space before it.
    """

    def __init__(self, backend: Any, space: str, parts: str) -> None:
        """`space` matches the spaces to cut at; `parts` matches the parts of words without added tokens."""
        added = backend.get_added_tokens_decoder().values()
        literal = backend.encode_special_tokens
        # The tokenizer looks for these first, in the text as it is, and cuts around them; for the rest after normalising it.
        first = [token.content for token in added if not token.normalized and not (token.special and literal)]
        others = [token.content for token in added if token.content not in first]
        self._backend, self._added = backend, first
        self.words: Callable[[str], list[str]] = re.compile(space).split
        self._around_added = re.compile(f"({_any_of(first)})").split
        self._holds_others = re.compile(_any_of(others)).search if others else None
        self._parts = re.compile(parts).findall

    def has_parts(self, word: str) -> bool:
        """Characters beyond ASCII may be letters or belong to some; such words stay whole."""
        is_plain = word.isascii() and BETWEEN not in word
        return is_plain and (self._holds_others is None or self._holds_others(word) is None)

    def parts(self, words: list[str]) -> list[str]:
        """The parts of all the words, which must have some, with `BETWEEN` between two words."""
        texts = self._around_added(BETWEEN.join(words))  # every second one is an added token
        parts = self._parts(texts[0])
        for token, text in zip(texts[1::2], texts[2::2]):
            parts.append(token)
            parts += self._parts(text)
        return parts

    def known_parts(self) -> dict[str, bytes]:
        """Parts that `encode` does not take."""
        return {BETWEEN: BETWEEN_IDS, **dict(zip(self._added, packed_ids(self._backend, self._added)))}

    def encode(self, parts: list[str]) -> list[bytes]:
        """Ids of parts that are no added tokens, as int32.

        Many parts in one text, an added token between any two, cost less than a text for each: the tokenizer cuts there first.
        """
        if not self._added or not parts:
            return packed_ids(self._backend, parts)
        separator = self._added[0]
        number = self._backend.token_to_id(separator)
        texts = [separator.join(parts[i : i + PARTS_PER_TEXT]) for i in range(0, len(parts), PARTS_PER_TEXT)]
        ids: list[int] = []
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            ids += encoding.ids
            ids.append(number)
        flat = np.array(ids[:-1], dtype=np.int32)
        flat[flat == number] = -1
        found = flat.tobytes().split(BETWEEN_IDS)
        return found if len(found) == len(parts) else packed_ids(self._backend, parts)


def packed_ids(backend: Any, texts: list[str]) -> list[bytes]:
    """Ids of each text as int32."""
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [array("i", encoding.ids).tobytes() for encoding in encodings]


def ways_to_cut(backend: Any) -> Iterator[TextCutter]:
    """From the finest to the coarsest; none if the tokenizer does not work piece by piece."""
    if works_piece_by_piece(backend):
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        for space in (before_anything(added), LONE_SPACE):
            for parts in (AROUND_LETTERS, AFTER_LETTERS, WHOLE):
                yield TextCutter(backend, space, parts)


def trial_texts(backend: Any) -> list[str]:
    """Texts around every kind of cut."""
    ends = (*ENDS, *[token.content for token in backend.get_added_tokens_decoder().values()][:3])
    pairs = list(itertools.product(ends, ends))
    trials = [f"{a}{space} {b}" for a, b in pairs for space in SPACES]
    return trials + [f"{a}\n{b}" for a, b in pairs] + [f"x{a}{b}x" for a, b in pairs]


def before_anything(added_tokens: list[str]) -> str:
    """A space before anything visible. White space before an added token is the end of a text to the tokenizer: where one may
    begin, the space must stand alone."""
    firsts = re.escape("".join({token[0] for token in added_tokens if token}))
    return rf" (?:(?=[^\s{firsts}])|(?<=\S )(?=\S))"


def works_piece_by_piece(backend: Any) -> bool:
    """Whether all components of a tokenizer are of a kind whose result for a piece is the piece's alone."""
    splitters = _components(backend.pre_tokenizer, "pretokenizers")
    return (
        isinstance(backend.model, BPE)
        and not backend.model.dropout
        and all(part["type"] == "NFC" for part in _components(backend.normalizer, "normalizers"))
        and type(backend.post_processor) in ENDS_ONLY
        and bool(splitters)
        and all(part["type"] in PIECE_BY_PIECE and not part.get("add_prefix_space") for part in splitters)
        and not any(map(_reaches_out, backend.get_added_tokens_decoder().values()))
    )


def _components(component: Any, key: str) -> list[dict[str, Any]]:
    """The state of a normaliser or splitter, or of each if it is a sequence of them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[key] if state["type"] == "Sequence" else [state]


def _reaches_out(token: Any) -> bool:
    """An added token that swallows the space beside it, wants to be a word of its own, or holds a space itself."""
    return token.lstrip or token.rstrip or token.single_word or re.search(r"\s", token.content) is not None


def _any_of(texts: list[str]) -> str:
    """Matches any of `texts`, the longest first, as the tokenizer does."""
    return "|".join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or NOTHING
