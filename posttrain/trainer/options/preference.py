"""Options of methods that compare two answers by DPO's losses."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.options import values_of
from posttrain.losses.preference import check_preference_losses
from posttrain.trainer.options.base import check_range, option

LOSS_OPTIONS = ("label_smoothing", "discopop_tau")
"""Options that only some losses read; setting one that none of the chosen losses reads is an error."""


@dataclass
class PreferenceLossConfig:
    """Which losses, and their options; mixed into configs that have a `beta`."""

    loss_type: list[str] = option(["sigmoid"], "One or several of the 15 losses, added up with `loss_weights`.")
    loss_weights: list[float] | None = option(None, "One weight for each of `loss_type`. None: 1 each.")
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
        if self.ld_alpha is not None:
            check_range("ld_alpha", self.ld_alpha, 0, 1)
        how = {"f_divergence": self.f_divergence_type, "weighted": self.use_weighting}
        for value in values_of(self.beta):
            check_range("beta", value, 0, open_low=True)
            check_preference_losses(self.loss_type, self.loss_weights, vars(self) | {"beta": value}, **how)
