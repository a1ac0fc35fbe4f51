"""Pair: what the paired losses know about the chosen and the rejected answers of a batch; Coupling: of a whole step.

`aot` sorts the margins of all pairs of a step, so a micro-batch alone cannot know its loss. The trainer first collects the
log-probs of the whole step without gradient, asks `coupled_coefficients` for the derivative of the loss with respect to each of
them, and then gives every micro-batch a linear loss with that very value and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.losses.divergences import F_DIVERGENCES
from posttrain.losses.named_options import call


@dataclass(frozen=True)
class Pair:
    """U pairs. Log-probs are sums over the trained tokens of an answer; lengths count those tokens."""

    chosen_logps: Tensor  # (U,)
    rejected_logps: Tensor  # (U,)
    reference_chosen_logps: Tensor  # (U,)
    reference_rejected_logps: Tensor  # (U,)
    chosen_lengths: Tensor  # (U,) integers
    rejected_lengths: Tensor  # (U,) integers
    chosen_nll: Tensor | None = None  # (U,) summed over the chosen tokens, each counting 1 (LD-DPO or not); for `sft`
    weights: Tensor | None = None  # (U,) multiply the loss of a pair (WPO); detached
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5

    @classmethod
    def of(
        cls,
        batch: TokenBatch,
        policy_logps: Tensor,
        reference_logps: Tensor,
        *,
        f_divergence: str = "reverse_kl",
        f_alpha: float = 0.5,
        ld_alpha: float | None = None,
        log_collision: Tensor | None = None,
    ) -> Pair:
        """From (N,) log-probs of the trained tokens of a batch with the roles chosen and rejected.

        `ld_alpha` weighs the tokens past the shorter answer's length (LD-DPO). `log_collision`, (N,) numbers
        log sum_v p(v)^2 of the policy, asks for WPO weights.
        """
        plain = policy = batch.sequence_sum(policy_logps)
        reference = batch.sequence_sum(reference_logps)
        if ld_alpha is not None:
            token_weights = length_weights(batch, ld_alpha, policy_logps.dtype)
            policy = batch.sequence_sum(token_weights * policy_logps)
            reference = batch.sequence_sum(token_weights * reference_logps)
        return cls(
            chosen_logps=batch.role(policy, "chosen"),
            rejected_logps=batch.role(policy, "rejected"),
            reference_chosen_logps=batch.role(reference, "chosen"),
            reference_rejected_logps=batch.role(reference, "rejected"),
            chosen_lengths=batch.role(batch.counts, "chosen"),
            rejected_lengths=batch.role(batch.counts, "rejected"),
            chosen_nll=-batch.role(plain, "chosen"),
            weights=None if log_collision is None else on_policy_weights(batch, policy_logps, log_collision),
            f_divergence=f_divergence,
            f_alpha=f_alpha,
        )

    def __len__(self) -> int:
        return len(self.chosen_logps)

    @property
    def chosen_log_ratios(self) -> Tensor:
        """(U,) l_c = log policy(chosen) - log reference(chosen)."""
        return self.chosen_logps - self.reference_chosen_logps

    @property
    def rejected_log_ratios(self) -> Tensor:
        """(U,) l_r = log policy(rejected) - log reference(rejected)."""
        return self.rejected_logps - self.reference_rejected_logps

    @property
    def chosen_scores(self) -> Tensor:
        """(U,) s_c: the log-ratio as the f-divergence counts it."""
        return self._scores(self.chosen_log_ratios)

    @property
    def rejected_scores(self) -> Tensor:
        """(U,) s_r: the log-ratio as the f-divergence counts it."""
        return self._scores(self.rejected_log_ratios)

    @property
    def margins(self) -> Tensor:
        """(U,) d = s_c - s_r."""
        return self.chosen_scores - self.rejected_scores

    @property
    def margins_per_token(self) -> Tensor:
        """(U,) s_c / len_c - s_r / len_r. An answer without trained tokens has the score 0 and counts as one long."""
        chosen = self.chosen_scores / self.chosen_lengths.clamp(min=1)
        return chosen - self.rejected_scores / self.rejected_lengths.clamp(min=1)

    def metrics(self, beta: float) -> dict[str, Tensor]:
        """(U,) numbers to log. The implicit reward of an answer is beta * (log policy - log reference)."""
        chosen = beta * self.chosen_log_ratios.detach()
        rejected = beta * self.rejected_log_ratios.detach()
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
            "rewards/margins": chosen - rejected,
            "logps/chosen": self.chosen_logps.detach(),
            "logps/rejected": self.rejected_logps.detach(),
        }

    def units(self, start: int, stop: int) -> Pair:
        """The pairs `start` to `stop`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: value[start:stop] for n, value in values.items() if isinstance(value, Tensor)})

    @classmethod
    def gathered(cls, pairs: Sequence[Pair]) -> Pair:
        """The pairs of several batches as one, in order. What one of them lacks (`weights`, say) the whole lacks."""
        parts = {f.name: [getattr(pair, f.name) for pair in pairs] for f in fields(cls)}
        rules = {(pair.f_divergence, pair.f_alpha) for pair in pairs}
        if len(rules) != 1:
            raise ValueError(f"Pairs of one step share one f-divergence and its alpha; found {sorted(rules)}.")
        tensors = {
            name: torch.cat(values)
            for name, values in parts.items()
            if all(isinstance(value, Tensor) for value in values)
        }
        missing = {name: None for name, values in parts.items() if any(value is None for value in values)}
        return replace(pairs[0], **tensors, **missing)

    def _scores(self, log_ratios: Tensor) -> Tensor:
        return call(F_DIVERGENCES[self.f_divergence], log_ratios, options={"f_alpha": self.f_alpha})


def length_weights(batch: TokenBatch, ld_alpha: float, dtype: torch.dtype) -> Tensor:
    """(N,) LD-DPO, arXiv:2409.06411 eq. 10: 1 up to the length of the shorter answer of the pair, `ld_alpha` after it.

    A longer answer has a lower log-prob whatever it says; tokens that the other answer cannot match are toned down.
    """
    if batch.num_units == 0:  # a process without rows holds one filler sample, which belongs to no pair
        return torch.ones(batch.num_trained, dtype=dtype, device=batch.counts.device)
    shared = torch.minimum(batch.role(batch.counts, "chosen"), batch.role(batch.counts, "rejected"))
    shared_of_tokens = batch.expand(shared.repeat_interleave(len(batch.roles)))
    starts = batch.expand(batch.counts.cumsum(0) - batch.counts)
    place = torch.arange(batch.num_trained, device=starts.device) - starts
    return torch.ones_like(place, dtype=dtype).masked_fill(place >= shared_of_tokens, ld_alpha)


def on_policy_weights(batch: TokenBatch, policy_logps: Tensor, log_collision: Tensor) -> Tensor:
    """(U,) WPO, arXiv:2406.11827: how likely the policy is to write both answers, as weights without gradient.

    w = exp(mean_t (log p(y_t) - log sum_v p(v)^2)) of the chosen times that of the rejected answer: each token is
    compared with the probability that two draws of the policy agree, so that a typical answer weighs about 1.
    Weights above 1 stand as they are (the paper's own code cuts them off there, TRL does not).
    """
    typicality = batch.sequence_mean((policy_logps - log_collision).detach())
    return (batch.role(typicality, "chosen") + batch.role(typicality, "rejected")).exp()


@dataclass(frozen=True)
class Coupling:
    """The loss of each pair of the step, and how the summed loss changes with its log-probs. All (U,), detached."""

    shares: Tensor
    chosen: Tensor  # d sum(loss) / d chosen_logps
    rejected: Tensor  # d sum(loss) / d rejected_logps

    def units(self, start: int, stop: int) -> Coupling:
        """The part of the pairs `start` to `stop`."""
        return Coupling(self.shares[start:stop], self.chosen[start:stop], self.rejected[start:stop])


def coupled_coefficients(loss: Callable[[Pair], Tensor], pair: Pair) -> Coupling:
    """Evaluate a coupled loss, (U,) values in the order of the pairs, on the pairs of a whole step."""
    with torch.enable_grad():
        chosen = pair.chosen_logps.detach().requires_grad_()
        rejected = pair.rejected_logps.detach().requires_grad_()
        shares = loss(replace(pair, chosen_logps=chosen, rejected_logps=rejected))
        by_chosen, by_rejected = torch.autograd.grad(shares.sum(), (chosen, rejected))
    return Coupling(shares.detach(), by_chosen, by_rejected)


def linearised(pair: Pair, coupling: Coupling) -> Tensor:
    """(U,) values equal to the shares of these pairs, with the gradient that the loss of the whole step has there."""
    moved_chosen = pair.chosen_logps - pair.chosen_logps.detach()
    moved_rejected = pair.rejected_logps - pair.rejected_logps.detach()
    return coupling.shares + coupling.chosen * moved_chosen + coupling.rejected * moved_rejected
