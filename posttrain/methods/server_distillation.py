"""On-policy distillation from a teacher on a server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.processes import of_every_process
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Sample
from posttrain.losses.distributions import BOTH, TEACHER, Divergence, on_support
from posttrain.losses.formulas import Formula, Totals, divergence_formula
from posttrain.models.load.model import innermost_model
from posttrain.models.scoring.token_scores import Measure, logps_of_tokens, score_tokens
from posttrain.rollout.collector import Collected
from posttrain.rollout.rollout import TEACHER_LOGPS
from posttrain.trainer.distilling_trainer import DistillingTrainer
from posttrain.trainer.online.agents import make_agents
from posttrain.trainer.online.rollout_metrics import as_tensors
from posttrain.trainer.online.served_teacher import TEACHER_TOP_IDS, TEACHER_TOP_LOGPS, ServedTeacher
from posttrain.trainer.options.base import option
from posttrain.trainer.options.distilling import DistillingConfig, NoRewardsConfig
from posttrain.trainer.options.online import AgentConfig
from posttrain.trainer.options.served_teacher import ServedTeacherConfig
from posttrain.trainer.report.model_card import Paper

logger = logging.getLogger(__name__)

CANDIDATES = "candidates"


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


class ServerDistillationTrainer(DistillingTrainer):
    """On-policy distillation: the student writes, and a server says what the teacher finds likely at each token."""

    method, title = "server_distillation", "on-policy distillation from a server"
    paper = Paper(
        "agarwal2024onpolicy",
        "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and Stanczyk, Piotr and Ramos, Sabela and others",
        2024,
        "2306.13649",
        "International Conference on Learning Representations",
    )
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
        teacher: ServedTeacher | None = None,
        teacher_processing_class: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order. `teacher` is one that is made already, in the place of `teacher_model_server_url`."""
        if teacher is None and getattr(args, "teacher_model_server_url", None) is None:
            raise ValueError(f"{type(self).__name__} needs a teacher's server: set `teacher_model_server_url`.")
        self.given_teacher = teacher
        self.agents = make_agents(tools, None, None)
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config,
            teacher_processing_class=teacher_processing_class, engine=engine,
        )  # fmt: skip

    # ---- the teacher -------------------------------------------------------------------------------------------------

    def make_teacher(self, policy: Any) -> ServedTeacher:
        if self.given_teacher is not None:
            return self.given_teacher
        args = self.args
        return ServedTeacher(
            args.teacher_model_server_url,
            args.loss_top_k,
            token_file=args.teacher_server_token_file,
            wait_seconds=args.teacher_server_timeout,
            call_seconds=args.teacher_timeout,
            tokenizer=self.teacher_tokenizer,
            student_words=innermost_model(self.model).get_input_embeddings().num_embeddings,
        )

    def annotated(self, samples: list[Sample]) -> dict[int, str]:
        """Ask the teacher about each; those without an answer are masked, and too many of them end the run, on all processes."""
        failed = self.teacher.annotate(samples)
        found = of_every_process((len(samples), list(failed.values())), self.args.world_size)
        asked, reasons = sum(count for count, _ in found), [why for _, part in found for why in part]
        if not reasons:
            return failed
        said = f"The teacher's server left {len(reasons)} of {asked} completions of a generation unanswered"
        most = self.args.teacher_max_unanswered
        if len(reasons) > most * asked:
            raise RuntimeError(
                f"{said}, more than `teacher_max_unanswered`={most:g} of them. The first: {reasons[0]} When the server answers "
                "again, resume from the last checkpoint."
            )
        logger.warning(f"{said}; they are masked. The first: {reasons[0]}")
        return failed

    def _measure(self, collected: Collected, mode: str) -> None:
        super()._measure(collected, mode)
        asked = [rollout for rollout in collected.rollouts if not rollout.is_unwritten]
        unanswered = [TEACHER_LOGPS not in rollout.sample.per_token for rollout in asked]
        self.metrics.add(mode, as_tensors({"teacher/unanswered": unanswered}))

    def identity_parts(self) -> dict[str, Any]:
        """Of a server the model and not the address: one that was started again may be elsewhere."""
        return super().identity_parts() | {"teacher": self.teacher.name}

    # ---- the step ----------------------------------------------------------------------------------------------------

    @property
    def divergence(self) -> Divergence:
        whose = BOTH if 0 < self.args.beta < 1 else TEACHER
        return Divergence(self.args.beta, top_k=self.args.loss_top_k, top_k_of=whose, tail=self.args.loss_add_tail)

    def support(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(N, k) each: the tokens that are compared, the teacher's log-probs of them, and which of them count."""
        shape = (batch.num_trained, self.args.loss_top_k)
        column = batch.per_token  # a pass without tokens has none
        ids = column.get(TEACHER_TOP_IDS, torch.zeros(shape, device=batch.device)).long()[:, : shape[1]]
        top = column.get(TEACHER_TOP_LOGPS, torch.zeros(shape, device=batch.device))[:, : shape[1]]
        written = column.get(TEACHER_LOGPS, torch.zeros(shape[:1], device=batch.device))[:, None]
        targets = batch.targets[:, None]
        if self.args.beta == 0:
            return ids, top, top > -torch.inf
        always = torch.ones_like(targets, dtype=torch.bool)
        if self.args.beta == 1:
            return targets, written, always
        once = torch.cat([always, ids != targets], -1)  # a token that is both
        return torch.cat([ids, targets], -1), torch.cat([top, written], -1), once

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        # The token that was written has its log-prob anyway, and from a fused head.
        measured = Measure(logps_of_tokens, (self.support(batch)[0],), differentiable=True)
        measures = {} if self.args.beta == 1 else {CANDIDATES: measured}
        return score_tokens(
            model, batch, stats, measures=measures, vocabulary=self.vocabulary, **self.scoring_options()
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        _, theirs, inside = self.support(batch)
        ours = policy.stats.get(CANDIDATES, policy.logps[:, None])
        values = on_support(ours, theirs.to(ours.dtype), self.divergence, inside)
        return LossOutput(values, per="token", metrics=self.losses_by_author(batch, values))

    # ---- what is said of the run -------------------------------------------------------------------------------------

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        one_more = "the rest as one more" if args.loss_add_tail else "renormalised"
        k = args.loss_top_k
        tokens = f"the teacher's {k} likeliest tokens" if k > 1 else "the teacher's likeliest token"
        if args.beta:
            tokens = "the token that was written" if args.beta == 1 else f"{tokens} and the one that was written"
        names = (("p, q", f"student and teacher at temperature 1; v: {tokens}, {one_more}"),)
        return divergence_formula(args.beta, totals, names)
