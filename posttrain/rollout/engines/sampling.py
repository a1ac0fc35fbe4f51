"""Draw tokens from logits with noise by counter, and say how likely they were.

With Gumbel noise n the largest of (log-weight + n) is a draw from the weights. It is done twice: a block of the vocabulary is
drawn by the blocks' log-sums, then a token of that block:

    block = argmax_b (log sum_{v in b} exp z_v  +  n_b),        token = argmax_{v in block} (z_v + n_{2^32 + v})

which is exactly softmax(z), and needs noise for one block and for the blocks instead of for the whole vocabulary. Another batch or
another kernel changes logits in their last bits. That changes such a draw only where two candidates are that close, about once in
10^5 tokens; inverting the cumulative distribution, whose edges are as close as the tokens are unlikely, would change one in 10^2.
A token of probability 0 is never drawn. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.rollout.engines.noise import gumbels
from posttrain.rollout.engines.protocol import SamplingParams

BLOCK = 1024  # part of what is promised: another size would be other draws
FIRST_TOKEN = 1 << 32  # the noise of tokens begins here in a word's stream, that of blocks at 0
NOTHING = float("-inf")
LOWEST = -1e30  # stands for the maximum of a block that holds nothing: -inf less -inf would be no number


@dataclass(frozen=True)
class DrawRule:
    """What is done to logits before a token is drawn; the part of SamplingParams that concerns one step."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, params: SamplingParams) -> DrawRule:
        return cls(**{name: getattr(params, name) for name in cls.__dataclass_fields__})

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_plain(self) -> bool:
        """Tokens are drawn from softmax(logits / temperature) itself."""
        return not (self.truncates or self.penalises or self.logit_bias)

    @property
    def numbers(self) -> tuple[float, ...]:
        return (self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty)

    def bias(self, vocabulary: int, device: torch.device) -> Tensor | None:
        """(V,) what is added to the logits."""
        if not self.logit_bias:
            return None
        wrong = [token for token in self.logit_bias if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(f"Sampling: `logit_bias` names token {wrong[0]}; this model has {vocabulary} tokens.")
        bias = torch.zeros(vocabulary)
        bias[list(self.logit_bias)] = torch.tensor(list(self.logit_bias.values()), dtype=torch.float32)
        return bias.to(device)


@dataclass(frozen=True)
class Drawn:
    """(n,) each."""

    ids: Tensor  # int64
    sampling_logps: Tensor  # float32
    policy_logps: Tensor  # float32


def draw(
    logits: Tensor,
    word: Tensor,
    rule: DrawRule,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Drawn:
    """One token a row.

    `word` (n,): of `rollout/noise`; `seen` (n, V): tokens of the row so far, for the penalty; `allowed` (n, V): of a grammar.
    """
    policy = logits.float()
    scores = policy
    if rule.penalises:
        penalised = torch.where(scores > 0, scores / rule.repetition_penalty, scores * rule.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, NOTHING)
    changed = scores is not policy
    if rule.temperature == 0:
        ids = scores.argmax(-1)
        return Drawn(ids, torch.zeros_like(word, dtype=torch.float32), logps_of(policy, ids))
    if rule.temperature != 1:
        policy = policy / rule.temperature
        scores = scores / rule.temperature if changed else policy
    if rule.truncates:
        scores, changed = truncated(scores, rule), True
    ids, sampling_logps = drawn_from(scores, word)
    return Drawn(ids, sampling_logps, logps_of(policy, ids) if changed else sampling_logps)


def logps_of(logits: Tensor, ids: Tensor) -> Tensor:
    """(n, V), (n,) -> (n,) log-probs."""
    return logits.gather(-1, ids[:, None]).squeeze(-1) - torch.logsumexp(logits, -1)


def drawn_from(scores: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
    """(n, V) float32 scores, (n,) words -> the tokens and their log-probs under softmax(scores)."""
    vocabulary = scores.shape[-1]
    missing = -vocabulary % BLOCK
    blocks = (pad(scores, (0, missing), value=NOTHING) if missing else scores).unflatten(-1, (-1, BLOCK))
    peaks = blocks.amax(-1)
    sums = (blocks - peaks.clamp(min=LOWEST)[..., None]).exp_().sum(-1)
    log_sums = peaks.double() + sums.double().log()
    numbers = torch.arange(blocks.shape[1], device=scores.device)
    block = (log_sums + gumbels(word[:, None], numbers)).argmax(-1, keepdim=True)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).double()
    tokens = block * BLOCK + torch.arange(BLOCK, device=scores.device)
    place = (inside + gumbels(word[:, None], FIRST_TOKEN + tokens)).argmax(-1, keepdim=True)
    ids = (block * BLOCK + place).clamp(max=vocabulary - 1)  # a row of NaN may point into the padding
    logps = scores.gather(-1, ids).double() - torch.logsumexp(log_sums, -1, keepdim=True)
    return ids.squeeze(-1), logps.squeeze(-1).float()


# ---- truncation ------------------------------------------------------------------------------------------------------------


def truncated(scores: Tensor, rule: DrawRule) -> Tensor:
    """-inf at the tokens that top_k, then top_p, then min_p rule out; at least one token is left."""
    if 0 < rule.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(rule.top_k).values[:, -1:], NOTHING)
    if rule.top_p < 1:
        probs = torch.softmax(scores, -1)
        scores = scores.masked_fill(probs < nucleus_floor(probs, rule.top_p), NOTHING)
    if rule.min_p > 0:
        probs = torch.softmax(scores, -1)
        scores = scores.masked_fill(probs < rule.min_p * probs.amax(-1, keepdim=True), NOTHING)
    return scores


def nucleus_floor(probs: Tensor, top_p: float) -> Tensor:
    """(n, V) -> (n, 1): the largest t with sum of { p : p >= t } at least top_p (arXiv:1904.09751).

    Positive floats are ordered as their bits are, so t is found bit by bit, in 30 sums, without sorting the vocabulary.
    """
    bits = probs.view(torch.int32)
    floor = torch.zeros(len(probs), 1, dtype=torch.int32, device=probs.device)
    for bit in range(29, -1, -1):  # 1.0 is 0x3f800000
        higher = floor + (1 << bit)
        mass = torch.where(bits >= higher, probs, 0).sum(-1, keepdim=True)
        floor = torch.where(mass >= top_p, higher, floor)
    return floor.view(torch.float32)
