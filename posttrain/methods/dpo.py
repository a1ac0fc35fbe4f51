"""Direct preference optimisation and its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.losses.formulas import PREFERENCE_FORMULAS, SCORE_FORMULAS, Formula, Totals, filled, number
from posttrain.losses.named_options import call, function_name, unused_options
from posttrain.losses.pair import Coupling, Pair, coupled_coefficients
from posttrain.losses.preference import PREFERENCE_LOSSES, check_preference_losses, preference_loss
from posttrain.trainer.options.base import BaseConfig, ReferenceConfig, SharedPromptsConfig, check_range, option
from posttrain.trainer.pair_trainer import PairTrainer
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.step.gathering import gathered_rows

LOSS_OPTIONS = ("label_smoothing", "discopop_tau")
"""Options that only some losses read; setting one that none of the chosen losses reads is an error."""


@dataclass
class DPOConfig(ReferenceConfig, SharedPromptsConfig, BaseConfig):
    """Options of direct preference optimisation."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    loss_type: list[str] = option(["sigmoid"], "One or several of the 15 losses, added up with `loss_weights`.")
    loss_weights: list[float] | None = option(None, "One weight for each of `loss_type`. None: 1 each.")
    beta: float = option(0.1, "Strength of the pull towards the reference.")
    label_smoothing: float = option(
        0.0, "Probability that a pair's label is wrong (sigmoid's relatives robust, exo_pair, aot)."
    )
    ld_alpha: float | None = option(None, "LD-DPO: weight of the tokens past the shorter answer's length. None: off.")
    f_divergence_type: str = option("reverse_kl", "reverse_kl, forward_kl, js_divergence or alpha_divergence.")
    f_alpha_divergence_coef: float = option(0.5, "alpha of alpha_divergence.")
    use_weighting: bool = option(False, "WPO: weigh pairs by how likely the policy is to write them.")
    discopop_tau: float = option(0.05, "Temperature of the discopop loss.")

    def __post_init__(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        super().__post_init__()
        check_range("beta", self.beta, 0, open_low=True)
        if self.ld_alpha is not None:
            check_range("ld_alpha", self.ld_alpha, 0, 1)
        check_preference_losses(
            self.loss_type, self.loss_weights, self, f_divergence=self.f_divergence_type, weighted=self.use_weighting
        )


class DPOTrainer(PairTrainer):
    """Direct preference optimisation (arXiv:2305.18290) and its relatives."""

    method, title = "dpo", "direct preference optimisation"
    paper = Paper(
        "rafailov2023direct",
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "Rafailov, Rafael and Sharma, Archit and Mitchell, Eric and Manning, Christopher D. and Ermon, Stefano and Finn, Chelsea",
        2023,
        "2305.18290",
        "Advances in Neural Information Processing Systems 36",
    )
    config_class = DPOConfig

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: Any = None,
        *given: Any,
        loss: Callable[..., Tensor] | None = None,
        **named: Any,
    ) -> None:
        """As BaseTrainer, and `ref_model` (None: the policy as it is now), and `loss(pair, ...)`, a custom function."""
        self.custom_loss = loss
        super().__init__(model, args, *given, ref_model=ref_model, **named)

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

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> LossOutput:
        args = self.args
        pair = self._pair(batch, policy, reference)
        if self.custom_loss is not None:
            return LossOutput(call(self.custom_loss, pair, options=args), per="unit", metrics=pair.metrics(args.beta))
        terms = preference_loss(pair, args.loss_type, args.loss_weights, args, _couplings(batch))
        return LossOutput(terms, metrics=pair.metrics(args.beta) | self.token_metrics(batch, policy))

    def _pair(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores) -> Pair:
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
        whole, start = gathered_rows(mine, self.args.world_size)
        for name in coupled:
            function = partial(call, PREFERENCE_LOSSES[name].function, options=self.args)
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
        return self._pair(batch, self.score(self.model_wrapped, batch, ()), self.reference.scores(batch))

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        weights = args.loss_weights or [1.0] * len(args.loss_type)
        terms, divided = [], []
        for name, weight in zip(args.loss_type, weights):
            line = filled(PREFERENCE_FORMULAS[name], args)
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
