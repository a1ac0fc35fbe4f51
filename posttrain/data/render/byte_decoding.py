"""The bytes of tokens; token ids -> text by a table, for tokenizers whose tokens are bytes.

A byte-level tokenizer (GPT-2 and most families since) writes every byte as one character, so that a text is the bytes of its
tokens, one after the other: five times as fast to look up and join as to ask the tokenizer. What a rollout costs the host is
mostly this. Any other tokenizer, and one that a trial finds to differ, is asked itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import ByteLevel

TRIALS, TRIAL_TOKENS = 64, 48
LOW_LINE = "\N{LOWER ONE EIGHTH BLOCK}"
SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")


def text_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function of token ids: their text without special tokens, as `tokenizer.decode` gives it."""

    def asked(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.decoder, ByteLevel):
        return asked
    known = bytes_of_tokens(tokenizer)
    table = [known.get(number, b"") for number in range(max(known) + 1)]

    def looked_up(ids: Sequence[int]) -> str:
        numbers = ids.tolist() if hasattr(ids, "tolist") else ids
        try:
            return b"".join([table[number] for number in numbers]).decode("utf-8", "replace")
        except IndexError:  # models have more rows than their tokenizer has tokens
            return asked(ids)

    return looked_up if _agree(asked, looked_up, sorted(known)) else asked


def bytes_of_tokens(tokenizer: Any) -> dict[int, bytes]:
    """By id, where the text of some tokens is the bytes of each, one after the other. Special tokens have no text.

    A token of a byte-level tokenizer with characters that stand for no byte is taken literally. Tokens of SentencePiece write a
    space as a low line of its own, and single bytes as <0x0A>.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else str(backend.decoder)
    if "ByteLevel" in decoder:
        byte_of = _byte_of_character()

        def read(token: str) -> bytes:
            values = [byte_of.get(character) for character in token]
            return token.encode() if None in values else bytes(values)

    elif "Metaspace" in decoder or LOW_LINE in decoder:

        def read(token: str) -> bytes:
            single = SINGLE_BYTE.fullmatch(token)
            return bytes([int(single[1], 16)]) if single else token.replace(LOW_LINE, " ").encode()

    else:
        raise ValueError(
            f"The tokens of {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__} are not the bytes of a text one "
            "after the other: its tokenizer must be a byte-level or SentencePiece one of the `tokenizers` library."
        )
    added = backend.get_added_tokens_decoder()
    table = {number: read(token) for token, number in backend.get_vocab(with_added_tokens=False).items()}
    return table | {number: b"" if token.special else token.content.encode() for number, token in added.items()}


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
