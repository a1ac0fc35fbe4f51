"""Small tokenizers of the kinds that real models have, made in milliseconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "The weather in Paris is sunny today, and the user asks the assistant about it.",
    'system user assistant tool: a question, an answer; {"name": "get_weather", "arguments": {"place": "Paris"}}',
    "Hello there. How are you? I am fine, thank you.\n\nLet me think about it for a while <think> </think>",
    "ÄÖÜ äöü ß é è ñ 你好 世界 こんにちは 🙂 < > | [ ] /",
] * 4

CONTROL_TEXT = re.compile(
    r"<\|[^|<>\s'\"]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z_]{4,}\]"
)
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def byte_level_without_control_tokens(vocab_size: int = 400) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def _wrapped(tokenizer: Tokenizer, specials: Iterable[str | AddedToken], **roles: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    wrapped.add_special_tokens({"additional_special_tokens": list(specials)})
    return wrapped


def byte_level(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like GPT-2 and SmolLM: byte-level BPE; the unknown token is also EOS, and offsets are trimmed."""
    tokenizer = byte_level_without_control_tokens()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    specials = [*specials, "<|im_start|>", "<|im_end|>"]
    return _wrapped(
        tokenizer, specials, eos_token="<|endoftext|>", bos_token="<|endoftext|>", unk_token="<|endoftext|>"
    )


def metaspace(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like Llama 2 and Mistral: SentencePiece's BPE with byte fall-back, a space before the first word only."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # The trainer marks the byte tokens special, which they are not.
    state = tokenizer.to_str().replace("\n", "")
    tokenizer = Tokenizer.from_str(
        re.sub(r'\{[^{}]*"content": ?"<0x[0-9A-F]{2}>"[^{}]*\},?', "", state).replace(",]", "]")
    )
    return _wrapped(tokenizer, [*specials, "[INST]", "[/INST]"], bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like T5: Unigram whose own vocabulary holds the control pieces, so that its model finds them in plain text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _wrapped(tokenizer, [*specials, "<extra_id_0>", "<|im_start|>", "<|im_end|>"], **roles)


def word_piece(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like BERT: lower-cased word pieces without spaces, control tokens matched after lower-casing."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]"}
    normalized = AddedToken("[turn]", normalized=True, special=True)
    return _wrapped(tokenizer, [*specials, "<|im_start|>", "<|im_end|>", normalized], **roles)


def with_plain_added_tokens(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like Qwen 3 and Phi-3: added tokens that are not special, and special ones that swallow the white space after them."""
    stripping = [AddedToken(text, rstrip=True, normalized=False, special=True) for text in ("<|end|>", "<|assistant|>")]
    plain = [text for text in specials if text not in ("<|end|>", "<|assistant|>")]
    specials = [*plain, "<|im_start|>", "<|im_end|>", *stripping]
    tokenizer = _wrapped(byte_level_without_control_tokens(), specials, eos_token="<|endoftext|>", pad_token="<|pad|>")
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_ADDED])
    return tokenizer


def many_reserved(specials: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Like Llama 3: 256 control tokens, most of them reserved; no unknown token."""
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(248)]
    named = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    return _wrapped(
        byte_level_without_control_tokens(),
        [*specials, *named, *reserved],
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )


KINDS: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "unigram": unigram,
    "word_piece": word_piece,
    "with_plain_added_tokens": with_plain_added_tokens,
    "many_reserved": many_reserved,
}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (it decodes to the very text) that knows the control tokens of a template."""
    specials = sorted(set(CONTROL_TEXT.findall(template)) - set(PLAIN_ADDED))
    tokenizer = _wrapped(byte_level_without_control_tokens(), specials, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN_ADDED])
    tokenizer.chat_template = template
    return tokenizer


@cache
def kind(name: str) -> PreTrainedTokenizerFast:
    """One shared tokenizer of each kind; do not change it."""
    return KINDS[name]()
