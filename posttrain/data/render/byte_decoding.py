"""Token ids -> text by a table, for tokenizers whose tokens are bytes.

A byte-level tokenizer (GPT-2 and most families since) writes every byte as one character, so that a text is the bytes of its
tokens, one after the other: five times as fast to look up and join as to ask the tokenizer. What a rollout costs the host is
mostly this. Any other tokenizer, and one that a trial finds to differ, is asked itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import ByteLevel

TRIALS, TRIAL_TOKENS = 64, 48


def text_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function of token ids: their text without special tokens, as `tokenizer.decode` gives it."""

    def asked(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.decoder, ByteLevel):
        return asked
    known = _bytes_of_tokens(backend)
    table = [known.get(number, b"") for number in range(max(known) + 1)]

    def looked_up(ids: Sequence[int]) -> str:
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            return b"".join([table[number] for number in numbers]).decode("utf-8", "replace")
        except IndexError:  # models have more rows than their tokenizer has tokens
            return asked(ids)

    return looked_up if _agree(asked, looked_up, sorted(known)) else asked


def _bytes_of_tokens(backend: Any) -> dict[int, bytes]:
    """By id. Special tokens have no text; a token with characters that stand for no byte is taken literally."""
    byte_of = _byte_of_character()
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    table = {}
    for token, number in backend.get_vocab(with_added_tokens=True).items():
        values = [byte_of.get(character) for character in token]
        table[number] = b"" if number in special else token.encode() if None in values else bytes(values)
    return table


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for the characters from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _agree(one: Callable[[list[int]], str], other: Callable[[list[int]], str], known: list[int]) -> bool:
    """On token ids drawn at random, which are seldom valid UTF-8 as a whole, and on every kind of token at the vocabulary's end."""
    draw = random.Random(0)
    trials = [draw.choices(known, k=TRIAL_TOKENS) for _ in range(TRIALS)]
    trials.append(known[-4 * TRIAL_TOKENS :])  # where added tokens are
    return all(one(ids) == other(ids) for ids in trials)
