"""Process reward models: a judgement of every step of an answer, learnt from labelled steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.rows.formats import STEPWISE, TOKENISED_STEPWISE
from posttrain.losses.formulas import REWARD_FORMULAS, Formula, Totals
from posttrain.losses.reward import step_cross_entropy, step_metrics
from posttrain.models.load.model import TOKEN_LABELS, innermost_model
from posttrain.models.scoring.heads import score_labels
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.options.base import BaseConfig, check_range, option
from posttrain.trainer.options.images import ImageConfig
from posttrain.trainer.report.model_card import Paper


@dataclass
class PRMConfig(ImageConfig, BaseConfig):
    """Options of process reward models."""

    learning_rate: float = option(1e-5, "Initial learning rate of AdamW.")
    step_separator: str = option("\n", "Text that is put after each step; the step is judged at its last token.")
    train_on_last_step_only: bool = option(
        False, "Train on the label of a row's last step alone. Evaluation always looks at all of them."
    )
    max_completion_length: int | None = option(
        None, "Most tokens of the steps of a row; steps that are cut off are counted and reported. None: no limit."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.step_separator:
            raise ValueError("`step_separator` is empty; a step is judged at the separator that follows it.")
        if self.max_completion_length is not None:
            check_range("max_completion_length", self.max_completion_length, 1)


class PRMTrainer(BaseTrainer):
    """Process reward model (arXiv:2211.14275): a token classifier that tells good steps from bad ones."""

    method, title = "prm", "process reward modelling"
    paper = Paper(
        "uesato2022solving", "Solving Math Word Problems With Process- and Outcome-Based Feedback",
        "Uesato, Jonathan and Kushman, Nate and Kumar, Ramana and Song, Francis and Siegel, Noah and Wang, Lisa and "
        "Creswell, Antonia and Irving, Geoffrey and Higgins, Irina",
        2022, "2211.14275",
    )  # fmt: skip
    config_class = PRMConfig
    formats = (STEPWISE, TOKENISED_STEPWISE)
    roles = ("text",)
    task = TOKEN_LABELS
    token_stats: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Any = None,
        **named: Any,
    ) -> None:
        """As BaseTrainer, with the arguments in TRL's order; `preprocess_logits_for_metrics` is given the logits of the steps."""
        refuse_arguments(type(self).__name__, model, model_init=model_init)
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks, optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics, peft_config=peft_config, **named,
        )  # fmt: skip
        innermost_model(self.model).config.step_separator = self.args.step_separator  # saved for those who score by it

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        args = self.args
        if self.vision is not None and self.vision.family.prefix_sees_itself_whole:
            raise ValueError(
                f"Models of type {self.vision.family.model_type!r} read what comes before the first judged token in both "
                "directions: what they say of a step would depend on which other steps are judged. Take a model of another family."
            )
        return {
            "step_separator": args.step_separator,
            "train_on_last_step_only": args.train_on_last_step_only and is_training,
            "max_completion_length": args.max_completion_length,
        }

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        return score_labels(model, batch, router_loss=self.loaded.router_loss_weight != 0)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        labels = _labels(batch)
        return LossOutput(
            step_cross_entropy(policy.labels, labels), per="token", metrics=step_metrics(policy.labels, labels)
        )

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        where = f"the last token of {args.step_separator!r} after a step"
        names = (
            ("p", f"softmax(head(h))[1], with h the hidden state at {where}"),
            ("label", "1 for a good step, 0 for a bad one"),
        )
        divided = f"sum over judged tokens / {totals['tokens']} judged tokens of the optimizer step"
        return Formula((REWARD_FORMULAS["step_cross_entropy"],), (divided,), names)

    def predictions(self, batch: TokenBatch, policy: TokenScores, output: LossOutput) -> tuple[Tensor, Tensor]:
        """For `compute_metrics`: logits and label of each judged step, a row a sample, filled with -100."""
        sizes = batch.counts.tolist()
        rows = (torch.split(values, sizes) for values in (policy.labels, _labels(batch)))
        return tuple(nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-100) for part in rows)


def _labels(batch: TokenBatch) -> Tensor:
    return batch.per_token.get("labels", batch.targets).long()  # an empty batch has no column, and no targets
