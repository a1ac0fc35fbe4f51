"""Words encoded once must give the ids and masks of whole texts, to the token; tokenizers that look beyond words are found out."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from posttrain.data.word_cuts import (
    AFTER_LETTERS,
    AROUND_LETTERS,
    BETWEEN,
    LONE_SPACE,
    WHOLE,
    TextCutter,
    before_anything,
)
from posttrain.data.word_encoding import FEW_TEXTS, WordEncoder, trained_tokens

PROSE = [
    (Path(__file__).resolve().parents[2] / name).read_text(encoding="utf-8")
    for name in ("README.md", "CONTRIBUTING.md")
]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


CUTTING = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen": split_by(QWEN),
    "llama3": split_by(LLAMA),
    "o200k": split_by(O200K),
}
REACHING = {
    "two words at once": split_by(r"\S+ \S+|\s+|\S+"),
    "whole lines": split_by(r"[^\n]+|\n"),
    "no splitter": None,
    "metaspace": pre_tokenizers.Metaspace(),
    "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
}


def made(splitter: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    if splitter is not None:
        backend.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        PROSE, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return backend


def odd_texts(seed: int, count: int = 600) -> list[str]:
    """Prose cut anywhere, and characters of all sorts in a row."""
    rng = random.Random(seed)
    pieces = [
        *"aZ9 .,'\n\t\r-_",
        "  ",
        "\n\n",
        " \n ",
        "'s",
        "n't",
        "é",
        "e\u0301",
        "中文",
        "\u00a0",
        "😀",
        "½",
        "\x1c",
        "\u2028",
    ]
    pieces += ["<|im_start|>", "<|im_end|>\n", "word", " word", "1234", "\u3000", "\u0301", "\x85"]
    prose = "".join(PROSE)
    texts = ["", " ", "\n"]
    for _ in range(count):
        if rng.random() < 0.5:
            start = rng.randrange(len(prose))
            texts.append(prose[start : start + rng.randrange(200)])
        else:
            texts.append("".join(rng.choice(pieces) for _ in range(rng.randrange(30))))
    return texts


def test_words_and_parts_cover_the_text() -> None:
    backend = made(CUTTING["gpt2"])
    backend.add_tokens(["]", "^"])
    for space in (before_anything(["<|im_start|>", "]", "^"]), LONE_SPACE):
        for parts in (AROUND_LETTERS, AFTER_LETTERS, WHOLE):
            cutter = TextCutter(backend, space, parts)
            for text in odd_texts(0, 1000):
                words = cutter.words(text)
                assert " ".join(words) == text
                plain = [word for word in words if cutter.has_parts(word)]
                assert "".join(cutter.parts(plain)) == BETWEEN.join(plain)


@pytest.mark.parametrize("name", CUTTING)
def test_ids_are_those_of_whole_texts(name: str) -> None:
    backend, encoder = made(CUTTING[name]), WordEncoder()
    assert encoder.can_cut(backend, FEW_TEXTS)
    for seed in range(3):
        texts = odd_texts(seed)
        ids = encoder.encode(backend, texts)
        wholes = backend.encode_batch_fast(texts, add_special_tokens=False)
        assert [one.tolist() for one in ids] == [whole.ids for whole in wholes]


def code_texts(seed: int, count: int = 400) -> list[str]:
    """ASCII characters of all classes in a row, with few spaces: what words are cut into parts for."""
    rng = random.Random(seed)
    pieces = [
        *"aZ5.,:;'\"_-/()[]{}<>=+*#@!?\\|~`^%&$\t\n\x1c\x00",
        " ",
        "self",
        "Torch",
        "don't",
        "'re",
        "2048",
        "\n\n    ",
    ]
    pieces += ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<ordinary>", "<Ordinary>"]
    return ["".join(rng.choice(pieces) for _ in range(rng.randrange(1, 25))) for _ in range(count)]


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("name", CUTTING)
def test_words_put_together_from_parts_have_the_ids_of_whole_texts(name: str, literal: bool) -> None:
    """With control tokens parsed and as ordinary text, and a token that is looked for after normalising."""
    backend, encoder = made(CUTTING[name]), WordEncoder()
    backend.add_tokens([AddedToken("<ordinary>", normalized=True)])
    backend.encode_special_tokens = literal
    assert encoder.can_cut(backend, FEW_TEXTS)
    for seed in range(3):
        texts = code_texts(seed)
        wholes = backend.encode_batch_fast(texts, add_special_tokens=False)
        assert [one.tolist() for one in encoder.encode(backend, texts)] == [whole.ids for whole in wholes]


@pytest.mark.parametrize(
    ("name", "parts"), [("gpt2", AROUND_LETTERS), ("qwen", AFTER_LETTERS), ("o200k", AFTER_LETTERS)]
)
def test_the_finest_cut_that_a_tokenizer_allows_is_taken(name: str, parts: str) -> None:
    """GPT-2 has "." and "nn" for ".nn"; later tokenizers keep the sign with the letters after it."""
    encoder = WordEncoder()
    encoder.can_cut(made(CUTTING[name]), FEW_TEXTS)
    assert encoder._cutter._parts.__self__.pattern == parts


def test_what_is_remembered_is_bounded_and_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, encoder, texts = made(CUTTING["qwen"]), WordEncoder(), odd_texts(4, 300)
    expected = [ids.tolist() for ids in encoder.encode(backend, texts)]
    monkeypatch.setattr("posttrain.data.word_encoding.MOST_BYTES", 0)
    assert [ids.tolist() for ids in encoder.encode(backend, texts)] == expected
    assert len(encoder._words) <= len({word for text in texts for word in encoder._cutter.words(text)})


@pytest.mark.parametrize("name", CUTTING)
def test_masks_are_those_of_whole_texts(name: str) -> None:
    backend, encoder, rng = made(CUTTING[name]), WordEncoder(), random.Random(5)
    texts = [text for text in odd_texts(1, 1500) if text]
    encoder.can_cut(backend, len(texts))
    encoder.encode(backend, texts)
    for text, whole in zip(texts, backend.encode_batch(texts, add_special_tokens=False)):
        edges = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        spans = [(a, b) for a, b in zip(edges[::2], edges[1::2]) if a < b]
        assert encoder.trained(backend, text, spans).tolist() == trained_tokens(whole, spans).tolist(), (text, spans)


@pytest.mark.parametrize("name", REACHING)
def test_a_tokenizer_that_looks_beyond_words_encodes_whole_texts(name: str) -> None:
    backend, encoder, texts = made(REACHING[name]), WordEncoder(), odd_texts(2)
    assert not encoder.can_cut(backend, len(texts))
    wholes = backend.encode_batch_fast(texts, add_special_tokens=False)
    assert [one.tolist() for one in encoder.encode(backend, texts)] == [whole.ids for whole in wholes]


@pytest.mark.parametrize(
    "token", [AddedToken("<gap>", lstrip=True), AddedToken("<two words>"), AddedToken("x", single_word=True)]
)
def test_an_added_token_that_reaches_over_a_cut_is_noticed_when_it_is_added(token: AddedToken) -> None:
    backend, encoder = made(CUTTING["gpt2"]), WordEncoder()
    assert encoder.can_cut(backend, FEW_TEXTS)
    backend.add_tokens([token])
    assert not encoder.can_cut(backend, FEW_TEXTS)


def test_tokens_around_a_text_are_put_around_it() -> None:
    backend, encoder = made(CUTTING["qwen"]), WordEncoder()
    ends = [(name, backend.token_to_id(name)) for name in ("<|im_start|>", "<|im_end|>")]
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A <|im_end|>", None, ends)
    texts = odd_texts(3, 100)
    wholes = backend.encode_batch_fast(texts, add_special_tokens=True)
    ids = encoder.encode(backend, texts, add_special_tokens=True)
    assert [one.tolist() for one in ids] == [whole.ids for whole in wholes]
    assert all(one.dtype == np.int32 for one in ids)


def test_a_tokenizer_that_the_trial_took_for_another_kind_is_found_out_by_a_real_text(caplog, monkeypatch):
    """Every call also encodes its longest text whole. Here the trial is told to believe anything."""
    monkeypatch.setattr("posttrain.data.word_cuts.works_piece_by_piece", lambda backend: True)
    monkeypatch.setattr("posttrain.data.word_encoding.trial_texts", lambda backend: [])
    backend, encoder = made(REACHING["two words at once"]), WordEncoder()
    texts = [f"{i} the quick brown fox jumps over the lazy dog" for i in range(FEW_TEXTS)]
    found = encoder.encode(backend, texts)
    assert [ids.tolist() for ids in found] == [backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert not encoder.can_cut(backend, FEW_TEXTS)
    assert "looks beyond words" in caplog.text
