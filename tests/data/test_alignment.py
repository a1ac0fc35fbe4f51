"""Two tokenisations of one text, aligned by bytes."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from posttrain.data.alignment import align
from posttrain.data.render.byte_decoding import bytes_of_tokens
from tests import tiny

SCRIPTS = {
    "latin": (0x20, 0x17F),
    "greek": (0x370, 0x3FF),
    "devanagari": (0x904, 0x939),
    "arabic": (0x621, 0x64A),
    "han": (0x4E00, 0x4FFF),
    "emoji": (0x1F300, 0x1F5FF),
}


def random_text(script: str, dice: random.Random) -> str:
    """Words of the script, sometimes with words of another; spaces, line breaks and digits as they come."""
    low, high = SCRIPTS[script]
    letters = [chr(code) for code in range(low, high + 1) if chr(code).isprintable()]
    words = ["".join(dice.choices(letters, k=dice.randint(1, 7))) for _ in range(dice.randint(1, 8))]
    return dice.choice(["", " "]) + dice.choice([" ", "\n", "  ", " 12, "]).join(words) + dice.choice(["", "\n", " "])


@pytest.fixture(scope="module")
def tokenizers():
    """A token for each byte; byte-level merges of two sizes; SentencePiece's two models, with single bytes for what is unknown."""
    dice = random.Random(1)
    corpus = [random_text(script, dice) for script in SCRIPTS for _ in range(150)]
    made = {"bytes": tiny.tokenizer(None)}
    for size in (400, 1200):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=size > 1000)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            corpus, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        )
        made[f"merges {size}"] = PreTrainedTokenizerFast(tokenizer_object=backend)
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    known = [random_text(script, dice) for script in ("latin", "greek") for _ in range(150)]  # other scripts: by bytes
    trained.train_from_iterator(known, trainers.UnigramTrainer(vocab_size=700, show_progress=False))
    learned = [("<unk>", 0.0), *((piece, -2.0 - len(piece) / 10) for piece in sorted(trained.get_vocab()))]
    learned += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram(learned, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    made["pieces"] = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    return made


@pytest.mark.parametrize("texts", [720, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_byte_of_random_texts_is_in_exactly_one_group_of_both_sides(tokenizers, texts):
    """In 6 scripts, and the 6 pairs of 4 kinds of tokenizers."""
    dice, tables = random.Random(2), {name: bytes_of_tokens(one) for name, one in tokenizers.items()}
    pairs = list(itertools.combinations(tokenizers, 2))
    assert len(pairs) == 6
    for number in range(texts):
        text = random_text(list(SCRIPTS)[number % 6], dice)
        names = pairs[number // 6 % 6]
        sides = []
        for name in names:
            ids = tokenizers[name](text, add_special_tokens=False)["input_ids"]
            sides.append([tables[name][token] for token in ids])
        found = align(*sides)
        assert found.is_whole, (names, text)
        assert b"".join(group.text for group in found.groups).strip(b" ") == text.encode().strip(b" "), (names, text)
        for side, pieces in enumerate(sides):
            spans = [(group.student, group.teacher)[side] for group in found.groups]
            assert [span[0] for span in spans[1:]] == [span[1] for span in spans[:-1]]  # no gap, no overlap
            assert (spans[0][0], spans[-1][1]) == (0, len(pieces))
            for (first, last), group in zip(spans, found.groups):
                assert b"".join(pieces[first:last]).endswith(group.text)  # the first group may have a space before it


def test_hand_worked():
    found = align([b"un", b"believ", b"able"], [b"unbel", b"iev", b"able"])
    assert [(one.student, one.teacher, one.text) for one in found.groups] == [
        ((0, 2), (0, 2), b"unbeliev"),
        ((2, 3), (2, 3), b"able"),
    ]
    assert found.boundaries == [(0, 0), (2, 2)]
    assert found.is_whole


def test_what_is_not_the_same_text_is_in_no_group():
    cut = align([b"caf", b"\xc3"], [b"ca", b"f", b"\xef\xbf\xbd"])  # half a character, and what a decoder shows for it
    assert [(one.student, one.teacher) for one in cut.groups] == [((0, 1), (0, 2))]
    assert not cut.is_whole
    assert align([b"a"], [b"b"]).groups == ()
    assert align([], []).is_whole
    longer = align([b"one", b" two"], [b"one", b" two", b" three"])
    assert len(longer.groups) == 2
    assert not longer.is_whole


def test_a_space_before_the_text_and_tokens_without_bytes():
    space = align([b"Hello", b" you"], [b" Hel", b"lo", b" you"])
    assert space.boundaries == [(0, 0), (1, 2)]
    assert space.is_whole
    special = align([b"", b"a", b"", b"b"], [b"ab"])
    assert special.groups[0].student == (0, 4)
    between = align([b"a", b"", b"b"], [b"a", b"b"])
    assert between.boundaries == [(0, 0), (1, 1)]  # behind the same text, whatever comes next


@given(st.lists(st.binary(max_size=4)), st.randoms())
def test_any_two_cuts_of_the_same_bytes_align_whole(pieces, dice):
    text = b"".join(pieces)
    cuts = sorted(dice.choices(range(len(text) + 1), k=5)) if text else []
    other = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    found = align(pieces, other)
    assert b"".join(group.text for group in found.groups) == text
    assert all(first < last for group in found.groups for first, last in (group.student, group.teacher))


def test_tokens_that_are_no_pieces_of_text_are_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="are not the bytes of a text one after the other"):
        bytes_of_tokens(PreTrainedTokenizerFast(tokenizer_object=backend))
