"""The beginning that two answers share, which is the prompt of a pair that has no prompt of its own."""

from __future__ import annotations

import unicodedata
from typing import Any


def split_shared_text(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """(prompt, chosen, rejected): the beginning that both share, cut where a word ends; None when there is none.

    A single space at the cut goes to the answers, as tokenizers join it to the word that follows. Both answers keep
    at least one word, also when one text is the beginning of the other.
    """
    shared = _shared_length(chosen, rejected)
    limit = min(shared, len(chosen.rstrip()) - 1, len(rejected.rstrip()) - 1)
    for cut in range(limit, 0, -1):
        if _is_word_end(chosen, cut) and _is_word_end(rejected, cut):
            if chosen[cut - 1] == " ":
                cut -= 1
            if not chosen[:cut].strip():
                return None
            return chosen[:cut], chosen[cut:], rejected[cut:]
    return None


def _shared_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection on slices compares at the speed of memcmp
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def _is_word_end(text: str, cut: int) -> bool:
    """Whether a new word, or something that is not a word, begins at `cut`."""
    before, after = text[cut - 1], text[cut]
    if unicodedata.combining(after) or after in "\u200d\ufe0f" or before == "\u200d":
        return False  # the character before is not finished
    if before in "'’" and after.isalpha():
        return False
    is_east_asian = ord(after) >= 0x2E80 and ord(before) >= 0x2E80  # scripts without spaces between words
    return is_east_asian or not (before.isalnum() and (after.isalnum() or after in "'’"))


def split_shared_turns(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(prompt, chosen, rejected): the turns that both share, leaving at least one turn to each side."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]
