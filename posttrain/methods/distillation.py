"""On-policy distillation from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.trainer.distilling_trainer import DistillingTrainer
from posttrain.trainer.online.agents import make_agents
from posttrain.trainer.options.base import option
from posttrain.trainer.options.distilling import DistillingConfig, NoRewardsConfig, TeacherBesideConfig
from posttrain.trainer.options.online import AgentConfig


@dataclass
class DistillationConfig(TeacherBesideConfig, AgentConfig, NoRewardsConfig, DistillingConfig):
    """Options of on-policy distillation."""

    beta: float = option(
        1.0,
        "Divergence: 0 is KL(teacher, student), 1 is KL(student, teacher), in between the generalised Jensen-Shannon one, which is "
        "not continuous at its ends: at 0.99 its gradient is about a hundredth of that at 1.",
    )
    temperature: float = option(1.0, "Divides the logits in sampling, and those of both models in the loss.")


class DistillationTrainer(DistillingTrainer):
    """On-policy distillation (arXiv:2306.13649): the student writes, and each token is compared with the teacher."""

    method, title = "distillation", "on-policy distillation"
    config_class = DistillationConfig

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: DistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        *,
        teacher_processing_class: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order. `tools` are functions that the model may call."""
        self.agents = make_agents(tools, None, None)
        super().__init__(
            model, teacher_model, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            optimizers=optimizers, quantization_config=quantization_config, peft_config=peft_config,
            teacher_processing_class=teacher_processing_class, engine=engine,
        )  # fmt: skip
