"""Question: the parameters of a request, read with their types. A wrong one is named with what it should have been."""

from __future__ import annotations

import math
from collections.abc import Mapping

from posttrain.view.errors import ViewError


class Question:
    """Parameters by name. An absent or empty one is None."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self.words = {name: word for name, word in words.items() if word != ""}

    def text(self, name: str) -> str | None:
        return self.words.get(name)

    def number(self, name: str) -> float | None:
        word = self.words.get(name)
        if word is None:
            return None
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ViewError(f"{name}={word!r} is not a number.")
        return value

    def whole(self, name: str, default: int | None = None, most: int | None = None) -> int | None:
        """A whole number of at least 0."""
        value = self.number(name)
        if value is None:
            return default
        if value < 0 or value != int(value):
            raise ViewError(f"{name}={self.words[name]!r} is not a whole number of at least 0.")
        return int(value) if most is None else min(int(value), most)

    def needed_whole(self, name: str) -> int:
        value = self.whole(name)
        if value is None:
            raise ViewError(f"{name} is missing: a whole number.")
        return value

    def comma_separated(self, name: str) -> list[str]:
        """Words with commas between them."""
        return [word for word in (self.words.get(name) or "").split(",") if word]
