"""Stored ids are those that the tokenizer gives for the whole text, for every family of tokenizers and every script."""

from __future__ import annotations

import random

import numpy as np
import pytest

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.store import building as store_building
from posttrain.data.store.prepare import prepare_dataset
from tests.data.tokenizer_families import FAMILIES, SCRIPTS, family, made_text

FORMATS = (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION)
CHAT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ eos_token }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)


def texts_of(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [made_text(rng) for _ in range(count)]


@pytest.mark.parametrize("count", [800, pytest.param(100_000, marks=pytest.mark.trust)])
@pytest.mark.parametrize("name", FAMILIES)
def test_stored_ids_are_the_tokenizers(name: str, count: int, tmp_path) -> None:
    assert len(SCRIPTS) >= 20
    assert len(FAMILIES) >= 12
    tokenizer = family(name)
    texts = texts_of(count, seed=1)
    options = PrepareOptions(cache_dir=tmp_path, max_length=None, on_bad_rows="drop")
    prepared = prepare_dataset([{"text": text} for text in texts], FORMATS, Renderer(tokenizer), options)
    # A text of marks that WordPiece strips has no token: it is the only kind that is left out.
    encoded = [(text, ids) for text, ids in zip(texts, tokenizer(texts)["input_ids"]) if ids]
    assert prepared.report.kept == len(encoded) >= count - 1
    # Some texts end in the end-of-sequence token already; it is not added a second time.
    end = [tokenizer.eos_token_id]
    wrong = [
        text
        for (text, ids), (sample,) in zip(encoded, prepared)
        if sample.input_ids.tolist() != ids + end * (ids[-1:] != end)
    ]
    assert not wrong, f"{len(wrong)} of {count}, the first: {wrong[0]!r}"


def test_the_text_of_the_report_is_split_as_deepseek_coder_does(tmp_path) -> None:
    """'x = 1' was stored as x, ' =', ' ', '1' beside longer texts of prose, which was not what the tokenizer gives."""
    tokenizer = family("deepseek-coder")
    rows = [{"text": "x = 1"}] * 99 + [{"text": "prose " * 40}]
    prepared = prepare_dataset(rows, FORMATS, Renderer(tokenizer), PrepareOptions(cache_dir=tmp_path, max_length=None))
    assert tokenizer.convert_ids_to_tokens(prepared[0][0].input_ids.tolist()) == [
        *tokenizer.tokenize("x = 1"),
        tokenizer.eos_token,
    ]


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "deepseek-coder", "bloom", "llama2", "unigram"])
def test_ids_and_masks_of_chats_are_those_of_the_rendered_text(name: str, tmp_path) -> None:
    tokenizer = family(name)
    tokenizer.chat_template = CHAT
    texts = texts_of(400, seed=2)
    chats = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(texts[::2], texts[1::2])
    ]
    options = PrepareOptions(max_length=None, assistant_only_loss=True, cache_dir=tmp_path)
    prepared = prepare_dataset(chats, FORMATS, Renderer(tokenizer), options)
    for chat, (sample,) in zip(chats, prepared):
        rendered = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        encoding = tokenizer(rendered, add_special_tokens=False, return_offsets_mapping=True)
        assert sample.input_ids.tolist() == encoding["input_ids"]
        begin = rendered.rindex(chat["messages"][1]["content"] + tokenizer.eos_token)
        inside = np.array([end > begin for _, end in encoding["offset_mapping"]])
        # A token that begins before the answer and ends inside of it is trained: the model has to produce it as a whole.
        assert sample.trained.tolist() == inside.tolist(), rendered


def test_a_store_of_an_earlier_encoding_is_not_reused(tmp_path, monkeypatch) -> None:
    tokenizer = family("gpt2")
    options = PrepareOptions(cache_dir=tmp_path, max_length=None)
    rows = [{"text": text} for text in texts_of(20, seed=3)]
    monkeypatch.setattr(store_building, "ENCODING_VERSION", 1)
    old = prepare_dataset(rows, FORMATS, Renderer(tokenizer), options)
    monkeypatch.undo()
    assert store_building.ENCODING_VERSION > 1
    new = prepare_dataset(rows, FORMATS, Renderer(tokenizer), options)
    assert new.store.folder != old.store.folder
