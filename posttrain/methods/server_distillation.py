"""On-policy distillation from a teacher on a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.losses.formulas import Formula, Totals
from posttrain.trainer.online.agents import make_agents
from posttrain.trainer.options.base import option
from posttrain.trainer.options.distilling import DistillingConfig, NoRewardsConfig
from posttrain.trainer.options.online import AgentConfig
from posttrain.trainer.options.served_teacher import ServedTeacherConfig
from posttrain.trainer.served_distilling_trainer import ServedDistillingTrainer, on_support_formula


@dataclass
class ServerDistillationConfig(ServedTeacherConfig, AgentConfig, NoRewardsConfig, DistillingConfig):
    """Options of on-policy distillation from a teacher on a server."""

    beta: float = option(
        1.0,
        "Divergence: 0 is KL(teacher, student) on the teacher's `loss_top_k` likeliest tokens, 1 is KL(student, teacher) on the "
        "token that was written, in between the generalised Jensen-Shannon one on that token and the teacher's likeliest. It is "
        "not continuous at its ends: at 0.99 its gradient is about a hundredth of that at 1.",
    )
    temperature: float = option(1.0, "Divides the logits in sampling; servers compare at 1, so that it must be 1.")
    vllm_server_port: int = option(8001, "Port of the server that writes completions; the teacher's is often 8000.")


class ServerDistillationTrainer(ServedDistillingTrainer):
    """On-policy distillation: the student writes, and a server says what the teacher finds likely at each token."""

    method, title = "server_distillation", "on-policy distillation from a server"
    config_class = ServerDistillationConfig
    needs_teacher: ClassVar[bool] = False  # in memory

    def __init__(
        self,
        model: Any,
        args: ServerDistillationConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        *,
        teacher: Any = None,
        teacher_processing_class: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order. `teacher` is one that is made already, in the place of `teacher_model_server_url`."""
        if teacher is None and not (args and args.teacher_servers()):
            raise ValueError(f"{type(self).__name__} needs a teacher's server: set `teacher_model_server_url`.")
        self.given_teacher = teacher
        self.agents = make_agents(tools, None, None)
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
            teacher_processing_class=teacher_processing_class, engine=engine,
        )  # fmt: skip

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        return on_support_formula(args, totals, with_written=args.beta > 0)
