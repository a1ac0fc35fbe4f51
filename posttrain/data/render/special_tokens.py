"""Control tokens: which ids a tokenizer marks special, where their texts stand, and how to encode text without them.

The text of a control token inside message content must become ordinary tokens. Splitting the text around it and gluing ids
together would change the neighbours (prefix spaces, merges), so the whole text is encoded in one go by a second tokenizer
that differs from the first in one respect only: each control token answers to an alias of private-use characters instead of
to its usual text. The caller writes the alias where the *template* put a control token; everything else is plain text, and
can give no control id whatever it says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from posttrain.core.vision import VisionFamily

FEW_CONTROL_TOKENS = 64
ALIAS_BASE = 0xF0000  # plane 15 of Unicode: private use; the marks of provenance live in plane 16
ODD_CHARACTERS = "\u0378 \U00013000 \U000e0fff"  # unassigned, a hieroglyph, unassigned


class ControlTokens:
    """The special tokens of one tokenizer: everything in `all_special_ids` and every added token with `special=True`.

    `ids` leaves out the unknown token where the tokenizer's model gives it for characters it cannot spell: that id says
    "unknown character", and no text of a message can be kept from producing it. The placeholders and markers of a family of
    vision-language models are control tokens whatever the tokenizer says: in a message they would refer to no image.
    """

    def __init__(self, tokenizer: Any, family: VisionFamily | None = None) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        special = {text for text, is_special in added.items() if is_special} | set(tokenizer.all_special_tokens)
        self.image_mark = family.written if family else ""  # what a template writes for an image
        special |= added.keys() & ({family.written, family.placeholder, *family.markers} if family else set())
        self.texts: list[str] = sorted((text for text in special if text), key=lambda text: (-len(text), text))
        self.unknown = self._unknown_text()
        self.ids: frozenset[int] = frozenset(
            tokenizer.convert_tokens_to_ids(text) for text in self.texts if text != self.unknown
        )
        self._find = _any_of(self.texts)
        self._find_starts = re.compile(f"(?={self._find.pattern})")
        self._find_added = _any_of(sorted({*self.texts, *added}, key=lambda text: -len(text)))
        self._beginnings = tuple({text[:size] for text in self.texts for size in range(1, len(text))})
        self._first_characters = re.compile("[" + re.escape("".join({text[0] for text in self.texts})) + "]|(?!)")
        self._longest = max(map(len, self.texts), default=0)

    def _unknown_text(self) -> str | None:
        """The unknown token, if the tokenizer gives it for characters it cannot spell; byte-level ones spell any."""
        unknown = self._tokenizer.unk_token
        with whole_texts(self._tokenizer) as backend:
            ids = backend.encode(ODD_CHARACTERS, add_special_tokens=False).ids
        return unknown if unknown is not None and self._tokenizer.convert_tokens_to_ids(unknown) in ids else None

    def occurs_in(self, text: str) -> bool:
        return self._find.search(text) is not None

    def may_arise_from(self, text: str) -> bool:
        """Whether `text` holds a control token, or ends in the beginning of one that the text after it could complete."""
        if self._find.search(text):
            return True
        ending = text[-self._longest :]
        return self._first_characters.search(ending) is not None and text.endswith(self._beginnings)

    def find(self, text: str) -> list[tuple[int, int]]:
        """Leftmost-longest places of control tokens in `text`, as a tokenizer matches them."""
        return [match.span() for match in self._find.finditer(text)]

    def find_starts(self, text: str) -> list[int]:
        """Every place where a control token begins, overlapping ones included."""
        return [match.start() for match in self._find_starts.finditer(text)]

    def find_added(self, text: str) -> list[tuple[int, int]]:
        """Places of all added tokens, special or not."""
        return [match.span() for match in self._find_added.finditer(text)]

    def count_ids(self, ids: Any) -> int:
        """How many of the ids are control tokens."""
        return int(np.count_nonzero(self._is_control[ids])) if len(ids) else 0

    @cached_property
    def _is_control(self) -> np.ndarray:
        """By id; tokens may be added after this was made, but none that was a control token then."""
        flags = np.zeros(max(len(self._tokenizer), *self.ids, 0) + 1, dtype=bool)
        flags[list(self.ids)] = True
        return flags

    def with_aliases(self, text: str, owned: list[tuple[int, int]]) -> str:
        """`text` with the control tokens at `owned` written as their aliases, which are as long as the tokens."""
        parts, position = [], 0
        for start, end in owned:
            parts += [text[position:start], self._aliases[text[start:end]]]
            position = end
        return "".join(parts) + text[position:]

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return {text: chr(ALIAS_BASE + number) * len(text) for number, text in enumerate(self.texts)}

    @cached_property
    def literal_backend(self) -> Tokenizer:
        """The tokenizer to whose eyes no text is a control token except the aliases. Made once, when first needed."""
        text = self._backend.to_str()
        return self._renamed_in_text(text) or self._renamed_in_full(json.loads(text))

    def _renamed_in_text(self, text: str) -> Tokenizer | None:
        """With the vocabulary, which is most of the text, edited as text: parsing it takes half a second. None where that fails."""
        before_model, key, model = text.partition('"model":')
        try:
            state = json.loads(before_model + '"model":null}')
        except ValueError:  # a token is called "model":
            return None
        if not key or len(self._aliases) > FEW_CONTROL_TOKENS:
            return None
        for token, alias in self._aliases.items():
            model = model.replace(json.dumps(token, ensure_ascii=False), json.dumps(alias, ensure_ascii=False))
        self._without_ends(state)
        before_model = json.dumps(state, ensure_ascii=False).removesuffix("null}")
        renamed = Tokenizer.from_str(before_model + model)
        same = all(renamed.token_to_id(alias) == self._backend.token_to_id(t) for t, alias in self._aliases.items())
        return renamed if same and not any(renamed.token_to_id(token) for token in self._aliases) else None

    def _renamed_in_full(self, state: dict[str, Any]) -> Tokenizer:
        self._without_ends(state)
        model = state["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._aliases.get(text, text): number for text, number in vocabulary.items()}
        else:
            model["vocab"] = [[self._aliases.get(text, text), score] for text, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = self._aliases.get(model["unk_token"], model["unk_token"])
        return Tokenizer.from_str(json.dumps(state))

    def _without_ends(self, state: dict[str, Any]) -> None:
        state["added_tokens"] = [self._renamed_token(token) for token in state["added_tokens"]]
        state["truncation"] = state["padding"] = state["post_processor"] = None

    def _renamed_token(self, token: dict[str, Any]) -> dict[str, Any]:
        if token["content"] not in self._aliases:
            return token
        return token | {"content": self._aliases[token["content"]], "special": False, "normalized": False}


def _any_of(texts: list[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the earliest in the list first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


@contextmanager
def whole_texts(tokenizer: Any) -> Iterator[Tokenizer]:
    """The tokenizer's backend without truncation and padding, both put back afterwards.

    transformers sets them before each of its own calls, so what a backend holds is what the last call happened to ask for.
    """
    backend: Tokenizer = tokenizer.backend_tokenizer
    truncation, padding, literal = backend.truncation, backend.padding, backend.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    try:
        yield backend
    finally:
        backend.encode_special_tokens = literal
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
