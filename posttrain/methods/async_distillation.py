"""TRL's AsyncDistillation: on-policy distillation from teachers on servers, with `async_rollouts`, under TRL's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.options import refused
from posttrain.losses.formulas import Formula, Totals
from posttrain.rollout.rollout import TEACHER_LOGPS, Rollout
from posttrain.trainer.online.served_teacher import TEACHER_TOP_IDS, TEACHER_TOP_LOGPS
from posttrain.trainer.options.base import option
from posttrain.trainer.options.distilling import DistillingConfig, NoRewardsConfig
from posttrain.trainer.options.served_teacher import ON_A_SERVER, SAMPLED, TeacherServerConfig
from posttrain.trainer.options.trl_async import TrlAsyncConfig
from posttrain.trainer.served_distilling_trainer import ServedDistillingTrainer, on_support_formula
from posttrain.trainer.trl_async_trainer import TrlAsyncTrainer

DEFAULT_TEACHER = {"default": "http://localhost:8001"}


@dataclass
class AsyncDistillationConfig(TrlAsyncConfig, TeacherServerConfig, NoRewardsConfig, DistillingConfig):
    """Options of asynchronous distillation: TRL's, and those of distillation from a server."""

    beta: float = option(
        0.0,
        "Divergence: 0 is KL(teacher, student) on the teacher's `teacher_top_k` likeliest tokens and the one that was written, 1 "
        "is KL(student, teacher) on the latter, in between the generalised Jensen-Shannon one on that token and the teacher's "
        "likeliest.",
    )
    temperature: float = option(1.0, "Divides the logits in sampling; servers compare at 1, so that it must be 1.")
    teacher_server_urls: dict[str, str] | str | None = option(
        None,
        'Teachers, each on a server of its own: name -> address; JSON text is accepted. None: {"default": "http://localhost:8001"}.'
        " Of several, the column `teacher_id` of a row names the one that is asked about its completions.",
    )
    teacher_top_k: int = option(8, "With `beta` 0: how many of the teacher's likeliest tokens are compared.")
    add_tail_bucket: bool = option(
        True,
        "All tokens that are not compared count as one more. False: both distributions are renormalised without them.",
    )
    teacher_temperature: float = refused(
        1.0,
        "A server's log-probs of given tokens are those at temperature 1, and both are compared at one temperature.",
    )
    log_completions_steps: int = refused(100, "Completions are shown with each log: see `logging_steps`.")
    teacher_model_name_or_path: str | None = refused(None, ON_A_SERVER)
    teacher_model_revision: str | None = refused(None, ON_A_SERVER)
    teacher_model_init_kwargs: dict[str, Any] | str | None = refused(None, ON_A_SERVER)

    reverse_kl_top_1_mode = SAMPLED

    @property
    def loss_top_k(self) -> int:
        return 1 if self.beta else self.teacher_top_k

    @property
    def loss_add_tail(self) -> bool:
        return self.add_tail_bucket

    def teacher_servers(self) -> dict[str, str]:
        return super().teacher_servers() or DEFAULT_TEACHER


class WorkersTeacher:
    """Of a `rollout_worker`, which asks it: it is not asked here."""

    name, words = "the teacher of `rollout_worker`", None

    def __str__(self) -> str:
        return self.name

    def check(self, tokenizer: Any) -> None:
        """It is the worker's."""


class AsyncDistillationTrainer(TrlAsyncTrainer, ServedDistillingTrainer):
    """On-policy distillation from servers, on completions that are written while earlier ones are trained on."""

    method, title = "async_distillation", "asynchronous on-policy distillation"
    config_class = AsyncDistillationConfig
    needs_teacher: ClassVar[bool] = False  # in memory

    def __init__(
        self,
        model: Any,
        args: AsyncDistillationConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
        *,
        teacher: Any = None,
        **named: Any,
    ) -> None:
        """Arguments in TRL's order. `teacher` is one that is made already, in the place of servers; further arguments are those of
        ServerDistillationTrainer, by name."""
        self.given_teacher = WorkersTeacher() if teacher is None and rollout_worker is not None else teacher
        super().__init__(
            model, args=args, train_dataset=train_dataset, processing_class=processing_class, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, rollout_worker=rollout_worker, weight_transfer=weight_transfer, **named,
        )  # fmt: skip

    def support(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """With `beta` 0 the token that was written is compared besides, where it is none of the teacher's likeliest."""
        ids, logps, inside = super().support(batch)
        if self.args.beta:
            return ids, logps, inside
        targets = batch.targets[:, None]
        written = batch.per_token.get(TEACHER_LOGPS, torch.zeros(len(ids), device=ids.device))[:, None]
        is_among = ((ids == targets) & inside).any(-1, keepdim=True)
        return torch.cat([ids, targets], -1), torch.cat([logps, written], -1), torch.cat([inside, ~is_among], -1)

    # ---- another's worker --------------------------------------------------------------------------------------------

    def annotated(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        return super().annotated(rollouts) if self.rollout_worker is None else None

    def foreign_group(self, one: Any) -> int:
        return one.prompt_id

    def foreign_tokens(self, one: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """It names the teacher's likeliest tokens by rank, last the written one where it is none of them; -1 is none."""
        ids, logps = np.asarray(one.teacher_topk_ids), np.asarray(one.teacher_topk_logprobs, dtype=np.float32)
        logps = np.where((ids >= 0) & ~np.isnan(logps), logps, -np.inf)
        written = np.where(ids == np.asarray(one.input_ids)[:, None], logps, -np.inf).max(-1)
        trained = np.asarray(one.completion_mask, dtype=bool) & (written > -np.inf)
        k = self.args.loss_top_k
        columns = {TEACHER_LOGPS: written, TEACHER_TOP_IDS: np.maximum(ids, 0)[:, :k], TEACHER_TOP_LOGPS: logps[:, :k]}
        return trained, columns

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        return on_support_formula(args, totals, with_written=True)
