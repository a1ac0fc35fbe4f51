"""TokenText: the text of each token on its own, from the tokenizer that a run keeps beside its weights."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"


class TokenText:
    """Ids -> one piece of text for each. A character of several tokens stands with the last of them."""

    def __init__(self, tokenizer: Path | Tokenizer) -> None:
        self.path = tokenizer if isinstance(tokenizer, Path) else None
        self._tokenizer = tokenizer if self.path is None else Tokenizer.from_file(str(tokenizer))
        self._is_bytes = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._byte_of = byte_of_character()
        self._bytes: dict[int, bytes] = {}

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self._pieces_of_bytes(ids) if self._is_bytes else self._pieces_of_stream(ids)

    def text(self, ids: Sequence[int]) -> str:
        """All of it with its control tokens, as the model saw it."""
        return "".join(self.pieces(ids))

    def _pieces_of_bytes(self, ids: Sequence[int]) -> list[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [decoder.decode(self._bytes_of(number)) for number in ids]
        if pieces:
            pieces[-1] += decoder.decode(b"", final=True)
        return pieces

    def _pieces_of_stream(self, ids: Sequence[int]) -> list[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, number) or "" for number in ids]

    def _bytes_of(self, number: int) -> bytes:
        if number not in self._bytes:
            token = self._tokenizer.id_to_token(number)
            if token is None:  # models have more rows than their tokenizer has tokens
                token = f"<{number}>"
            values = [self._byte_of.get(character) for character in token]
            is_added = number in self._tokenizer.get_added_tokens_decoder()
            self._bytes[number] = token.encode() if is_added or None in values else bytes(values)  # type: ignore[arg-type]
        return self._bytes[number]


def byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level tokenizers: bytes that print are themselves, the others take the characters from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printing = {character: ord(character) for character in alphabet if ord(character) < 256}
    others = sorted(set(range(256)) - set(printing.values()))
    return printing | dict(zip((character for character in alphabet if ord(character) >= 256), others))


def numbered(ids: Sequence[int]) -> list[str]:
    """Where there is no tokenizer: the ids themselves."""
    return [f"{number} " for number in ids]
