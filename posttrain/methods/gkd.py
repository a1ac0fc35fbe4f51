"""Generalised knowledge distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.core.options import refused
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.distilling_trainer import DistillingTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import DistillingConfig, NoPackingConfig, NoRewardsConfig
from posttrain.trainer.report.model_card import Paper


@dataclass
class GKDConfig(NoPackingConfig, NoRewardsConfig, DistillingConfig):
    """Options of generalised knowledge distillation."""

    learning_rate: float = option(2e-5, "Initial learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")
    max_length: int | None = option(
        1024,
        "Longest row in tokens, prompt and completion together; what the student writes comes on top. None: no limit.",
    )
    truncation_mode: str = option(
        "keep_end", "What happens to a longer one: keep_start, keep_end, error or drop. Always counted and reported."
    )
    max_completion_length: int = option(128, "Most tokens of a completion that is written.")
    max_new_tokens: int | None = option(None, "TRL's name of `max_completion_length`.")
    temperature: float = option(0.9, "Divides the logits in sampling. The loss has a temperature of its own.")
    loss_temperature: float = option(1.0, "Divides the logits of student and teacher where they are compared.")
    lmbda: float = option(
        0.5,
        "Share of the prompts whose completion the student writes; the others keep that of the dataset, or of the teacher "
        "(`seq_kd`). Decided by a coin for each prompt, the same whatever the processes.",
    )
    seq_kd: bool = option(False, "Completions that the student does not write are the teacher's, not the dataset's.")
    num_generations: int = refused(1, "Each prompt has one completion: the student's, the teacher's or the dataset's.")
    num_generations_eval: int | None = refused(None, "Each prompt has one completion.")

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            self.max_completion_length = self.max_new_tokens
        super().__post_init__()
        check_range("loss_temperature", self.loss_temperature, 0, open_low=True)


class GKDTrainer(DistillingTrainer):
    """GKD (arXiv:2306.13649): the divergence from a teacher on the student's own completions and on those of a dataset."""

    method, title = "gkd", "generalised knowledge distillation"
    paper = Paper(
        "agarwal2024onpolicy",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and Stanczyk, Piotr and Ramos, Sabela and others",
        2024,
        "2306.13649",
        "International Conference on Learning Representations",
    )
    config_class = GKDConfig

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: GKDConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        quantization_config: Any = None,
        teacher_processing_class: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order."""
        refused = {
            "data_collator": data_collator,
            "compute_metrics": compute_metrics,
            "formatting_func": formatting_func,
        }
        refused["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        refuse_arguments(type(self).__name__, model, **refused)
        super().__init__(
            model, teacher_model, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, quantization_config=quantization_config,
            teacher_processing_class=teacher_processing_class, engine=engine,
        )  # fmt: skip

    @classmethod
    def compared_at(cls, args: Any) -> float:
        return args.loss_temperature
