"""ServedDistillingTrainer: a DistillingTrainer whose teacher is on a server, always or where its options say so.

The server is asked once for each sample, when it is collected; its numbers travel with the sample. Mixed in before the trainer that
a method is with a teacher beside the student.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.processes import of_every_process
from posttrain.core.results import LossOutput, TokenScores
from posttrain.losses.distributions import BOTH, TEACHER, Divergence, on_support
from posttrain.losses.formulas import Formula, Totals, divergence_formula
from posttrain.models.load.model import innermost_model
from posttrain.models.load.teacher import Teacher
from posttrain.models.scoring.token_scores import Measure, logps_of_tokens, score_tokens
from posttrain.rollout.collector import Collected
from posttrain.rollout.prompt_rows import PromptRows
from posttrain.rollout.rollout import TEACHER_LOGPS, Rollout
from posttrain.trainer.distilling_trainer import DistillingTrainer
from posttrain.trainer.online.rollout_metrics import as_tensors
from posttrain.trainer.online.served_teacher import (
    TEACHER_ID,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPS,
    ServedTeacher,
    ServedTeachers,
    chosen_teacher,
)

logger = logging.getLogger(__name__)

CANDIDATES = "candidates"


def on_support_formula(args: Any, totals: Totals, with_written: bool) -> Formula:
    """On the tokens of `support`; `with_written`: also the written one, where it is none of the teacher's likeliest."""
    one_more, k = "the rest as one more" if args.loss_add_tail else "renormalised", args.loss_top_k
    tokens = f"the teacher's {k} likeliest tokens" if k > 1 else "the teacher's likeliest token"
    if with_written:
        tokens = "the token that was written" if args.beta == 1 else f"{tokens} and the one that was written"
    names = (("p, q", f"student and teacher at temperature 1; v: {tokens}, {one_more}"),)
    return divergence_formula(args.beta, totals, names)


class ServedDistillingTrainer(DistillingTrainer):
    """See the module's docstring."""

    teacher: ServedTeacher | ServedTeachers | Teacher
    given_teacher: Any = None  # one that is made already

    # ---- the teacher -------------------------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str) -> Any:
        """Rows that name no teacher, or one that is not there, are found before anything is loaded; those of a stream when they
        are read."""
        rows = super()._prepared(dataset, name)
        if self.args.is_served and len(self.args.teacher_servers()) > 1 and isinstance(rows, PromptRows):
            named = rows.dataset[TEACHER_ID] if TEACHER_ID in rows.dataset.column_names else [None]
            for row, one in enumerate(named):
                chosen_teacher(self.args.teacher_servers(), {TEACHER_ID: one}, row)
        return rows

    def _refuse_images(self, name: str) -> None:
        """A server would read placeholders without their images, and teach what a blind model says."""
        super()._refuse_images(name)
        if self.args.is_served:
            raise ValueError(
                f"The dataset {name} has images, and a teacher on a server is sent token ids only so far: take a method with a "
                "teacher in memory, such as GKD or Distillation."
            )

    def make_teacher(self, policy: Any) -> ServedTeacher | ServedTeachers | Teacher:
        args = self.args
        if self.given_teacher is not None:
            return self.given_teacher
        if not args.is_served:
            return super().make_teacher(policy)
        made = {
            name: ServedTeacher(
                url,
                args.top_k_asked,
                token_file=args.teacher_server_token_file,
                wait_seconds=args.teacher_server_timeout,
                call_seconds=args.teacher_timeout,
                tokenizer=self.teacher_tokenizer,
                student_words=innermost_model(self.model).get_input_embeddings().num_embeddings,
            )
            for name, url in args.teacher_servers().items()
        }
        return ServedTeachers(made) if len(made) > 1 else next(iter(made.values()))

    def annotated(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        """Ask the teacher about each; those without an answer are masked, and too many of them end the run, on all processes."""
        if not self.args.is_served:
            return super().annotated(rollouts)
        samples = [rollout.sample for rollout in rollouts]
        if isinstance(self.teacher, ServedTeachers):
            names = [chosen_teacher(self.teacher.by_name, rollout.columns, rollout.sample.row) for rollout in rollouts]
            failed = self.teacher.annotate(samples, names)
        else:
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
        if not self.args.is_served:
            return
        asked = [rollout for rollout in collected.rollouts if not rollout.is_unwritten]
        unanswered = {"teacher/unanswered": asked}
        if isinstance(self.teacher, ServedTeachers):
            for name in self.teacher.by_name:
                own = [rollout for rollout in asked if rollout.columns.get(TEACHER_ID) == name]
                unanswered[f"teacher/{name}/unanswered"] = own
        lacking = {
            name: [TEACHER_LOGPS not in one.sample.per_token for one in part] for name, part in unanswered.items()
        }
        self.metrics.add(mode, as_tensors(lacking))

    def identity_parts(self) -> dict[str, Any]:
        """Of a server the model and not the address: one that was started again may be elsewhere."""
        parts = super().identity_parts()
        return parts | {"teacher": self.teacher.name} if self.args.is_served else parts

    # ---- the step ----------------------------------------------------------------------------------------------------

    @property
    def served_divergence(self) -> Divergence:
        """On what a server says."""
        whose = BOTH if 0 < self.args.beta < 1 else TEACHER
        return Divergence(self.args.beta, top_k=self.args.loss_top_k, top_k_of=whose, tail=self.args.loss_add_tail)

    def support(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(N, k) each: the tokens that are compared, the teacher's log-probs of them, and which of them count."""
        shape = (batch.num_trained, self.args.loss_top_k)
        column = batch.per_token  # a pass without tokens has none
        written = column.get(TEACHER_LOGPS, torch.zeros(shape[:1], device=batch.device))[:, None]
        targets = batch.targets[:, None]
        always = torch.ones_like(targets, dtype=torch.bool)
        if self.args.beta == 1:
            return targets, written, always
        ids = column.get(TEACHER_TOP_IDS, torch.zeros(shape, device=batch.device)).long()[:, : shape[1]]
        top = column.get(TEACHER_TOP_LOGPS, torch.zeros(shape, device=batch.device))[:, : shape[1]]
        if self.args.beta == 0:
            return ids, top, top > -torch.inf
        once = torch.cat([always, ids != targets], -1)  # a token that is both
        return torch.cat([ids, targets], -1), torch.cat([top, written], -1), once

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        if not self.args.is_served:
            return super().score(model, batch, stats)
        # The token that was written has its log-prob anyway, and from a fused head.
        measured = Measure(logps_of_tokens, (self.support(batch)[0],), differentiable=True)
        measures = {} if self.args.beta == 1 else {CANDIDATES: measured}
        return score_tokens(
            model, batch, stats, measures=measures, vocabulary=self.vocabulary, **self.scoring_options()
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        if not self.args.is_served:
            return super().loss(batch, policy, reference)
        _, theirs, inside = self.support(batch)
        ours = policy.stats.get(CANDIDATES, policy.logps[:, None])
        values = on_support(ours, theirs.to(ours.dtype), self.served_divergence, inside)
        return LossOutput(values, per="token", metrics=self.losses_by_author(batch, values))
