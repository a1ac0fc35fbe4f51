"""Contrastive preference optimisation, SimPO and AlphaPO: pairs without a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.losses.formulas import Formula, Totals, number, of_answers, reference_free_line
from posttrain.losses.reference_free import REFERENCE_FREE_LOSSES, Answers, check_reference_free, reference_free_loss
from posttrain.trainer.options.base import BaseConfig, OlderPairOptions, SharedPromptsConfig, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.pair_trainer import ReferenceFreePairTrainer
from posttrain.trainer.report.model_card import Paper

LOSSES = ("sigmoid", "hinge", "ipo", "simpo")
ALPHAPO = "alphapo"


@dataclass
class CPOConfig(OlderPairOptions, SharedPromptsConfig, ImageConfig, BaseConfig):
    """Options of contrastive preference optimisation."""

    learning_rate: float = option(1e-6, "Initial learning rate of AdamW.")
    loss_type: str = option(
        "sigmoid", "sigmoid (CPO), hinge, ipo, simpo, or alphapo, which stands for simpo with `cpo_alpha` 0."
    )
    beta: float = option(0.1, "Scale of the difference of log-probs. SimPO's authors use 2 to 10.")
    label_smoothing: float = option(0.0, "Probability that a pair's label is wrong (sigmoid, simpo).")
    cpo_alpha: float = option(
        1.0, "Weight of the nll of the chosen answers. SimPO proper has 0: with 1 its loss is CPO-SimPO."
    )
    simpo_gamma: float = option(0.5, "Target margin of simpo. Its authors use 0.3 to 1 times `beta`.")
    alpha: float = option(0.0, "AlphaPO: shape of the reward (ipo, simpo). 0: the mean log-prob itself.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == ALPHAPO:
            if "cpo_alpha" in self.set_by_user() and self.cpo_alpha:
                raise ValueError(
                    f"`loss_type` alphapo has no nll term; got `cpo_alpha` {self.cpo_alpha}. Choose simpo."
                )
            self.loss_type, self.cpo_alpha = "simpo", 0.0
        check_range("beta", self.beta, 0, open_low=True)
        check_range("cpo_alpha", self.cpo_alpha, 0)
        check_reference_free(self.loss_type, LOSSES, self, self.set_by_user())


class CPOTrainer(ReferenceFreePairTrainer):
    """Contrastive preference optimisation (arXiv:2401.08417), SimPO (arXiv:2405.14734) and AlphaPO (arXiv:2501.03884)."""

    method, title = "cpo", "contrastive preference optimisation"
    shares_rows = True
    paper = Paper(
        "xu2024contrastive",
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "Xu, Haoran and Sharaf, Amr and Chen, Yunmo and others",
        2024, "2401.08417", "International Conference on Machine Learning",
    )  # fmt: skip
    config_class = CPOConfig

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        args = self.args
        answers = Answers.of(batch, policy.logps, REFERENCE_FREE_LOSSES[args.loss_type].of_means, args.alpha)
        terms = [LossTerm(reference_free_loss(answers, args.loss_type, args), "unit")]
        if args.cpo_alpha:
            terms.append(self.nll_term(batch, policy, "chosen", args.cpo_alpha))
        metrics = answers.metrics(args.beta) | self.token_metrics(batch, policy)
        return LossOutput(terms, metrics=metrics | {"nll_loss": batch.role_tokens(-policy.logps, "chosen")})

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        of_means = REFERENCE_FREE_LOSSES[args.loss_type].of_means
        terms, divided = [reference_free_line(args.loss_type, args)], [f"sum over pairs / {totals['units']} pairs"]
        if args.cpo_alpha:
            terms.append(f"{number(args.cpo_alpha)} * [-logp_c]")
            divided.append("nll: sum over the chosen tokens / the chosen tokens")
        return Formula(tuple(terms), tuple(f"{part} of the step" for part in divided), of_answers(of_means, args.alpha))
