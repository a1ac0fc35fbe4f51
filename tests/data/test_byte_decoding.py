"""Texts from a table of bytes are those that the tokenizer gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from posttrain.data.render.byte_decoding import text_decoder
from tests.data.tiny_tokenizers import KINDS, kind

BYTE_LEVEL = ("byte_level", "with_plain_added_tokens", "many_reserved")


@pytest.mark.parametrize("name", KINDS)
def test_only_tokens_that_are_bytes_are_looked_up(name):
    assert text_decoder(kind(name)).__name__ == ("looked_up" if name in BYTE_LEVEL else "asked")


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_tokenizers_text(name, data):
    tokenizer = kind(name)
    decode = _decoder(name)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=40))
    assert decode(np.array(ids, dtype=np.int32)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_real_text_with_every_kind_of_character_comes_back():
    tokenizer = kind("with_plain_added_tokens")
    text = "Ä 你好 🙂 <think> a\tb\n</think>\x00 ÿ"
    assert text_decoder(tokenizer)(tokenizer(text)["input_ids"]) == text


def test_an_added_token_with_a_space_is_taken_literally():
    tokenizer = KINDS["byte_level"]()
    tokenizer.add_tokens([AddedToken("a b", normalized=False, special=False)])
    ids = tokenizer("x a b y")["input_ids"]
    assert text_decoder(tokenizer)(ids) == tokenizer.decode(ids, skip_special_tokens=True) == "x a b y"


def test_a_tokenizer_that_changes_its_texts_is_asked():
    class Shouting(type(kind("byte_level"))):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs).upper()

    plain = KINDS["byte_level"]()
    tokenizer = Shouting(tokenizer_object=plain.backend_tokenizer)
    ids = tokenizer("Hello there")["input_ids"]
    assert text_decoder(tokenizer)(ids) == "HELLO THERE"


_decoders = {}


def _decoder(name):
    return _decoders.setdefault(name, text_decoder(kind(name)))
