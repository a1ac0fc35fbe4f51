"""PairTrainer: what methods that train on preference pairs have in common; PreferenceLosses: DPO's losses, offline and online."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.options import by_epoch, values_of
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.rows.formats import PREFERENCE, TOKENISED_PREFERENCE
from posttrain.losses.formulas import PREFERENCE_FORMULAS, SCORE_FORMULAS, Formula, Totals, filled, number
from posttrain.losses.named_options import call, function_name, unused_options
from posttrain.losses.pair import Coupling, Pair, coupled_coefficients
from posttrain.losses.preference import PREFERENCE_LOSSES, preference_loss
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.options.preference import LOSS_OPTIONS
from posttrain.trainer.step.gathering import gathered_rows

SIDES = ("chosen", "rejected")


class Pairs:
    """A trainer whose units are a chosen and a rejected answer, and whose loss logs a reward of each."""

    roles = SIDES
    token_stats: ClassVar[tuple[str, ...]] = ("entropy", "is_most_likely", "mean_logit")

    def nll_term(self, batch: TokenBatch, policy: TokenScores, role: str, weight: float) -> LossTerm:
        """The nll of the trained tokens of one role, to be divided by their number in the step."""
        return LossTerm(-batch.role(batch.sequence_sum(policy.logps), role), f"token:{role}", weight, entries="unit")

    def token_metrics(self, batch: TokenBatch, policy: TokenScores) -> dict[str, Tensor]:
        """The mean logit of each side's tokens, and how often the chosen ones are the likeliest."""
        found = {}
        if "mean_logit" in policy.stats:
            found |= {f"logits/{name}": batch.role_tokens(policy.stats["mean_logit"], name) for name in SIDES}
        if "is_most_likely" in policy.stats:  # of the chosen tokens only: rejected ones are not to be predicted
            found["mean_token_accuracy"] = batch.role_tokens(policy.stats["is_most_likely"], "chosen")
        return found

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Tensor, Tensor]:
        rewards = torch.stack([output.metrics[f"rewards/{name}"] for name in SIDES], dim=1)
        return rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)  # column 0 should win


class PairTrainer(Pairs, BaseTrainer):
    """A method whose rows hold a chosen and a rejected answer."""

    formats = (PREFERENCE, TOKENISED_PREFERENCE)


class ReferenceFreePairTrainer(PairTrainer):
    """A method of pairs without a reference model, whose constructor has TRL's older order of arguments."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        compute_metrics: Callable | None = None,
        **named: Any,
    ) -> None:
        refused = {"model_init": model_init, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        refuse_arguments(type(self).__name__, model, **refused)
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            peft_config=peft_config, **named,
        )  # fmt: skip


class PreferenceLosses:
    """DPO's losses of the pairs of a batch, in front of a trainer whose args are a PreferenceLossConfig."""

    @classmethod
    def check_options(cls, args: Any, loss: Callable | None = None) -> None:
        """Not checked by the config: a custom loss reads whichever of them it names."""
        losses = {name: PREFERENCE_LOSSES[name].function for name in args.loss_type}
        if loss is not None:
            losses = {function_name(loss): loss}
        ignored = unused_options(losses.values(), LOSS_OPTIONS, args.set_by_user())
        if ignored:
            raise ValueError(
                f"`{ignored[0]}` is set, but none of the losses {', '.join(losses)} reads it. Leave it out."
            )

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        if self.args.use_weighting:
            stats = (*stats, "log_sum_squared_probs")
        return super().score(model, batch, stats)

    @property
    def beta(self) -> float:
        """Of this epoch."""
        return by_epoch(self.args.beta, self.state.epoch)

    def loss_options(self) -> dict[str, Any]:
        return vars(self.args) | {"beta": self.beta}

    def preference_terms(self, batch: TokenBatch, pair: Pair) -> list[LossTerm]:
        args = self.args
        return preference_loss(pair, args.loss_type, args.loss_weights, self.loss_options(), _couplings(batch))

    def pair_of(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> Pair:
        """What the losses know about the pairs of a batch."""
        args = self.args
        return Pair.of(
            batch,
            policy.logps,
            reference.logps,
            f_divergence=args.f_divergence_type,
            f_alpha=args.f_alpha_divergence_coef,
            ld_alpha=args.ld_alpha,
            log_collision=policy.stats.get("log_sum_squared_probs"),
        )

    def before_step(self, batches: list[TokenBatch]) -> None:
        """aot sorts the pairs of the whole step: its derivative is found in a pass without gradient, and handed out.

        One micro-batch on one process is the whole step already.
        """
        coupled = [name for name in self.args.loss_type if PREFERENCE_LOSSES[name].coupled]
        if not coupled or (len(batches) == 1 and self.args.world_size == 1):
            return
        with torch.no_grad():
            pairs = [self._pair_without_gradient(batch) for batch in batches]
        mine = Pair.gathered(pairs)
        whole, start = gathered_rows(mine, self.args)
        for name in coupled:
            function = partial(call, PREFERENCE_LOSSES[name].function, options=self.loss_options())
            coupling = coupled_coefficients(function, whole)
            place = start
            for batch, pair in zip(batches, pairs):
                _hand_out(batch, name, coupling.units(place, place + len(pair)))
                place += len(pair)

    def forward_before_step(self, passes: float) -> str | None:
        is_coupled = any(PREFERENCE_LOSSES[name].coupled for name in self.args.loss_type)
        return "to compare the pairs of the step" if is_coupled and passes > 1 else None

    def _pair_without_gradient(self, batch: TokenBatch) -> Pair:
        batch = self._prepare_inputs(batch)
        self.model_wrapped.train()
        return self.pair_of(batch, self.score(self.model_wrapped, batch, ()), self.reference.scores(batch))

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        terms, divided = [], []
        for name, weight in zip(args.loss_type, weights):
            line = filled(PREFERENCE_FORMULAS[name], vars(args) | {"beta": values_of(args.beta)[0]})
            terms.append(line if weight == 1 else f"{number(weight)} * [{line}]")
            per = {"unit": f"{totals['units']} pairs", "token:chosen": "the chosen tokens"}[PREFERENCE_LOSSES[name].per]
            divided.append(f"{name}: sum over pairs / {per} of the step")
        names = [("l", "log(policy / reference) of a whole answer"), ("d", "s_c - s_r")]
        names.append(("s", filled(SCORE_FORMULAS[args.f_divergence_type], args)))
        if args.ld_alpha is not None:
            names.append(("log-probs", f"tokens past the shorter answer count {number(args.ld_alpha)}"))
        if args.use_weighting:
            names.append(("weight of a pair", "exp(mean_t(log(p) - log(sum_v(p_v**2)))), chosen times rejected"))
        used = " ".join(terms)
        kept = [pair for pair in names if len(pair[0]) > 1 or _uses(used, pair[0])]
        return Formula(tuple(terms), tuple(divided), tuple(kept))


def _hand_out(batch: TokenBatch, name: str, coupling: Coupling) -> None:
    """Write a pair's part of the coupling on both of its samples."""
    for part in ("shares", "chosen", "rejected"):
        batch.scalars[f"{name}/{part}"] = getattr(coupling, part).repeat_interleave(len(batch.roles)).to(batch.device)


def _couplings(batch: TokenBatch) -> dict[str, Coupling]:
    names = [key.removesuffix("/shares") for key in batch.scalars if key.endswith("/shares")]
    return {
        name: Coupling(
            *(batch.role(batch.scalars[f"{name}/{part}"], "chosen") for part in ("shares", "chosen", "rejected"))
        )
        for name in names
    }


def _uses(text: str, name: str) -> bool:
    found = {"l": ("l_c", "l_r", "d", "s_"), "d": ("d)", "d /"), "s": ("s_c", "d)", "d /")}[name]
    return any(part in text for part in found)
