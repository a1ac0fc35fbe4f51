"""Triple preference optimisation: a pair, and a gold answer that is imitated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.rows.formats import TRIPLE_PREFERENCE, RowFormat
from posttrain.losses.formulas import Formula, Totals, number, of_answers, reference_free_line
from posttrain.losses.reference_free import REFERENCE_FREE_LOSSES, Answers, check_reference_free, reference_free_loss
from posttrain.trainer.options.base import BaseConfig, SharedPromptsConfig, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.pair_trainer import PairTrainer
from posttrain.trainer.report.model_card import Paper

LOSSES = ("sigmoid", "hinge", "ipo", "tpo-l")


@dataclass
class TPOConfig(SharedPromptsConfig, ImageConfig, BaseConfig):
    """Options of triple preference optimisation."""

    learning_rate: float = option(5e-7, "Initial learning rate of AdamW.")
    loss_type: str = option("sigmoid", "sigmoid, hinge, ipo, or tpo-l, which compares mean log-probs with a margin.")
    beta: float = option(0.01, "Scale of the difference of log-probs.")
    label_smoothing: float = option(0.0, "Probability that a pair's label is wrong (sigmoid, tpo-l).")
    tpo_alpha: float = option(
        1.0, "Weight of the nll of the gold answers. 0: the `reference` column is neither needed nor read."
    )
    tpo_l_gamma: float = option(0.5, "Target margin of tpo-l.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0, open_low=True)
        check_range("tpo_alpha", self.tpo_alpha, 0)
        check_reference_free(self.loss_type, LOSSES, self, self.set_by_user())


class TPOTrainer(PairTrainer):
    """Triple preference optimisation (arXiv:2405.16681). Its `reference` is a gold answer, not a model."""

    method, title = "tpo", "triple preference optimisation"
    shares_rows = True
    paper = Paper(
        "saeidi2024triple",
        "Triple Preference Optimization: Achieving Better Alignment using a Single Step Optimization",
        "Saeidi, Amir and Verma, Shivanshu and RRV, Aswin and Rasul, Kashif and Baral, Chitta",
        2024, "2405.16681",
    )  # fmt: skip
    config_class = TPOConfig
    formats = (TRIPLE_PREFERENCE,)
    roles = ("chosen", "rejected", "reference")

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        **named: Any,
    ) -> None:
        """As BaseTrainer, with the arguments in TRL's order."""
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            peft_config=peft_config, **named,
        )  # fmt: skip

    @classmethod
    def rows_read(cls, args: Any) -> tuple[tuple[RowFormat, ...], tuple[str, ...]]:
        return (cls.formats, cls.roles) if args.tpo_alpha else (PairTrainer.formats, PairTrainer.roles)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        args = self.args
        answers = Answers.of(batch, policy.logps, REFERENCE_FREE_LOSSES[args.loss_type].of_means)
        terms = [LossTerm(reference_free_loss(answers, args.loss_type, args), "unit")]
        metrics = answers.metrics(args.beta) | self.token_metrics(batch, policy)
        if args.tpo_alpha:
            terms.append(self.nll_term(batch, policy, "reference", args.tpo_alpha))
            metrics["nll_loss"] = batch.role_tokens(-policy.logps, "reference")
        return LossOutput(terms, metrics=metrics)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        terms, divided = [reference_free_line(args.loss_type, args)], [f"sum over pairs / {totals['units']} triples"]
        if args.tpo_alpha:
            terms.append(f"{number(args.tpo_alpha)} * [-logp_gold]")
            divided.append("nll: sum over the tokens of the gold answers / those tokens")
        names = of_answers(REFERENCE_FREE_LOSSES[args.loss_type].of_means, 0.0)
        return Formula(tuple(terms), tuple(f"{part} of the step" for part in divided), names)
