"""Randomness by counter: the same for the same (seed, key, sample, token), on every device and in plain Python.

    base    = m(m(m(seed + g) + key + g) + sample + g)             of a completion
    word    = m(base + (token + 1) g)                              of one of its tokens
    u(i)    = (m(word + (i + 1) g) >> 12 + 1/2) / 2^52             float64, strictly between 0 and 1, for i = 0, 1, 2, ...
    noise   = -log(-log u)                                         Gumbel's distribution

with m the finaliser and g the increment of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), all modulo 2^64.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD = (1 << 64) - 1


def _mixed(word: int) -> int:
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """The same 64 bits as torch's int64."""
    return word - (1 << 64) if word >> 63 else word


def noise_base(seed: int, key: int, sample: int) -> int:
    """Where the noise of one completion begins, as a signed 64-bit number."""
    word = 0
    for part in (seed, key, sample):
        word = _mixed((word + part + GOLDEN) & WORD)
    return _signed(word)


def word_of(base: int, token: int) -> int:
    """The word of one token, unsigned; `words` has the same for tensors."""
    return _mixed((base + (token + 1) * GOLDEN) & WORD)


def words(bases: Tensor, tokens: Tensor) -> Tensor:
    """int64 bases and token numbers -> the words of those tokens. torch's int64 wraps around as the formula does."""
    word = bases + (tokens + 1) * _signed(GOLDEN)
    word = (word ^ _shifted(word, 30)) * _signed(FIRST)
    word = (word ^ _shifted(word, 27)) * _signed(SECOND)
    return word ^ _shifted(word, 31)


def uniforms(word: Tensor, indices: Tensor) -> Tensor:
    """float64 in (0, 1); `indices` say which numbers of a word's stream."""
    return (_shifted(words(word, indices), 12).double() + 0.5) * 2.0**-52


def uniform(word: int, index: int) -> float:
    """As `uniforms`, in plain Python."""
    return ((word_of(word, index) >> 12) + 0.5) * 2.0**-52


def gumbels(word: Tensor, indices: Tensor) -> Tensor:
    """The noise that makes the largest of (log-weight + noise) a draw from the weights."""
    return -(-uniforms(word, indices).log()).log()


def _shifted(word: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's own fills in with the sign."""
    return torch.bitwise_right_shift(word, bits) & ((1 << (64 - bits)) - 1)
