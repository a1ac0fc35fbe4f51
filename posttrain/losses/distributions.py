"""Divergences between two distributions over tokens: p of the student, q of the teacher, both given as log-probs.

Everything but ULD is one family. With the mixture m = (1 - w) p + w q,

    D = a KL(q, m) + b KL(p, m)

                                          a       b         w
    forward KL(q, p)    beta = 0          1       0         0
    reverse KL(p, q)    beta = 1          0       1         1
    generalised Jensen-Shannon            beta    1 - beta  beta           arXiv:2306.13649
    skewed forward KL(q, s q + (1-s) p)   1       0         s              arXiv:2402.03898
    skewed reverse KL(p, s p + (1-s) q)   0       1         1 - s

and the slope by the student's logits is p (g - sum_v p g), g = dD/dp = b (log(p/m) + 1 - (1-w) p/m) - a (1-w) q/m.
**Jensen-Shannon is not continuous at its ends**: D / beta -> KL(q, p) as beta -> 0, so beta = 0.01 has about a hundredth of the
gradient of beta = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

JSD, SKEW_FORWARD, SKEW_REVERSE, SORTED_L1 = "jsd", "skew_forward", "skew_reverse", "sorted_l1"
KINDS = (JSD, SKEW_FORWARD, SKEW_REVERSE, SORTED_L1)
TEACHER, STUDENT, BOTH = "teacher", "student", "both"
LARGEST_LOG_MASS = -1e-7
"""Log of the mass of a support is cut here, so that something is left for its tail, and its logarithm is finite."""


class Shares(NamedTuple):
    """`a KL(q, m) + b KL(p, m)` with `m = (1 - w) p + w q`."""

    a: float
    b: float
    w: float


@dataclass(frozen=True)
class Divergence:
    """What is compared at each position. Hashable."""

    beta: float = 0.5
    kind: str = JSD
    skew: float = 0.1
    top_k: int = 0  # 0: the whole vocabulary
    top_k_of: str = TEACHER  # whose likeliest tokens are the support
    tail: bool = False  # everything outside of the support as one more token; otherwise it is renormalised
    realised: bool = False  # the token that follows stands in the place of the student's likeliest one: with top_k 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Unknown kind of divergence {self.kind!r}: one of {', '.join(KINDS)}.")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta lies between 0 (forward KL) and 1 (reverse KL); got {self.beta}.")
        if not 0 <= self.skew < 1:
            raise ValueError(
                f"skew is the share of a distribution in its own mixture, from 0 to below 1; got {self.skew}."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is a number of tokens, 0 for the whole vocabulary; got {self.top_k}.")
        if self.top_k_of not in (TEACHER, STUDENT, BOTH):
            raise ValueError(f"top_k_of is one of {TEACHER}, {STUDENT} and {BOTH}; got {self.top_k_of!r}.")
        if self.tail and not self.top_k:
            raise ValueError(
                "tail is what lies outside of top_k tokens; with top_k 0, the whole vocabulary, there is none."
            )
        if self.realised and (self.top_k != 1 or self.top_k_of == TEACHER):
            raise ValueError(
                f"realised is for a support of top_k 1 of {STUDENT} or {BOTH}: it is one token a position."
            )
        if self.kind == SORTED_L1:
            if self.top_k and self.top_k_of != BOTH:
                raise ValueError(
                    f"sorted_l1 compares the likeliest of each side: top_k_of must be {BOTH!r} with top_k."
                )
        elif self.top_k == 1 and not self.tail and self.top_k_of != BOTH:
            raise ValueError("One token without a tail has probability 1 in both distributions: the loss is always 0.")

    @property
    def shares(self) -> Shares:
        """Of every kind but sorted_l1."""
        if self.kind == SKEW_FORWARD:
            return Shares(1.0, 0.0, self.skew)
        if self.kind == SKEW_REVERSE:
            return Shares(0.0, 1.0, 1 - self.skew)
        if self.beta in (0, 1):  # separate formulas: the factor beta in front of KL(q, m) is not there
            return Shares(1.0 - self.beta, float(self.beta), float(self.beta))
        return Shares(self.beta, 1 - self.beta, self.beta)

    @property
    def is_whole(self) -> bool:
        """Whether it is of the family above, over the whole vocabulary: what fused heads compute."""
        return self.kind != SORTED_L1 and not self.top_k

    def __call__(self, student_logps: Tensor, teacher_logps: Tensor, targets: Tensor | None = None) -> Tensor:
        """(n, V), (n, V) normalised log-probs -> (n,). Only sorted_l1 takes vocabularies of two sizes.

        `targets`: (n,) the tokens that follow, which `realised` asks for.
        """
        if self.kind == SORTED_L1:
            return sorted_l1(student_logps, teacher_logps, self.top_k, self.tail)
        if not self.top_k or self.top_k >= student_logps.shape[-1]:
            return mixed_divergence(student_logps, teacher_logps, self.shares)
        ids, inside = support(
            student_logps, teacher_logps, self.top_k, self.top_k_of, targets if self.realised else None
        )
        return on_support(student_logps.gather(-1, ids), teacher_logps.gather(-1, ids), self, inside)


def mixed_divergence(student_logps: Tensor, teacher_logps: Tensor, shares: Shares) -> Tensor:
    """`a KL(q, m) + b KL(p, m)` over the last dimension. Entries of -inf have no mass, and no gradient."""
    a, b, w = shares
    mixture = log_mixture(student_logps, teacher_logps, w)
    parts = [share * kl(of, mixture) for share, of in ((a, teacher_logps), (b, student_logps)) if share]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def kl(logps: Tensor, other_logps: Tensor) -> Tensor:
    """KL(first, second) = sum_v exp(first) (first - second); 0 log 0 = 0, and its gradient is 0 and not NaN."""
    differences = torch.where(logps == -torch.inf, 0.0, logps - other_logps)  # before the product, not after it
    return (logps.exp() * differences).sum(-1)


def log_mixture(student_logps: Tensor, teacher_logps: Tensor, w: float) -> Tensor:
    """log((1 - w) p + w q); any finite number where both are 0."""
    if w in (0, 1):
        return teacher_logps if w else student_logps
    share = torch.tensor(w, dtype=torch.float64)
    ours, theirs = student_logps + float(torch.log1p(-share)), teacher_logps + float(share.log())
    neither = (ours == -torch.inf) & (theirs == -torch.inf)  # logaddexp's gradient would be NaN there
    return torch.logaddexp(torch.where(neither, 0.0, ours), theirs)


def support(
    student_logps: Tensor, teacher_logps: Tensor, top_k: int, of: str, realised: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(n, k) ids of the likeliest tokens; of both: (n, 2k), and where a token has not been named before.

    `realised`: (n,) tokens in the place of the student's likeliest.
    """
    with torch.no_grad():
        found = [
            logps.topk(top_k, -1).indices if name == TEACHER or realised is None else realised[:, None]
            for name, logps in ((TEACHER, teacher_logps), (STUDENT, student_logps))
            if of in (name, BOTH)
        ]
        if len(found) == 1:
            return found[0], None
        theirs, ours = found
        is_theirs = torch.zeros_like(student_logps, dtype=torch.bool).scatter_(-1, theirs, True)
        is_new = ~is_theirs.gather(-1, ours)
        return torch.cat(found, -1), torch.cat([torch.ones_like(theirs, dtype=torch.bool), is_new], -1)


def on_support(
    student_logps: Tensor, teacher_logps: Tensor, divergence: Divergence, inside: Tensor | None = None
) -> Tensor:
    """The divergence from log-probs of k tokens, (n, k) each: all that a served teacher says.

    `inside`: (n, k) bool, which of them belong to the support (at least one a row); others do not count, whatever they are.
    With `divergence.tail` the rest of each distribution is one more token, otherwise both are renormalised. The support itself
    (`top_k`, `top_k_of`) is the caller's.
    """
    if student_logps.shape[-1] < 2 and not divergence.tail:
        raise ValueError("One token without a tail has probability 1 in both distributions: the loss is always 0.")
    ours, theirs = (_completed(logps, inside, divergence.tail) for logps in (student_logps, teacher_logps))
    return mixed_divergence(ours, theirs, divergence.shares)


def _completed(logps: Tensor, inside: Tensor | None, tail: bool) -> Tensor:
    """Log-probs that sum to 1: with one more token, or renormalised."""
    if inside is not None:
        logps = torch.where(inside, logps, -torch.inf)
    mass = logps.logsumexp(-1, keepdim=True)
    if not tail:
        return logps - mass
    return torch.cat([logps, (-torch.expm1(mass.clamp(max=LARGEST_LOG_MASS))).log()], -1)


def sampled_divergence(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """(N,) `sg(log p - log q) log p` at the written tokens: its mean over what the student writes has the gradient of KL(p, q)."""
    return (logps - teacher_logps).detach() * logps


def sorted_l1(student_logps: Tensor, teacher_logps: Tensor, top_k: int = 0, tail: bool = False) -> Tensor:
    """ULD (arXiv:2402.12030): sum_i |sort(p)_i - sort(q)_i|, the shorter one padded with 0; at most 2.

    `top_k` compares the k largest of each, and with `tail` the sums of the rest: sorting 150,000 words is expensive. What is
    left out is at most the rest of both.
    """
    sizes = [logps.shape[-1] for logps in (student_logps, teacher_logps)]
    count = min(top_k or max(sizes), max(sizes))
    ours, theirs = (
        torch.nn.functional.pad(logps.exp().topk(min(count, size), -1).values, (0, count - min(count, size)))
        for logps, size in zip((student_logps, teacher_logps), sizes)
    )
    found = (ours - theirs).abs().sum(-1)
    return found + (ours.sum(-1) - theirs.sum(-1)).abs() if tail else found
