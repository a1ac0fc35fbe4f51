"""Tokenizers of the families that published models use, trained small, with their splitters by the public specifications.

What differs between families is where a text is split before merges are looked for, and that is what a shortcut around the
tokenizer gets wrong. Vocabularies are trained on texts of all scripts, so that merges across the places of interest exist.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
SEED_CODER = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = r"[一-龥぀-ゟ゠-ヿ]+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str, behaviour: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behaviour, invert)


def sequence(*parts: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(parts))


SINGLE_DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTE_LEVEL: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt2": lambda: GPT2,
    "smollm, starcoder": lambda: sequence(SINGLE_DIGITS, GPT2),
    "qwen2": lambda: sequence(split(QWEN2), BYTES),
    "llama3": lambda: sequence(split(LLAMA3), BYTES),
    "o200k": lambda: sequence(split(O200K), BYTES),
    "deepseek-coder": lambda: sequence(
        split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(CJK), SINGLE_DIGITS, BYTES
    ),
    "deepseek-llm": lambda: sequence(
        split(r"[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+"), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), split(r"\s+$"), split(CJK),
        SINGLE_DIGITS, BYTES,
    ),
    "deepseek-v3": lambda: sequence(split(r"\p{N}{1,3}"), split(CJK), split(DEEPSEEK_V3), BYTES),
    "bloom": lambda: sequence(split(BLOOM), BYTES),
    "viking": lambda: sequence(split(BLOOM), SINGLE_DIGITS, BYTES),
    "seed-coder": lambda: sequence(split(SEED_CODER), BYTES),
    "falcon": lambda: sequence(pre_tokenizers.Punctuation("contiguous"), GPT2, split(r"[0-9][0-9][0-9]")),
    "whole texts": lambda: BYTES,
}  # fmt: skip


def byte_level(name: str, texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if name in ("qwen2", "deepseek-v3"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = BYTE_LEVEL[name]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def with_byte_fallback(texts: list[str], normalizer: normalizers.Normalizer) -> Tokenizer:
    """SentencePiece's BPE: spaces become a letter, no splitter, unknown characters become bytes."""
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " ")])
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=specials, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:1]  # the trainer marks the bytes special, which they are not
    return Tokenizer.from_str(json.dumps(state))


def llama2(texts: list[str]) -> Tokenizer:
    return with_byte_fallback(texts, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def gemma(texts: list[str]) -> Tokenizer:
    return with_byte_fallback(texts, normalizers.Replace(" ", "▁"))


def unigram(texts: list[str]) -> Tokenizer:
    """T5, XLM-R: pieces by likelihood, every word begins with a mark."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=9000, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_piece(texts: list[str]) -> Tokenizer:
    """BERT: lower case, words and signs, the longest piece first."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=1500, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


OTHERS: dict[str, Callable[[list[str]], Tokenizer]] = {
    "llama2": llama2, "gemma": gemma, "unigram": unigram, "wordpiece": word_piece,
}  # fmt: skip
FAMILIES = (*BYTE_LEVEL, *OTHERS)


def family(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family `name`, with an added token that overlaps itself; some have one that takes the space before it."""
    rng = random.Random(name)
    texts = [text for _ in range(1500) for text in (made_text(rng),)]
    tokenizer = OTHERS[name](texts) if name in OTHERS else byte_level(name, texts)
    unknown = {"unk_token": tokenizer.model.unk_token} if name in ("llama2", "gemma", "wordpiece") else {}
    unknown |= {"unk_token": "<unk>"} if name == "unigram" else {}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **unknown)
    wrapped.add_tokens([AddedToken("---", normalized=False)])
    if name in OTHERS:
        wrapped.add_tokens([AddedToken("<|gap|>", lstrip=True, normalized=False)])
    return wrapped


# ---------------------------------------------------------------------------------------------------------------- texts

SCRIPTS = {
    "Latin": "a-zA-Z", "Latin with marks": "À-ÖØ-öø-ÿĀ-ž", "Greek": "Α-Ωα-ω", "Cyrillic": "А-яё", "Armenian": "Ա-Ֆա-ֆ",
    "Georgian": "ა-ჰ", "Hebrew": "א-ת", "Arabic": "ء-غف-ي", "Devanagari": "अ-हा-्", "Bengali": "অ-হ", "Tamil": "அ-ஹ",
    "Telugu": "అ-హ", "Sinhala": "අ-ෆ", "Thai": "ก-ะเ-ไ", "Lao": "ກ-ະ", "Tibetan": "ཀ-ཨ", "Khmer": "ក-អ", "Ethiopic": "ሀ-ፐ",
    "Hangul": "가-힣", "Hiragana": "ぁ-ん", "Katakana": "ァ-ヶ", "Han": "一-龥", "Cherokee": "Ꭰ-Ᏼ", "Emoji": "😀-🙏",
}  # fmt: skip
WORDS = [
    "x = 1",
    "def f(self):",
    "don't",
    "I'LL",
    "self.x_y",
    "e\u0301",
    "---",
    "-----",
    "a---b",
    "<|gap|>",
    "...",
    "!?",
    "3.14e-5",
    "12345",
]
SPACES = [" "] * 12 + [
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n    ",
    "\t",
    "\r\n",
    "",
    ",",
    ", ",
    ". ",
    "。",
    "।",
    " (",
    ") ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "/",
]


def letters(ranges: str) -> str:
    """Those of "a-zA-Z"."""
    return "".join(chr(code) for a, b in zip(ranges[::3], ranges[2::3]) for code in range(ord(a), ord(b) + 1))


ALPHABETS = [letters(ranges) for ranges in SCRIPTS.values()]


def made_text(rng: random.Random) -> str:
    """Words of one or two scripts, code, digits and signs, with all sorts of space between them. Frequent words recur."""
    alphabets = rng.sample(ALPHABETS, rng.choice([1, 1, 2]))
    parts = []
    for _ in range(rng.randrange(1, 14)):
        kind = rng.random()
        if kind < 0.25:
            parts.append(rng.choice(WORDS))
        elif kind < 0.3:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 8))))
        else:
            alphabet = rng.choice(alphabets)
            few = alphabet[:6] if rng.random() < 0.6 else alphabet
            parts.append("".join(rng.choice(few) for _ in range(rng.randrange(1, 7))))
        parts.append(rng.choice(SPACES))
    return "".join(parts) if rng.random() < 0.3 else "".join(parts).strip() or "x"
